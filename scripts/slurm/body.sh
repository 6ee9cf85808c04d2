# The common part of this folder's jobs: each sources it, calls a function, and is submitted
# from the root of the repository.
#
# Nodes and tasks are Slurm's own: --nodes, and --ntasks-per-node for the ranks of each, one a GPU.
# A first word that is no flag names a preset: gpt2_355m is --preset gpt2_355m.
# shellcheck shell=bash
set -uo pipefail

refuse() {
    echo "error: $*" >&2
    exit 2
}

[[ -n ${SLURM_JOB_ID:-} ]] ||
    refuse "$0 is no job of Slurm; sbatch --nodes 2 --ntasks-per-node 8 $0 ... would work"
python=${PYTHON:-.venv/bin/python}
[[ -x $python ]] || refuse "$PWD has no $python; bash scripts/setup.sh makes it"
if [[ ${1:--} != -* ]]; then
    set -- --preset "$1" "${@:2}"
fi

# The nodes, the ranks of each and all ranks, asserted against what Slurm gave.
nodes=$SLURM_JOB_NUM_NODES
per_node=${SLURM_NTASKS_PER_NODE:-}
[[ -n $per_node ]] || refuse "--ntasks-per-node is missing: the ranks of a node, one for each GPU"
ranks=$((nodes * per_node))
[[ $SLURM_NTASKS -eq $ranks ]] ||
    refuse "$nodes nodes x $per_node tasks are $ranks ranks, but Slurm gave $SLURM_NTASKS tasks;" \
        "--ntasks $ranks would work, or none"
gpus=${SLURM_GPUS_ON_NODE:-}
[[ -z $gpus || $gpus -eq $per_node ]] ||
    refuse "$nodes nodes x $per_node tasks are $ranks ranks, but Slurm gave" \
        "$nodes x $gpus = $((nodes * gpus)) GPUs; --ntasks-per-node $gpus would work"

# run_ranks PROGRAM WORD...: one torchrun a node. Its status is the highest of all ranks'.
run_ranks() {
    local first address port
    first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
    # Its address, as names need not resolve where ranks run.
    address=$(scontrol --oneliner show node "$first" | sed -n 's/.* NodeAddr=\([^ ]*\).*/\1/p')
    [[ -n $address ]] || refuse "scontrol show node $first names no NodeAddr to meet at"
    port=$((10000 + SLURM_JOB_ID % 20000)) # below those that systems give away themselves
    echo "job $SLURM_JOB_ID: $ranks ranks on $nodes nodes, meeting at $address:$port"
    # A node that ends before the others leaves them the time to save, and to end by themselves.
    srun --nodes="$nodes" --ntasks="$nodes" --ntasks-per-node=1 --cpu-bind=none \
        --kill-on-bad-exit=0 \
        "$python" scripts/slurm/node.py "$nodes" "$per_node" "$address" "$port" "$@"
}

# last NAME WORD...: prints the value of the last flag of that name among the words.
last() {
    local name=$1 value=
    shift
    while (($#)); do
        case $1 in
            "$name") value=${2:-} ;;
            "$name="*) value=${1#*=} ;;
        esac
        shift
    done
    echo "$value"
}

# needs_checkpoints WORD...: a job that is queued again has to find its checkpoints.
needs_checkpoints() {
    local save load
    save=$(last --save "$@")
    load=$(last --load "$@")
    [[ -n $save ]] ||
        refuse "--save is missing, from which this job goes on when it is queued again;" \
            "--save DIR --load DIR would work, of a folder that all nodes see"
    [[ $save == "$load" || " $* " == *" --finetune "* ]] ||
        refuse "--save is $save but --load is ${load:-missing}: queued again, this job would not" \
            "go on from what it saved; --save $save --load $save would work"
}

# queue_again STATUS: ends a job; queues it again after 75, the status of ranks that have saved.
queue_again() {
    if [[ $1 -eq 75 ]]; then
        scontrol requeue "$SLURM_JOB_ID"
    fi
    exit "$1"
}
