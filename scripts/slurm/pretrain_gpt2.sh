#!/usr/bin/env bash
# Pretrain GPT-2; queues itself again until it is done:
#
#     sbatch --nodes 8 --gpus-per-node 8 --ntasks-per-node 8 --time 24:00:00 \
#         scripts/slurm/pretrain_gpt2.sh gpt2_355m --data-path P_text_document \
#         --save CHECKPOINTS --load CHECKPOINTS --save-interval 1000
#
# The signal comes as long before the limit as the longest step, evaluation and save take together.
#SBATCH --job-name=pretrain-gpt2
#SBATCH --output=%x-%j.log
#SBATCH --open-mode=append
#SBATCH --signal=USR1@300
#SBATCH --requeue
source scripts/slurm/body.sh || { echo "error: submit in the root of the repository" >&2; exit 2; }
needs_checkpoints "$@"
run_ranks pretrain_gpt2.py "$@"
queue_again $?
