#!/bin/bash
# Train on several nodes under SLURM:
#   sbatch --nodes 4 recipes/cluster/slurm.sh recipe.yaml [--section.key value ...]
# One torchrun a node; one copy of the model a node (hsdp), cut over its GPUs.
#SBATCH --job-name=lean_trl
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=32
#SBATCH --time=24:00:00
# Three minutes before the time is up this script gets USR1 and asks the ranks to save and end.
#SBATCH --signal=B:USR1@180
#SBATCH --requeue
#SBATCH --open-mode=append
set -euo pipefail

master=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)

srun --kill-on-bad-exit=1 torchrun \
    --nnodes "$SLURM_NNODES" \
    --nproc-per-node "${SLURM_GPUS_ON_NODE:-8}" \
    --rdzv-id "$SLURM_JOB_ID" \
    --rdzv-backend c10d \
    --rdzv-endpoint "$master:29500" \
    --max-restarts 3 \
    --shutdown-timeout 120 \
    scripts/train.py "$@" --distributed.sharding hsdp &
training=$!

# srun hands SIGTERM to every torchrun, which hands it to its ranks. The job that is queued again
# resumes from what they saved.
save_and_requeue() {
    kill -TERM "$training"
    wait "$training" || true
    scontrol requeue "$SLURM_JOB_ID"
    exit 0
}
trap save_and_requeue USR1
wait "$training"
