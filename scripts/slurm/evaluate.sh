#!/usr/bin/env bash
# Evaluate a checkpoint on a task:
#
#     sbatch --nodes 1 --gpus-per-node 8 --ntasks-per-node 8 --time 1:00:00 \
#         scripts/slurm/evaluate.sh --task WIKITEXT103 --load CHECKPOINTS \
#         --valid-data wiki.test.tokens --tensor-model-parallel-size 8
#SBATCH --job-name=evaluate
#SBATCH --output=%x-%j.log
source scripts/slurm/body.sh || { echo "error: submit in the root of the repository" >&2; exit 2; }
run_ranks tasks/main.py "$@"
