#!/usr/bin/env bash
# The vLLM server of a TRL trainer: ./serve.sh [MODEL [OPTION...]].
# The trainer tells it of each version; no sidecar is needed.
# Run it in vLLM's environment, with Windlass installed there.
set -euo pipefail
cd "$(dirname "$0")" # the token is here
[ $# -gt 0 ] || set -- Qwen/Qwen3-0.6B
# The secret between the trainer and the server's plugin; train.py reads the same file.
[ -s engine.token ] || (umask 077 && openssl rand -hex 32 >engine.token)

# GRPOTrainer asks the server for its configuration, which needs the dev mode. That opens vLLM's own routes for weights to
# every client of the port, so the server listens on this host only.
export VLLM_SERVER_DEV_MODE=1 WINDLASS_TOKEN_FILE=engine.token VLLM_PLUGINS=windlass
exec vllm serve "$@" --host 127.0.0.1 --port 8000 --logprobs-mode processed_logprobs --max-logprobs -1
