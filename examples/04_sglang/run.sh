#!/usr/bin/env bash
# Starts an SGLang server, the sidecar that feeds it, and a trainer: ./run.sh [--quick]
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
python=${PYTHON:-python3} sglang=${SGLANG_PYTHON:-python3} port=${PORT:-30000} steps=8
if [ "${1:-}" = --quick ]; then steps=4; fi
# In a checkout, the package that `make develop` built.
if [ -e "$here/../../python/windlass/_windlass.abi3.so" ]; then
    export PYTHONPATH=$here/../../python${PYTHONPATH:+:$PYTHONPATH}
fi
device=(--mem-fraction-static 0.4)
if ! command -v nvidia-smi >/dev/null; then
    export SGLANG_USE_CPU_ENGINE=1 SGLANG_CPU_OMP_THREADS_BIND=0 SGLANG_NCCL_SO_PATH=/nonexistent
    # SGLang imports its GPU kernels on every machine; the tests' stand-in for them is enough for a CPU.
    export PYTHONPATH=${PYTHONPATH:+$PYTHONPATH:}$here/../../tests/engines/stubs
    device+=(--device cpu --attention-backend torch_native --disable-overlap-schedule)
fi
export HF_HUB_OFFLINE=1 HF_HUB_DISABLE_PROGRESS_BARS=1 OMP_NUM_THREADS=1

home=$(mktemp -d /dev/shm/windlass-sglang-XXXXXX)
trap 'rm -rf "$home"' EXIT
set -m # Each job is a process group, which Ctrl-C does not reach.
"$python" "$here/../03_vllm/policy.py" "$home/model"
"$sglang" -m sglang.launch_server --model-path "$home/model" --served-model-name policy --port "$port" \
    --dtype float32 --max-total-tokens 4096 "${device[@]}" \
    --custom-weight-loader windlass.sglang.custom.load >"$home/sglang.log" 2>&1 &
server=$!
"$python" -m windlass receive --region "$home/windlass-policy" --dir "$home/images" --until $steps \
    --engine "sglang=http://127.0.0.1:$port" >"$home/sidecar.log" 2>&1 &
sidecar=$!
"$python" "$here/../03_vllm/trainer.py" "$home/model" "$home" "sglang=http://127.0.0.1:$port" $steps &
trainer=$!

stop() {
    [ $? = 0 ] || tail -n 20 "$home"/*.log >&2
    set +e
    exec 2>/dev/null # Bash would report every process that it stops.
    kill $trainer $sidecar $server
    (sleep 20 && kill -KILL -- -$server) & # SGLang may not stop while it starts.
    wait $trainer $sidecar $server
    kill %%
    rm -rf "$home"
}
trap stop EXIT
wait $trainer
wait $sidecar
echo "sidecar:"
grep ": loaded version" "$home/sidecar.log"
