#!/usr/bin/env bash
# Pretrain BERT; queues itself again until it is done:
#
#     sbatch --nodes 8 --gpus-per-node 8 --ntasks-per-node 8 --time 24:00:00 \
#         scripts/slurm/pretrain_bert.sh bert_336m --data-path P_text_sentence \
#         --save CHECKPOINTS --load CHECKPOINTS --save-interval 1000
#SBATCH --job-name=pretrain-bert
#SBATCH --output=%x-%j.log
#SBATCH --open-mode=append
#SBATCH --signal=USR1@300
#SBATCH --requeue
source scripts/slurm/body.sh || { echo "error: submit in the root of the repository" >&2; exit 2; }
needs_checkpoints "$@"
run_ranks pretrain_bert.py "$@"
queue_again $?
