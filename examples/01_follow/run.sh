#!/usr/bin/env bash
# Starts the trainer, and the engine until version 20: ./run.sh [--quick]
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
python=${PYTHON:-python3} last=20
if [ "${1:-}" = --quick ]; then last=4; fi
# In a checkout, the package that `make develop` built.
if [ -e "$here/../../python/windlass/_windlass.abi3.so" ]; then
    export PYTHONPATH=$here/../../python${PYTHONPATH:+:$PYTHONPATH}
fi

set -m # Without job control, background processes ignore SIGINT.
trap 'kill -INT $(jobs -pr); wait' EXIT
"$python" "$here/trainer.py" &
"$python" "$here/engine.py" $last &
wait $!
