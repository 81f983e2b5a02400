#!/usr/bin/env bash
# What runs on one node: ./node.sh controller|trainer|engine. job.sh starts it, and sets
#   SHARED      a directory that all nodes see, with the token
#   CONTROLLER  the name of the controller's node
#   TRAINERS    the number of trainer nodes
#   MODEL       the engines' checkpoint; if it is empty, engine nodes keep the image alone, for an engine of your own
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
export TOKEN_FILE=$SHARED/token WINDLASS_CONTROLLER=http://$CONTROLLER:7100

controller() {
    exec windlass controller --bind 0.0.0.0 --ports 7100 --advertise-host "$CONTROLLER" --token-file "$TOKEN_FILE" \
        --set rollout=policy --floor "${ENGINES:-1}"
}

# One torchrun per node. The first of the nodes has the rendezvous.
trainer() {
    export WEIGHTS_HOST=${WEIGHTS_HOST:-$(hostname)} WEIGHTS_PORTS=7000-7009
    exec torchrun --nnodes "$TRAINERS" --nproc-per-node "${RANKS:-1}" --rdzv-backend c10d --rdzv-id policy \
        --rdzv-endpoint "$CONTROLLER:29500" "$here/train.py"
}

# The server, if there is a checkpoint, and the sidecar that loads each version into it. If one of the two ends, so does the other.
engine() {
    local words=(--controller "$WINDLASS_CONTROLLER" --model policy --token-file "$TOKEN_FILE" --dir /dev/shm/windlass
        --name "$(hostname)" --relay-ports 7200-7209)
    trap 'kill $(jobs -pr) 2>/dev/null || true' EXIT
    if [ -n "${MODEL:-}" ]; then
        WINDLASS_TOKEN_FILE=$TOKEN_FILE VLLM_PLUGINS=windlass vllm serve "$MODEL" --port 8000 &
        words+=(--engine vllm=http://127.0.0.1:8000 --model-dir "$MODEL")
    fi
    windlass receive "${words[@]}" &
    wait -n
}

"$1"
