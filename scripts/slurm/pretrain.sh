#!/usr/bin/env bash
# Pretraining that queues itself again until it is done:
#
#     sbatch --nodes 8 --ntasks-per-node 8 --gpus-per-node 8 --time 24:00:00 \
#         scripts/slurm/pretrain.sh --preset scripts/presets/gpt2_355m.toml \
#         --data-path DATA --save CHECKPOINTS --load CHECKPOINTS --save-interval 1000
#
# One task a GPU, started by srun itself: so the signal reaches every rank, and 75, the status of a
# run that saved and stopped for it, reaches this script. --save and --load name one folder that all
# nodes see.
#SBATCH --job-name=pretrain
#SBATCH --signal=USR1@300
#SBATCH --requeue
#SBATCH --open-mode=append
set -uo pipefail
cd "${SLURM_SUBMIT_DIR:-.}" || exit 2

MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
MASTER_PORT=$((20000 + SLURM_JOB_ID % 20000))
export MASTER_ADDR MASTER_PORT

# shellcheck disable=SC2016 # the variables are those of each task
srun --kill-on-bad-exit=0 bash -c '
    export RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID WORLD_SIZE=$SLURM_NTASKS
    export LOCAL_WORLD_SIZE=$SLURM_NTASKS_PER_NODE
    exec .venv/bin/python pretrain_gpt2.py "$@"' pretrain "$@"
status=$?
if [ "$status" -eq 75 ]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
