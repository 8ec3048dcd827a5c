#!/bin/bash
# gpt: training runs of ortflow, one a task, in /scratch/it's 100%-$HOME `id` "x"-%a
#
#SBATCH --job-name=gpt
#SBATCH --comment="ortflow 6f1d0c52"
#SBATCH --array=0-7
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --kill-on-invalid-dep=yes
#SBATCH --requeue
#SBATCH --signal=B:USR2@90
#SBATCH --open-mode=append
#SBATCH --output="/scratch/it's 100%%-$HOME `id` \"x\"-%a/logs/slurm-%A_%a.log"

trap '' USR2

# The supervisor process starts the ranks, restarts them when they fail, and requeues a preempted job.
cd /
exec /home/me/venv/bin/python -m ortflow.launchers.slurm.run_supervisor \
  '/scratch/it'"'"'s 100%-$HOME `id` "x"-'"$SLURM_ARRAY_TASK_ID" -- \
  srun --mpi=none --nodes=1 --ntasks=1 --ntasks-per-node=1 --kill-on-bad-exit=1 --wait=0 \
    --unbuffered --export=ALL \
    /home/me/venv/bin/python -m ortflow.workflow.rank \
      '/scratch/it'"'"'s 100%-$HOME `id` "x"-'"$SLURM_ARRAY_TASK_ID"
