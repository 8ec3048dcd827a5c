#!/bin/bash
# gpt: a training run of ortflow, in /scratch/runs/gpt
#
#SBATCH --job-name=gpt
#SBATCH --comment="ortflow 6f1d0c52"
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --kill-on-invalid-dep=yes
#SBATCH --requeue
#SBATCH --signal=B:USR2@90
#SBATCH --open-mode=append
#SBATCH --output=/scratch/runs/gpt/logs/slurm-%j.log

trap '' USR2

# The supervisor process starts the ranks, restarts them when they fail, and requeues a preempted job.
cd /
exec /home/me/venv/bin/python -m ortflow.launchers.slurm.run_supervisor /scratch/runs/gpt -- \
  srun --mpi=none --nodes=1 --ntasks=1 --ntasks-per-node=1 --kill-on-bad-exit=1 --wait=0 \
    --unbuffered --export=ALL \
    /home/me/venv/bin/python -m ortflow.workflow.rank /scratch/runs/gpt
