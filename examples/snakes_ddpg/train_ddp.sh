#!/usr/bin/env bash
# Trains on all GPUs of this machine, or with two processes on its CPU; every flag is passed on:
#   ./train_ddp.sh --preset guide-a
#   CUDA_VISIBLE_DEVICES=2,3 ./train_ddp.sh      on these GPUs
#   NPROC=4 ./train_ddp.sh                       with this number of processes
set -euo pipefail

NPROC=${NPROC:-$(python -c 'import torch; print(torch.cuda.device_count() or 2)')}
folder=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
# memory that a step frees is kept for the next one: given back and taken again, it costs a tenth of a rank's time
export MALLOC_TRIM_THRESHOLD_=${MALLOC_TRIM_THRESHOLD_:-1073741824} MALLOC_MMAP_THRESHOLD_=${MALLOC_MMAP_THRESHOLD_:-33554432}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} # torchrun would set the same, with a warning

exec torchrun --standalone --nproc_per_node="$NPROC" "$folder/rl_trainer/main_ddp.py" "$@"
