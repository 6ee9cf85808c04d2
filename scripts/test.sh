#!/usr/bin/env bash
# Usage: scripts/test.sh [GROUP] [PYTEST ARGUMENTS]
# GROUP is one of: lint, fast, slow, slurm, sweep, gpu, matrix (every layout with
# every option, for hours), slowest (all tests, then the files that take longest and the CPU seconds)
# or all (the default: every check and test but the sweeps and those of a GPU). Three tests run at a
# time, as many of them wait; `-n 0` after the group runs one.
#
# gpu: the tests of a CUDA device and the layouts on it, in parts that run side by side, for at most 4
# minutes on 16 cores: a part fails where it has not ended after 220 s, or after $LIMIT. They need no
# .venv: python3 (3.12, torch 2.11, transformers 5.17 and pytest are enough) with what is in wheels/.
# `gpu --device cpu` runs them without a GPU, in small sizes.
set -euo pipefail
if [[ ${1:-} = --help || ${1:-} = -h ]]; then
    sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0"
    exit
fi
cd "$(dirname "${BASH_SOURCE[0]}")/.."
groups="lint fast slow slurm sweep gpu matrix slowest all"
export OMP_NUM_THREADS=1 # each worker, and each process that a test starts, has one core

tests() { .venv/bin/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder "$@"; }
lint() {
    .venv/bin/ruff check .
    .venv/bin/ruff format --check .
    .venv/bin/mypy
    .venv/bin/lint-imports
}
fast() { tests -m "not slow and not slurm and not sweep and not gpu" "$@"; }
slow() { tests -m slow "$@"; }
slurm() { tests -m slurm "$@"; }
matrix() { tests tests/layouts --full-matrix "$@"; }
sweep() { tests -n 0 -m sweep "$@"; }
slowest() { time tests -m "not sweep and not gpu" --slowest "$@"; }
all() {
    lint # not `lint &&`: bash would then ignore every failure in it but the last
    tests -m "not sweep and not gpu" "$@"
}

gpu() {
    local parts=(tests/gpu/test_*.py) number code ran= status=0 pids=() limit=${LIMIT:-220}
    if [[ "${1:--}" != -* ]]; then
        echo "error: gpu $1: takes options of pytest, such as -k, and no paths" >&2
        exit 2
    fi
    folder=$(mktemp -d)
    trap 'kill $(jobs -p) 2>/dev/null || true; rm -rf "$folder"' EXIT
    source scripts/packages.sh
    packages "$folder/packages" "${needs[@]}" pytest
    [[ "$* " = *"--device cpu "* ]] || require_gpu
    for number in {1..8}; do
        parts+=("tests/layouts --part $number/8 -k test_a_layout")
    done
    export TORCHINDUCTOR_COMPILE_THREADS=1 # no pool of compilers for each process
    for number in "${!parts[@]}"; do
        # pytest takes the last --device and -k, so the caller's win.
        {
            SECONDS=0 code=0
            # Interrupted, as by Ctrl+C, pytest still says what failed; a job in the background ignores it.
            timeout --signal INT --kill-after 15 "$limit" env --default-signal=INT \
                "$python" -m pytest -q -p no:cacheprovider --show-capture no \
                --durations 5 --device cuda ${parts[number]} "$@" || code=$?
            echo "status $code after $SECONDS s"
            exit $code
        } >"$folder/$number.log" 2>&1 &
        pids+=($!)
    done
    for number in "${!pids[@]}"; do
        code=0
        wait "${pids[number]}" || code=$?
        ((code == 5)) || ran=yes # 5: the caller's -k chooses nothing in this part
        ((code == 0 || code == 5)) || status=1
        printf '\n## %s\n\n' "${parts[number]}"
        cat "$folder/$number.log"
    done
    [[ $ran ]] || status=5
    return $status
}

group=all
if [[ "${1:--}" != -* ]]; then
    group=$1
    shift
fi
if [[ " $groups " != *" $group "* ]]; then
    echo "error: unknown group $group; scripts/test.sh all would work, of: $groups" >&2
    exit 2
fi
[[ $group = gpu ]] || bash scripts/setup.sh --test
"$group" "$@"
