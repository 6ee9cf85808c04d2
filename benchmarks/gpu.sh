#!/usr/bin/env bash
# Speed and its causes on one H100 or H200, by groups. A group takes at most 120 s, start included
# (sizes and update 200, plan and 1.2b-8x1024 300, vit 480, on a CPU 1,800); contenders that are not done by then
# are left out, and it says so.
#
#     bash benchmarks/gpu.sh                       # hardware 124m profile loss dropout
#     bash benchmarks/gpu.sh speed                 # 124m 355m 1.2b llama: GPT-2 and a Llama of 1B
#     bash benchmarks/gpu.sh 1.2b-8x1024 graph update sizes plan offload modes hf ring
#     CIFAR10=cifar10_jpeg.tar.xz bash benchmarks/gpu.sh vit # 60 epochs on images by class: 480 s
#     bash benchmarks/gpu.sh --device cpu --small  # in miniature, to try them
#
# profile is 124m again: milliseconds by kind of kernel, launches and host; 355m, 1.2b and llama have
# these too. graph is 124m with and without a CUDA graph, update 124m and 1.2b with both kernels of
# Adam. plan has the times that tools/plan.py predicts of
# 124m, 355m and 1.2b beside those measured. A run leaves its page and figures in $OUT,
# or in runs/gpu; gpu.md has all pages, gpu.json a row of each contender, to compare runs with. A run
# that fails, or takes too long, says so in its page, and the others go on. The tree may be read-only
# and without git and .venv: python3 (3.12, torch 2.11, transformers 5.17 are enough) takes missing
# packages from wheels/. Tests: scripts/test.sh gpu.
set -uo pipefail
[[ -f ${CIFAR10-} ]] && CIFAR10=$(realpath "$CIFAR10")
cd "$(dirname "$0")/.."
out=${OUT:-runs/gpu} device=cuda small= groups=() names=() pages=() failed=()
while (($#)); do
    case $1 in
        --device) device=${2-} && shift ;;
        --small) small=yes ;;
        speed) groups+=(124m 355m 1.2b llama) ;;
        hardware | 124m | 355m | 1.2b | 1.2b-8x1024 | llama | sizes | plan | profile | graph | update | loss | dropout | offload | modes | hf | ring | vit)
            groups+=("$1") ;;
        *) echo "error: $1 is no group of this script; its first lines name them" >&2 && exit 2 ;;
    esac
    shift
done
[[ $device =~ ^(cpu|cuda)$ ]] || { echo "error: --device $device: cpu and cuda work" >&2 && exit 2; }
if [[ " ${groups[*]} " = *" vit "* && ! $small && ! -f ${CIFAR10-} ]]; then
    echo "error: vit needs CIFAR10=FILE.tar.xz, an archive of train/CLASS/ and test/CLASS/" >&2
    exit 2
fi
((${#groups[@]})) || groups=(hardware 124m profile loss dropout)
mkdir -p "$out" || { echo "error: $out cannot be made; OUT=/tmp/gpu works" >&2 && exit 2; }
out=$(realpath "$out") work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONDONTWRITEBYTECODE=1
export TORCHINDUCTOR_CACHE_DIR=$work/inductor TRITON_CACHE_DIR=$work/triton MPLCONFIGDIR=$work
# A CPU runs the code as it is written: to compile it takes minutes, and a C++ compiler.
[[ $device = cuda ]] || export TORCHDYNAMO_DISABLE=1

source scripts/packages.sh
packages "$work/packages" "${needs[@]}"
[[ $device = cpu ]] || require_gpu

run() { # NAME COMMAND...
    local page="$out/$1.md" name=$1 left=$((until - $(date +%s))) log status
    shift
    rm -f "$page"
    pages+=("$page")
    log=$(if ((left < 10)); then echo "left out: there was no time left" && exit 1; fi
        timeout --kill-after 5 $left "$python" "$@" 2>&1)
    status=$?
    printf '## %s\n\n%s\n\n' "$name" "$log"
    ((status == 0)) || failed+=("$name")
    [[ -f $page ]] || printf '# %s\n\nStatus %s:\n\n```\n%s\n```\n' "$name" $status "$(tail -c 1000 <<<"$log")" >"$page"
}
question() { # NAME QUESTION WORD...
    local name=$1 file=$2
    shift 2
    names+=("$name")
    [[ -d $out/$name.json ]] || rm -f "$out/$name.json"
    run "$name" "benchmarks/$file.py" --device "$device" --rounds 1 --until $((until - 12)) "$@" \
        --json "$out/$name.json" --page "$out/$name.md"
}
steps() { # NAME MODEL SAMPLES TENSOR_PARALLEL WORD... --contenders CONTENDER...
    local name=$1 model=$2 flags="--micro-batch-size $3" ranks=$4 more=()
    shift 4
    ((ranks > 1)) && more=(--stub-communication) || more=(--fast-weights) # one rank of so many
    [[ $model = llama* ]] || flags+=" --seq-length 1024 --vocab-size 50304 --make-vocab-size-divisible-by 128"
    if [[ $small ]]; then
        flags=
        more+=(--small --turns 1)
    fi
    flags+=" --recompute-granularity none" # but where a contender says otherwise
    question "$name" train_step --presets "$model" --dtypes bf16 --threads 8 \
        --tensor-model-parallel-size "$ranks" "--program-flags=$flags" --turns 10 "${more[@]}" "$@"
}
fits() { # MIB THEN ELSE: by the memory of the GPU
    local memory
    memory=$([[ $device = cpu ]] ||
        "$python" -c 'import torch; print(torch.cuda.mem_get_info()[1] >> 20)')
    ((${memory:-0} >= $1)) && echo "$2" || echo "$3"
}

ours="this project" plain="plain torch, compiled" theirs="transformers, compiled"
traces=(--profile "$work/traces")

hardware() { run hardware tools/plan.py --measure "$out/hardware.toml"; }
124m() { # wanted: 1.1 times the tokens/s of compiled plain torch, and no more memory
    steps 124M gpt2_124m 16 1 --contenders "$ours" "$plain" "$theirs" "$ours, not compiled"
}
355m() { # wanted: MFU 50 %
    steps 355M gpt2_355m 16 1 "${traces[@]}" --contenders "$ours" "$plain" "$ours, not compiled" "$theirs"
}
1.2b() { # wanted: MFU 57 %, and 1.30 of the time with full recomputation
    steps 1.2B gpt2_scaling_1.2b "$(fits 100000 16 8)" 1 "${traces[@]}" \
        --contenders "$ours" "$ours, full recomputation" "$ours, not compiled"
}
1.2b-8x1024() { # wanted: MFU 54 %; a group of its own, because its peers take long to compile
    steps 1.2B_8x1024 gpt2_scaling_1.2b 8 1 "${traces[@]}" --contenders "$ours" "$theirs" "$plain"
}
llama() { # wanted: MFU 50 %, 1.1 times the tokens/s of compiled transformers
    steps llama_1B llama_1b 4 1 "${traces[@]}" \
        --contenders "$ours" "$theirs" "$ours, not compiled"
}
sizes() {
    local samples full="$ours, full recomputation"
    samples=$(fits 100000 16 8)
    steps 2.5B gpt2_scaling_2.5b "$samples" 1 --contenders "$full"
    steps 4.2B gpt2_scaling_4.2b "$samples" 1 --contenders "$full"
    steps 8.3B_one_rank_of_8 gpt2_scaling_8.3b "$samples" 8 --contenders "$full" "$ours"
}
profile() {
    steps 124M_profile gpt2_124m 16 1 "${traces[@]}" \
        --contenders "$ours" "$plain" "$ours, not compiled"
}
graph() { # wanted: less idle time with it
    steps 124M_graph gpt2_124m 16 1 "${traces[@]}" --contenders "$ours" "$ours, no CUDA graph" "$plain"
}
update() { # wanted: less time of the optimizer, and less idle time, by the compiled one
    local contenders=(--contenders "$ours" "$ours, compiled update")
    steps 124M_update gpt2_124m 16 1 "${traces[@]}" "${contenders[@]}"
    steps 1.2B_update gpt2_scaling_1.2b "$(fits 100000 16 8)" 1 "${traces[@]}" "${contenders[@]}"
}
plan() { # wanted: predicted / measured from 0.9 to 1.1, compiled or not
    local name samples
    name=$([[ $device = cpu ]] && echo cpu ||
        "$python" -c 'from tools.plan.hardware import gpu_here; print(gpu_here())')
    samples=$(fits 100000 16 8)
    local rest=(1 --hardware "$name" --contenders "$ours" "$ours, no CUDA graph" "$ours, not compiled")
    steps 124M_plan gpt2_124m 16 "${rest[@]}"
    steps 355M_plan gpt2_355m 16 "${rest[@]}"
    steps 1.2B_plan gpt2_scaling_1.2b "$samples" "${rest[@]}" "$ours, full recomputation"
}
loss() { # wanted: in chunks at most 1.05 of the time of all logits at once
    local sizes=(--hidden-size 1536 --tokens 8192)
    [[ $small ]] && sizes=(--small)
    question output_layer output_layer --tensor-model-parallel-size 1 "${sizes[@]}"
}
dropout() { # wanted: attention's dropout by coordinates at most 1.1 of the kernel's own
    steps 124M_dropout gpt2_124m 16 1 \
        --contenders "$ours, dropout 0.1" "$ours, dropout 0.1, attention's by coordinates" \
        "$ours, dropout 0.1, attention's by flex"
}
offload() { # memory, time and copies beside kernels, with and without
    steps 355M_offload gpt2_355m 8 1 "${traces[@]}" --contenders "$ours, not compiled" \
        "$ours, optimizer on the host" "$ours, activations on the host" \
        "$ours, optimizer and activations on the host"
}
modes() { # kernels of one rank of 2 x 2 beside one of four, without calls
    local sizes=(--hidden-sizes 1536 4096 --tokens 16384)
    [[ $small ]] && sizes=(--small)
    question tensor_modes tensor_modes --stub-communication --turns 10 "${sizes[@]}"
}
hf() { # unmodified models by a plan on one rank
    question huggingface models --models llama gpt2 --tensor-model-parallel-size 1 --dtypes bf16 \
        --turns 10 ${small:+--small}
}
ring() { # wanted: one rank of 2 to 8 takes 1.1 / ranks of the time of one that has all tokens
    local sizes=(--seq-length 131072 --simulated 2 4 8)
    [[ $small ]] && sizes=(--small --simulated 2 4)
    question ring context --turns 5 "${sizes[@]}"
}
vit() { # wanted: 82 % of the test images
    local flags=(--mock-data --num-layers 1 --hidden-size 32 --image-size 8 --global-batch-size 64 --train-iters 3)
    if [[ ! $small ]]; then
        mkdir "$work/cifar10" && tar -xf "$CIFAR10" -C "$work/cifar10"
        flags=(--data-path "$work/cifar10" --num-workers 8 --micro-batch-size 512)
    fi
    run vit pretrain.py --model vit --preset vit_tiny_cifar10 --metrics-file "$out/vit.jsonl" "${flags[@]}"
}

for group in "${groups[@]}"; do
    limit=120
    [[ $group = vit ]] && limit=480
    [[ $group =~ ^(sizes|update)$ ]] && limit=200
    [[ $group =~ ^(plan|1.2b-8x1024)$ ]] && limit=300
    [[ $device = cpu ]] && limit=1800
    until=$(($(date +%s) + limit))
    $group
done
cp "$work"/traces/*.txt "$out" 2>/dev/null # the traces themselves are of 100 MB
for page in "${pages[@]}"; do cat "$page"; done >"$out/gpu.md"
"$python" - "$out" "${names[@]}" <<<'import pathlib, sys
from benchmarks.report import gather
gather(pathlib.Path(sys.argv[1]), sys.argv[2:])'
((${#failed[@]} == 0)) || { echo "error: these have no figures: ${failed[*]}" >&2 && exit 1; }
