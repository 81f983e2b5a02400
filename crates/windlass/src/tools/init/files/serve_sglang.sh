#!/usr/bin/env bash
# An SGLang server and the sidecar that loads each version of train.py into it: ./serve.sh [MODEL [OPTION...]].
# MODEL is the checkpoint that train.py started from, OPTIONs are SGLang's. Ctrl-C ends both.
# Run it in SGLang's environment, with Windlass installed there.
set -euo pipefail
cd "$(dirname "$0")" # windlass.toml is here
[ $# -gt 0 ] || set -- policy
if [ "$1" = policy ]; then
    if [ ! -d policy ]; then
        echo "there is no ./policy yet: start train.py, which writes it, or name a MODEL" >&2
        exit 1
    fi
    set -- "$@" --skip-tokenizer-init # the small model of train.py has no tokenizer
fi

trap 'kill $(jobs -pr) 2>/dev/null; wait' EXIT
"${PYTHON:-python3}" -m sglang.launch_server --model-path "$@" --host 127.0.0.1 --port 30000 \
    --custom-weight-loader windlass.sglang.custom.load &
# Waits for the trainer and for the server. Region, image and engine are in windlass.toml.
windlass receive &
wait -n # whichever ends first ends the other
