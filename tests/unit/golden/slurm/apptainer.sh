#!/bin/bash
# gpt: a training run of ortflow, in /scratch/runs/gpt
#
#SBATCH --job-name=gpt
#SBATCH --comment="ortflow 6f1d0c52"
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=2
#SBATCH --cpus-per-task=2
#SBATCH --gpus-per-task=1
#SBATCH --mem=2G
#SBATCH --time=12:00:00
#SBATCH --kill-on-invalid-dep=yes
#SBATCH --requeue
#SBATCH --signal=B:USR2@90
#SBATCH --open-mode=append
#SBATCH --output=/scratch/runs/gpt/logs/slurm-%j.log

trap '' USR2

# The supervisor process starts the ranks, restarts them when they fail, and requeues a preempted job.
cd /
exec /home/me/venv/bin/python -m ortflow.launchers.slurm.run_supervisor /scratch/runs/gpt -- \
  srun --mpi=pmi2 --nodes=2 --ntasks=4 --ntasks-per-node=2 --cpus-per-task=2 --gpus-per-task=1 \
    --kill-on-bad-exit=1 --wait=0 --unbuffered --export=ALL \
    apptainer exec --nv --bind=/scratch/runs/gpt:/scratch/runs/gpt --bind=/data/gpt:/data/gpt \
      /images/ort.sif python -m ortflow.workflow.rank /scratch/runs/gpt
