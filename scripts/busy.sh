#!/usr/bin/env bash
# Runs a command several times while every core has something else to do: `busy.sh TIMES COMMAND...`. Ends at the first
# failure. What fails here and passes on a quiet machine depends on being alone, which is a defect of the test or of
# what it tests.
set -euo pipefail
times=$1
shift

# One loop for each core, gone when this script is.
cores=$(nproc)
others=()
trap 'kill "${others[@]}" 2>/dev/null || true' EXIT
for ((core = 0; core < cores; core++)); do
    (while :; do :; done) &
    others+=($!)
done

for ((run = 1; run <= times; run++)); do
    echo "== run $run of $times, beside $cores busy processes"
    "$@"
done
echo "passed $times times beside $cores busy processes"
