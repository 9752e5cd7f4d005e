#!/usr/bin/env bash
# Train with N processes: ./launch_train.sh N [OPTION_FILE] [KEY=VALUE ...]
#   ./launch_train.sh 1      one process, without torchrun
#   ./launch_train.sh 4 options/vrt/006_train_vrt_videodeblurring_gopro.json train.total_iter=1000
# If a platform starts this script once per process and sets RANK and WORLD_SIZE, N is ignored.
set -euo pipefail

folder=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
if ! [[ ${1:-} =~ ^[1-9][0-9]*$ ]]; then
    echo "usage: ./launch_train.sh N [OPTION_FILE] [KEY=VALUE ...], where N is the number of processes" >&2
    exit 2
fi
count=$1
opt=$folder/options/vrt/006_train_vrt_videodeblurring_gopro_rgbspike.json
shift
if [[ ${1:-} == *.json ]]; then
    opt=$1
    shift
fi
program=("$folder/main_train_vrt.py" --opt "$opt" "$@")

if [[ -n ${RANK:-} && -n ${WORLD_SIZE:-} ]]; then
    echo "process $RANK of $WORLD_SIZE, started by a platform: no torchrun" >&2
    exec python -u "${program[@]}"
elif [[ $count == 1 ]]; then
    exec python -u "${program[@]}"
fi
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} # torchrun would set the same, with a warning
exec torchrun --standalone --nproc_per_node="$count" "${program[@]}"
