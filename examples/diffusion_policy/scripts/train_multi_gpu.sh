#!/usr/bin/env bash
# Train on all GPUs of this machine, or with two processes on its CPU; arguments are settings:
#   scripts/train_multi_gpu.sh train.batch_size=64
#   CUDA_VISIBLE_DEVICES=2,3 scripts/train_multi_gpu.sh      on these GPUs
#   NPROC=4 scripts/train_multi_gpu.sh                       with this number of processes
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

NPROC=${NPROC:-$(python -c 'import torch; print(torch.cuda.device_count() or 2)')}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} # torchrun would set the same, with a warning

exec torchrun --standalone --nproc_per_node="$NPROC" -m robot.train "$@"
