#!/usr/bin/env bash
# One step of the corpus on many machines, with nothing but arrays of jobs.  From the root of the
# repository, with the step's own flags at the end:
#
#     ARRAY=64 bash scripts/slurm/corpus_array.sh split \
#         --input /shared/dedup --output /shared/split
#
# A step is a series of stages, and every job does its share of the stage that is next.  So the
# array is submitted once for each stage, each after the one before, and last a single job without
# --shard, which writes the manifest.  How many stages there are is known below; STAGES=N submits
# another number of arrays.  One too many costs a start; one too few leaves its stage to the last
# job alone.  If a job fails, what follows is cancelled; the same command again goes on from what is
# done.  Tokens are made by preprocess.sh, in one job of many nodes.
#
# Adapt these lines, and add --partition or --account, as your cluster wants them:
#SBATCH --job-name=corpus
#SBATCH --ntasks=1
#SBATCH --cpus-per-task=8
#SBATCH --mem=16G
#SBATCH --time=08:00:00
#SBATCH --output=%x-%j.log
set -euo pipefail

if [[ -z ${SLURM_JOB_ID:-} ]]; then # in a shell: submit
    if [[ $# -lt 1 ]]; then
        echo "error: name a step and its flags, such as split --input A --output B" >&2
        exit 2
    fi
    case ${1#tools.corpus.} in # tools.corpus.split is an earlier spelling of split
        clean | decontaminate) stages=1 ;;
        extract | split) stages=2 ;;
        urls) stages=3 ;;
        *) stages=10 ;; # dedup
    esac
    after=()
    for ((stage = 0; stage < ${STAGES:-$stages}; stage++)); do
        job=$(sbatch --parsable --kill-on-invalid-dep=yes "${after[@]}" \
            --array="0-$((${ARRAY:-8} - 1))" "$0" "$@")
        after=(--dependency="afterok:${job%%;*}")
    done
    sbatch --parsable --kill-on-invalid-dep=yes "${after[@]}" "$0" "$@"
    exit
fi

cd "$SLURM_SUBMIT_DIR"
share=()
if [[ -n ${SLURM_ARRAY_TASK_ID:-} ]]; then
    share=(--shard "$SLURM_ARRAY_TASK_ID/$SLURM_ARRAY_TASK_COUNT")
fi
exec "${PYTHON:-.venv/bin/python}" tools/corpus.py "${1#tools.corpus.}" "${@:2}" \
    --workers "${SLURM_CPUS_PER_TASK:-1}" "${share[@]}"
