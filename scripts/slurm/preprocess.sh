#!/usr/bin/env bash
# Tokenise a corpus on many nodes, each task its share; the same command goes on after a crash:
#
#     sbatch --nodes 8 --ntasks-per-node 1 --cpus-per-task 32 --time 8:00:00 \
#         scripts/slurm/preprocess.sh --input /shared/split/train --output-prefix /shared/P \
#         --vocab-file vocab.json --merge-file merges.txt
#
# All tasks do a stage together, then the next, and the first one writes the end. There are two
# stages for every 64 shards of the output (--shard-size); --export=ALL,STAGES=4 does four.
#SBATCH --job-name=preprocess
#SBATCH --output=%x-%j.log
#SBATCH --open-mode=append
#SBATCH --requeue
source scripts/slurm/body.sh || { echo "error: submit in the root of the repository" >&2; exit 2; }
workers=${SLURM_CPUS_PER_TASK:-1}
command=("$python" tools/preprocess_data.py "$@" --workers "$workers")

for ((stage = 0; stage < ${STAGES:-2}; stage++)); do
    # shellcheck disable=SC2016 # the variables are those of each task
    srun --cpus-per-task="$workers" --kill-on-bad-exit=1 \
        bash -c 'exec "$@" --shard "$SLURM_PROCID/$SLURM_NTASKS"' share "${command[@]}" || exit
done
srun --nodes=1 --ntasks=1 --ntasks-per-node=1 --cpus-per-task="$workers" "${command[@]}"
