#!/usr/bin/env bash
# A vLLM server and the sidecar that loads each version of train.py into it: ./serve.sh [MODEL [OPTION...]].
# MODEL is the checkpoint that train.py started from, OPTIONs are vLLM's. Ctrl-C ends both.
# Run it in vLLM's environment, with Windlass installed there.
set -euo pipefail
cd "$(dirname "$0")" # windlass.toml and the token are here
[ $# -gt 0 ] || set -- policy
if [ "$1" = policy ]; then
    if [ ! -d policy ]; then
        echo "there is no ./policy yet: start train.py, which writes it, or name a MODEL" >&2
        exit 1
    fi
    set -- "$@" --skip-tokenizer-init # the small model of train.py has no tokenizer
fi
# The secret between the sidecar and the server's plugin; windlass.toml names it too.
[ -s engine.token ] || (umask 077 && openssl rand -hex 32 >engine.token)

trap 'kill $(jobs -pr) 2>/dev/null; wait' EXIT
WINDLASS_TOKEN_FILE=engine.token VLLM_PLUGINS=windlass vllm serve "$@" --host 127.0.0.1 --port 8000 &
# Waits for the trainer and for the server. Region, image and engine are in windlass.toml.
windlass receive &
wait -n # whichever ends first ends the other
