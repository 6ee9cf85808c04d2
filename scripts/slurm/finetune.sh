#!/usr/bin/env bash
# Fine-tune a checkpoint on a task; queues itself again, and reuses the seeds that are finished:
#
#     sbatch --nodes 1 --gpus-per-node 8 --ntasks-per-node 8 --time 24:00:00 \
#         scripts/slurm/finetune.sh finetune/mnli_336m --task MNLI --load CHECKPOINTS \
#         --train-data train.tsv --valid-data dev_matched.tsv --save TUNED
#SBATCH --job-name=finetune
#SBATCH --output=%x-%j.log
#SBATCH --open-mode=append
#SBATCH --signal=USR1@60
#SBATCH --requeue
source scripts/slurm/body.sh || { echo "error: submit in the root of the repository" >&2; exit 2; }
[[ -n $(last --save "$@") ]] ||
    refuse "--save is missing, where this job finds its finished seeds when it is queued again;" \
        "--save DIR would work, of a folder that all nodes see"
run_ranks tasks/main.py "$@"
queue_again $?
