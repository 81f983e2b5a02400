#!/usr/bin/env bash
# verl with Windlass: one key after the arguments of your run. verl starts actors and engines itself.
#   ./train.sh actor_rollout_ref.model.path=MODEL trainer.total_training_steps=N ...
# It is for runs in which actors and rollouts do not share GPUs (nnodes of the rollout above 0, fully async, one-step-off).
# Install Windlass into verl's environment on every host.
set -euo pipefail
exec "${PYTHON:-python3}" -m verl.trainer.main_ppo "$@" actor_rollout_ref.rollout.checkpoint_engine.backend=windlass
