#!/usr/bin/env bash
# OpenRLHF with Windlass: one variable before its own command. OpenRLHF starts policy and engines itself.
#   ./train.sh --actor.model_name_or_path MODEL ...
# It is for runs in which the policy and the engines do not share GPUs, on DeepSpeed ZeRO 0 to 3.
# Install Windlass into OpenRLHF's environment on every host.
set -euo pipefail
export RAY_RUNTIME_ENV_HOOK=windlass.openrlhf.hook
exec "${PYTHON:-python3}" -m openrlhf.cli.train_ppo_ray "$@"
