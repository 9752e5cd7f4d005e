#!/usr/bin/env bash
# What only a GPU can show, in less than 8 minutes, without a network:
#
#   bash tests/gpu/run.sh                     every check, then a table of all of them
#   bash tests/gpu/run.sh -k checkpoint       some of them; takes the arguments of pytest
#   PYTHON=/path/to/python bash tests/gpu/run.sh
#   bash tests/gpu/run.sh --device cpu        the same checks on the CPU, to write new ones
#
# It needs torch, numpy and pytest; checks that need more say so and are skipped. Exit status 0 if none failed.
set -euo pipefail
folder=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=${folder%/tests/gpu}

has_packages() {  # whether interpreter $1 has what the checks cannot do without
    "$1" -c 'import importlib.util as u, sys; sys.exit(not all(map(u.find_spec, ("torch", "numpy", "pytest"))))' 2>/dev/null
}

for python in ${PYTHON:-python3 python "$root/.venv/bin/python"}; do
    if has_packages "$python"; then
        cd "$root"
        export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"  # for programs that the checks start
        exec "$python" -m pytest -c "$folder/pytest.ini" "$@" "$folder"
    fi
done
echo "No Python with torch, numpy and pytest among: ${PYTHON:-python3, python, .venv/bin/python}. Name one: PYTHON=... bash $0" >&2
exit 2
