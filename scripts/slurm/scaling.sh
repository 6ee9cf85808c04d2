#!/usr/bin/env bash
# Measure how training scales; one job of the largest world measures the smaller ones too:
#
#     sbatch --nodes 64 --gpus-per-node 8 --ntasks-per-node 8 --time 2:00:00 \
#         scripts/slurm/scaling.sh --device cuda --json scaling.json --page scaling.md
#SBATCH --job-name=scaling
#SBATCH --output=%x-%j.log
source scripts/slurm/body.sh || { echo "error: submit in the root of the repository" >&2; exit 2; }
run_ranks benchmarks/scaling.py "$@"
