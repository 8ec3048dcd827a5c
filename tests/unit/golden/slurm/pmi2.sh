#!/bin/bash
# gpt: a training run of ortflow, in /scratch/runs/gpt
#
#SBATCH --job-name=gpt
#SBATCH --comment="ortflow 6f1d0c52"
#SBATCH --partition=main
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=2
#SBATCH --cpus-per-task=2
#SBATCH --mem=2G
#SBATCH --time=12:00:00
#SBATCH --kill-on-invalid-dep=yes
#SBATCH --requeue
#SBATCH --signal=B:USR2@90
#SBATCH --open-mode=append
#SBATCH --output=/scratch/runs/gpt/logs/slurm-%j.log

trap '' USR1 USR2

# Of an allocation around sbatch: srun would take it for this job's.
unset SLURM_MEM_PER_CPU SLURM_MEM_PER_GPU SLURM_GPUS SLURM_GPUS_PER_NODE SLURM_GPUS_PER_SOCKET \
  SLURM_GPUS_PER_TASK SLURM_CPUS_PER_GPU SLURM_GPU_BIND SLURM_GPU_FREQ SLURM_TRES_PER_TASK \
  SLURM_TRES_BIND SLURM_NTASKS_PER_CORE SLURM_NTASKS_PER_SOCKET SLURM_NTASKS_PER_GPU \
  SLURM_THREADS_PER_CORE SLURM_HINT SLURM_DISTRIBUTION SLURM_EXCLUSIVE SLURM_OVERCOMMIT \
  SLURM_CORE_SPEC SLURM_THREAD_SPEC SLURM_HET_SIZE SLURM_PLANE_SIZE SLURM_STEP_GPUS
unset ${!SLURM_CPU_BIND@} ${!SLURM_MEM_BIND@}

# The supervisor process starts the ranks, restarts them when they fail, and requeues a preempted job.
cd /
exec /home/me/venv/bin/python -m ortflow.launchers.slurm.run_supervisor /scratch/runs/gpt -- \
  srun --mpi=pmi2 --nodes=2 --ntasks=4 --ntasks-per-node=2 --cpus-per-task=2 --kill-on-bad-exit=1 \
    --wait=0 --unbuffered --export=ALL \
    /home/me/venv/bin/python -m ortflow.workflow.rank /scratch/runs/gpt
