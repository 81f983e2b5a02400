#!/usr/bin/env bash
#SBATCH --job-name=windlass
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
# Trainers on the first nodes, engines on the others, the controller on the node of the first trainer:
#   TRAINERS=2 MODEL=/models/policy sbatch job.sh
# in this directory, which all nodes see. Add your partition, the GPUs (--gpus-per-node) and the time.
set -euo pipefail
here=$SLURM_SUBMIT_DIR # Slurm runs a copy of this file from somewhere else.
mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
export TRAINERS=${TRAINERS:-2} CONTROLLER=${nodes[0]} SHARED=$here/run-$SLURM_JOB_ID
export ENGINES=$((${#nodes[@]} - TRAINERS))
trainers=$(IFS=,; echo "${nodes[*]:0:TRAINERS}") engines=$(IFS=,; echo "${nodes[*]:TRAINERS}")

# A token for this job, which only its user can read.
(umask 077 && mkdir "$SHARED" && openssl rand -hex 32 >"$SHARED/token")
trap 'kill $(jobs -pr) 2>/dev/null || true; wait; rm -f "$SHARED/token"' EXIT

# Steps share the nodes of the job: --overlap lets the controller and a trainer share one.
srun --overlap --nodes 1 --ntasks 1 --nodelist "$CONTROLLER" "$here/node.sh" controller &
srun --overlap --nodes "$ENGINES" --ntasks "$ENGINES" --nodelist "$engines" "$here/node.sh" engine &
srun --overlap --nodes "$TRAINERS" --ntasks "$TRAINERS" --nodelist "$trainers" "$here/node.sh" trainer
