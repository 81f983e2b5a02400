#!/usr/bin/env bash
# SkyRL with Windlass: two settings after the arguments of your run. SkyRL starts policy and engines itself.
#   ./train.sh trainer.policy.model.path=MODEL trainer.placement.colocate_all=false ...
# It is for policies and engines that do not share GPUs, and full-weight training on FSDP.
# Install Windlass into SkyRL's environment on every host.
set -euo pipefail
exec "${PYTHON:-python3}" -m skyrl.train.entrypoints.main_base "$@" \
    trainer.override_entrypoint=windlass.skyrl \
    generator.inference_engine.weight_sync_backend=windlass
