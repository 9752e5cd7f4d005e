#!/usr/bin/env bash
# Train on several machines under Slurm, one task per process; submit it from the folder above, arguments are settings:
#   sbatch scripts/train_slurm.sh load_from=config.json train.batch_size=64
#   sbatch --nodes=4 --ntasks-per-node=4 --gpus-per-node=4 scripts/train_slurm.sh
# srun sets the variables of each task: no torchrun, no RANK or MASTER_ADDR needed. Without GPUs, delete the line that asks
# for them. Rollouts need CPUs: a task plays its share of the episodes.
#SBATCH --job-name=robot
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --cpus-per-task=4
#SBATCH --gpus-per-node=8
#SBATCH --time=04:00:00
#SBATCH --output=%x-%j.out
set -euo pipefail

cd "$SLURM_SUBMIT_DIR" # Slurm runs a copy of this script, from a folder of its own
if [[ ! -f robot/train.py ]]; then
    echo "submit scripts/train_slurm.sh from the folder that holds robot/, not from $SLURM_SUBMIT_DIR" >&2
    exit 2
fi

# srun itself neither inherits --cpus-per-task nor ends the other tasks when one fails
srun --cpus-per-task="$SLURM_CPUS_PER_TASK" --kill-on-bad-exit=1 python -u -m robot.train "$@"
