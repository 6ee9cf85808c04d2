#!/usr/bin/env bash
# What needs a GPU, on one H100 or H200, by groups: each takes less than 10 minutes.
#
#     bash benchmarks/gpu.sh                          # hardware matrix host loss compile dropout
#     bash benchmarks/gpu.sh speed                    # speed, sizes, offload, modes: where named
#     bash benchmarks/gpu.sh --device cpu --small     # the short groups in miniature, to try them
#
# Each run leaves a page and its figures in $OUT, or in runs/gpu, and gpu.md has all pages. A run
# that fails, or takes too long, says so in its page, and the others go on. --small is for models
# that any machine trains in a moment.
set -uo pipefail
cd "$(dirname "$0")/.."
python=python3
test -x .venv/bin/python && python=.venv/bin/python
out=${OUT:-runs/gpu} device=cuda small= groups=() failed=()
while (($#)); do
    case $1 in
        --device) device=$2 && shift ;;
        --small) small=yes ;;
        hardware | matrix | offload | modes | host | loss | compile | dropout | speed | sizes)
            groups+=("$1") ;;
        *) echo "error: $1 is no group of this script; its first lines name them" >&2 && exit 2 ;;
    esac
    shift
done
((${#groups[@]})) || groups=(hardware matrix host loss compile dropout)
mkdir -p "$out"

run() { # NAME SECONDS COMMAND...
    local page="$out/$1.md" name=$1 limit=$2 left=$((560 * ${#groups[@]} - SECONDS)) log status
    shift 2
    ((left < limit)) && limit=$left
    rm -f "$page"
    log=$(if ((limit < 15)); then echo "left out: there was no time left" && exit 1; fi
        timeout --kill-after 5 "$limit" "$python" "$@" 2>&1)
    status=$?
    printf '## %s\n\n%s\n\n' "$name" "$log"
    ((status == 0)) || failed+=("$name")
    [[ -f $page ]] || printf '# %s\n\nStatus %s:\n\n```\n%s\n```\n' "$name" $status "$(tail -c 1000 <<<"$log")" >"$page"
}
question() { # NAME SECONDS QUESTION WORD...
    local name=$1 seconds=$2 file=$3
    shift 3
    run "$name" "$seconds" "benchmarks/$file.py" --device "$device" --rounds 1 "$@" \
        --json "$out/$name.json" --page "$out/$name.md"
}
steps() { # NAME SECONDS PRESET SAMPLES TENSOR_PARALLEL CONTENDER...
    local name=$1 seconds=$2 preset=$3 samples=$4 ranks=$5 memory turns=12 stub=
    shift 5
    memory=$([[ $device = cpu ]] || nvidia-smi --query-gpu memory.total --format csv,noheader,nounits)
    ((${memory:-0} > 100000)) || samples=$((samples / 2))
    local flags="--micro-batch-size $samples --vocab-size 50304"
    if [[ $small ]]; then
        flags="--num-layers 2 --hidden-size 64 --num-attention-heads 8 --seq-length 32"
        flags+=" --max-position-embeddings 32 --make-vocab-size-divisible-by 8 --vocab-size 512"
        flags+=" --micro-batch-size 2"
        turns=1
    fi
    ((ranks > 1)) && stub=--stub-communication # one rank of so many
    question "$name" "$seconds" train_step --presets "$preset" --dtypes bf16 --threads 8 $stub \
        --tensor-parallel "$ranks" "--program-flags=$flags" --turns $turns --contenders "$@"
}

ours="this project" full="this project, full recomputation" compiled="transformers, compiled"
[[ $device = cuda ]] || compiled=$ours # on a CPU it needs a C++ compiler

hardware() { run hardware 45 tools/plan.py --measure "$out/hardware.toml"; }
matrix() { # several gloo ranks share the GPU: torch documents some collectives for CPUs alone
    run layouts 180 -m pytest -q -p no:cacheprovider tests/layouts --device "$device" \
        -k "$([[ $small ]] && echo one_process || echo test_a_layout)"
}
offload() { # not yet run on a GPU: memory, time and copies beside kernels, with and without
    local sizes=()
    [[ $small ]] && sizes=(--layers 2 --hidden-size 64 --samples 2 --seq-length 32)
    run offload 120 benchmarks/offload.py --device "$device" "${sizes[@]}"
}
modes() { # not yet run on a GPU: kernels of one rank of 2 x 2 beside one of four, without calls
    local sizes=(--hidden-sizes 1536 4096 --tokens 16384)
    [[ $small ]] && sizes=(--hidden-sizes 64 --tokens 128)
    question tensor_modes 120 tensor_modes --stub-communication --turns 10 "${sizes[@]}"
}
host() { question host_reads 30 activations --contenders "host reads"; }
loss() { # wanted: in chunks at most 1.1 of the time of all logits at once
    local sizes=(--hidden-size 1536 --tokens 8192)
    [[ $small ]] && sizes=(--hidden-size 32 --tokens 64 --vocab-size 512)
    question output_layer 80 output_layer --tensor-parallel 1 "${sizes[@]}"
}
compile() { # wanted: MFU 45 %, transformers compiled 1.3 times our time
    steps 124M 170 gpt2_124m 16 1 "$ours" "$ours, not compiled" "$full" "plain torch" \
        transformers "$compiled"
}
dropout() { # wanted: attention's dropout by coordinates at most 1.1 of the kernel's own
    steps 124M_dropout 60 gpt2_124m 16 1 "$ours, dropout 0.1" \
        "$ours, dropout 0.1, attention's by coordinates"
}
speed() { # wanted: MFU 55 and 45 %, HFU 60 % and 1.33 of the time with full recomputation
    steps 1.2B 230 gpt2_scaling_1.2b 8 1 "$ours" "$full" "$ours, selective recomputation" "$compiled"
    steps 355M 100 gpt2_355m 16 1 "$ours" "$full" "plain torch" transformers
}
sizes() {
    steps 2.5B 60 gpt2_scaling_2.5b 16 1 "$full"
    steps 4.2B 60 gpt2_scaling_4.2b 16 1 "$full"
    steps 8.3B_one_rank_of_8 75 gpt2_scaling_8.3b 16 8 "$full" "$ours"
}

for group in "${groups[@]}"; do $group; done
cat "$out"/[!g]*.md >"$out/gpu.md"
((${#failed[@]} == 0)) || { echo "error: these have no figures: ${failed[*]}" >&2 && exit 1; }
