#!/bin/bash
# gpt: a training run of ortflow, in /scratch/runs/gpt
#
#SBATCH --job-name=gpt
#SBATCH --comment="ortflow 6f1d0c52"
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=2
#SBATCH --cpus-per-task=2
#SBATCH --mem=2G
#SBATCH --time=12:00:00
#SBATCH --kill-on-invalid-dep=yes
#SBATCH --no-requeue
#SBATCH --signal=B:USR2@90
#SBATCH --open-mode=append
#SBATCH --output=/scratch/runs/gpt/logs/slurm-%j.log

trap '' USR2

# The supervisor process starts the ranks, restarts them when they fail, and requeues a preempted job.
cd /
exec /home/me/venv/bin/python -m ortflow.launchers.slurm.run_supervisor /scratch/runs/gpt -- \
  /usr/bin/mpirun --map-by ppr:2:node --bind-to none -n 4 \
    /home/me/venv/bin/python -m ortflow.workflow.rank /scratch/runs/gpt
