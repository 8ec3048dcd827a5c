#!/bin/bash
# gpt: a training run of ortflow, in /scratch/runs/gpt
#
#SBATCH --job-name=gpt.sweep-1
#SBATCH --comment="ortflow 6f1d0c52"
#SBATCH --partition=main,urgent
#SBATCH --account=lab-1
#SBATCH --qos=high
#SBATCH --reservation=maint
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=2
#SBATCH --cpus-per-task=2
#SBATCH --gpus-per-node=2
#SBATCH --gres=tmpdisk:10G
#SBATCH --mem-per-cpu=512M
#SBATCH --constraint="a100&ib"
#SBATCH --exclusive
#SBATCH --nodelist=node[1-2]
#SBATCH --exclude=node3
#SBATCH --time=12:00:00
#SBATCH --begin=now+1hour
#SBATCH --nice=5
#SBATCH --dependency=afterok:55:56
#SBATCH --requeue=expedite
#SBATCH --signal=B:USR2@300
#SBATCH --open-mode=append
#SBATCH --output=/scratch/runs/gpt/logs/slurm-%j.log
#SBATCH --mail-type=END,FAIL
#SBATCH --mail-user=me@example.org
#SBATCH --licenses=matlab:1@flex
#SBATCH --spread-job
#SBATCH --acctg-freq=task=15,energy=0

trap '' USR1 USR2

# Of an allocation around sbatch: srun would take it for this job's.
unset SLURM_MEM_PER_NODE SLURM_MEM_PER_GPU SLURM_GPUS SLURM_GPUS_PER_SOCKET SLURM_GPUS_PER_TASK \
  SLURM_CPUS_PER_GPU SLURM_GPU_BIND SLURM_GPU_FREQ SLURM_TRES_PER_TASK SLURM_TRES_BIND \
  SLURM_NTASKS_PER_CORE SLURM_NTASKS_PER_SOCKET SLURM_NTASKS_PER_GPU SLURM_THREADS_PER_CORE \
  SLURM_HINT SLURM_DISTRIBUTION SLURM_OVERCOMMIT SLURM_CORE_SPEC SLURM_THREAD_SPEC SLURM_HET_SIZE \
  SLURM_PLANE_SIZE SLURM_STEP_GPUS
unset ${!SLURM_CPU_BIND@} ${!SLURM_MEM_BIND@}

module load gcc/12
source '/home/me/it''s mine/activate'
export NCCL_DEBUG=WARN  # told once

# The supervisor process starts the ranks, restarts them when they fail, and requeues a preempted job.
trap '' TERM INT HUP
trap 'kill -s USR2 "$ortflow_run_supervisor" 2>/dev/null && ortflow_wait=1' USR1 USR2
( trap '' USR1 USR2
cd /
exec /home/me/venv/bin/python -m ortflow.launchers.slurm.run_supervisor /scratch/runs/gpt -- \
  srun --mpi=pmix --nodes=2 --ntasks=4 --ntasks-per-node=2 --cpus-per-task=2 --kill-on-bad-exit=1 \
    --wait=0 --unbuffered --export=ALL --cpu-bind=cores --distribution=block:block \
    apptainer exec --nv --bind=/scratch/runs/gpt:/scratch/runs/gpt --bind=/data/gpt:/data/gpt \
      --bind=/scratch/cache:/cache --bind=/refs:/refs:ro --writable-tmpfs /images/ort.sif \
      /opt/venv/bin/python -m ortflow.workflow.rank /scratch/runs/gpt
) &
ortflow_run_supervisor=$! ortflow_wait=1
while [ "$ortflow_wait" ]; do ortflow_wait=; wait "$ortflow_run_supervisor"; ortflow_code=$?; done

echo "over with $ortflow_code"
exit "$ortflow_code"
