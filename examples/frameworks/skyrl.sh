#!/usr/bin/env bash
# SkyRL: two settings after its own arguments. ./skyrl.sh trainer.policy.model.path=MODEL ...
exec python3 -m skyrl.train.entrypoints.main_base "$@" \
    trainer.override_entrypoint=windlass.skyrl generator.inference_engine.weight_sync_backend=windlass
