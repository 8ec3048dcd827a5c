#!/bin/bash
# gpt: a training run of ortflow, in /scratch/runs/gpt
# For sbatch: starts or resumes the run whose run file is at the end.
#
#SBATCH --job-name=gpt
#SBATCH --comment="ortflow run-0123"
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --kill-on-invalid-dep=yes
#SBATCH --requeue
#SBATCH --signal=B:USR2@90
#SBATCH --open-mode=append

trap '' USR1 USR2

# Of an allocation around sbatch: srun would take it for this job's.
unset SLURM_MEM_PER_NODE SLURM_MEM_PER_CPU SLURM_MEM_PER_GPU SLURM_GPUS SLURM_GPUS_PER_NODE \
  SLURM_GPUS_PER_SOCKET SLURM_GPUS_PER_TASK SLURM_CPUS_PER_GPU SLURM_GPU_BIND SLURM_GPU_FREQ \
  SLURM_TRES_PER_TASK SLURM_TRES_BIND SLURM_CPUS_PER_TASK SLURM_NTASKS_PER_CORE \
  SLURM_NTASKS_PER_SOCKET SLURM_NTASKS_PER_GPU SLURM_THREADS_PER_CORE SLURM_HINT \
  SLURM_DISTRIBUTION SLURM_EXCLUSIVE SLURM_OVERCOMMIT SLURM_CORE_SPEC SLURM_THREAD_SPEC \
  SLURM_HET_SIZE SLURM_PLANE_SIZE SLURM_STEP_GPUS
unset ${!SLURM_CPU_BIND@} ${!SLURM_MEM_BIND@}

# The supervisor process starts the ranks, restarts them when they fail, and requeues a preempted job.
trap '' TERM INT HUP
trap 'kill -s USR2 "$ortflow_run_supervisor" 2>/dev/null && ortflow_wait=1' USR1 USR2
( trap '' USR1 USR2
cd /
exec /home/me/venv/bin/python -m ortflow.launchers.slurm.run_supervisor /scratch/runs/gpt \
  --run-file --folder '/home/me/my runs' -- \
  srun --mpi=none --nodes=1 --ntasks=1 --ntasks-per-node=1 --kill-on-bad-exit=1 --wait=0 \
    --unbuffered --export=ALL \
    /home/me/venv/bin/python -m ortflow.workflow.rank /scratch/runs/gpt <<'END_OF_THE_RUN_FILE'
name: gpt
prepare:
- $HOME `id` 'it''s'
END_OF_THE_RUN_FILE
) &
ortflow_run_supervisor=$! ortflow_wait=1
while [ "$ortflow_wait" ]; do ortflow_wait=; wait "$ortflow_run_supervisor"; ortflow_code=$?; done

rm -rf /tmp/gpt
exit "$ortflow_code"
