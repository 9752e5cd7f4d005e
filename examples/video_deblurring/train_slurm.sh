#!/usr/bin/env bash
# Train on several machines under Slurm, one task per process; submit it from this folder:
#   sbatch train_slurm.sh [OPTION_FILE] [KEY=VALUE ...]
#   sbatch --nodes=4 --ntasks-per-node=4 --gpus-per-node=4 train_slurm.sh
# srun sets the variables of each task: no torchrun, no RANK or MASTER_ADDR needed. Without GPUs, delete the line that asks
# for them.
#SBATCH --job-name=deblurring
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --cpus-per-task=4
#SBATCH --gpus-per-node=8
#SBATCH --time=04:00:00
#SBATCH --output=%x-%j.out
set -euo pipefail

cd "$SLURM_SUBMIT_DIR" # Slurm runs a copy of this script, from a folder of its own
if [[ ! -f main_train_vrt.py ]]; then
    echo "submit train_slurm.sh from its own folder, not from $SLURM_SUBMIT_DIR" >&2
    exit 2
fi

opt=options/vrt/006_train_vrt_videodeblurring_gopro_rgbspike.json
if [[ ${1:-} == *.json ]]; then
    opt=$1
    shift
fi

# srun itself neither inherits --cpus-per-task nor ends the other tasks when one fails
srun --cpus-per-task="$SLURM_CPUS_PER_TASK" --kill-on-bad-exit=1 python -u main_train_vrt.py --opt "$opt" "$@"
