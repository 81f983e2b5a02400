#!/usr/bin/env bash
# OpenRLHF: one variable before its own command. ./openrlhf.sh --actor.model_name_or_path MODEL ...
export RAY_RUNTIME_ENV_HOOK=windlass.openrlhf.hook
exec python3 -m openrlhf.cli.train_ppo_ray "$@"
