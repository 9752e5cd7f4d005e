#!/usr/bin/env bash
# Trains on several machines under Slurm; submit it from this folder, every flag is passed on:
#   sbatch train_slurm.sh --preset guide-a
#   sbatch --nodes=4 --gpus-per-node=4 --cpus-per-task=8 train_slurm.sh
# One task per node starts torchrun, which starts a process per GPU of the node, or NPROC of them. Where there are no GPUs,
# delete the line that asks for them; then it starts two.
#SBATCH --job-name=snakes
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=16
#SBATCH --gpus-per-node=8
#SBATCH --time=01:00:00
#SBATCH --output=%x-%j.out
set -euo pipefail

cd "$SLURM_SUBMIT_DIR" # Slurm runs a copy of this script, from a folder of its own
if [[ ! -f rl_trainer/main_ddp.py ]]; then
    echo "submit train_slurm.sh from its own folder, not from $SLURM_SUBMIT_DIR" >&2
    exit 2
fi

mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
port=$((20000 + SLURM_JOB_ID % 10000)) # two jobs on one port would meet each other
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} # torchrun would set the same, with a warning

# srun itself neither inherits --cpus-per-task nor ends the other nodes when one fails
srun --ntasks-per-node=1 --cpus-per-task="$SLURM_CPUS_PER_TASK" --kill-on-bad-exit=1 \
    torchrun \
    --nnodes="$SLURM_JOB_NUM_NODES" \
    --nproc_per_node="${NPROC:-${SLURM_GPUS_ON_NODE:-2}}" \
    --rdzv_backend=c10d \
    --rdzv_endpoint="${nodes[0]}:$port" \
    --rdzv_id="$SLURM_JOB_ID" \
    rl_trainer/main_ddp.py "$@"

# In place of the above, one task per process: with --ntasks-per-node=8 --cpus-per-task=2 this alone would do, too
#   srun --cpus-per-task="$SLURM_CPUS_PER_TASK" --kill-on-bad-exit=1 python rl_trainer/main.py "$@"
