#!/usr/bin/env bash
# Usage: scripts/test.sh [GROUP] [PYTEST ARGUMENTS]
# GROUP is one of the functions below: lint, fast, slow, slurm, sweep, matrix (every layout with every
# option, for hours), slowest (all tests, then the files that take longest and the CPU seconds) or all
# (the default: every check and test but the sweeps). Two tests run at a time; `-n 0` after the group
# runs one.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
groups="lint fast slow slurm sweep matrix slowest all"
export OMP_NUM_THREADS=1 # each worker, and each process that a test starts, has one core

tests() { .venv/bin/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder "$@"; }
lint() {
    .venv/bin/ruff check .
    .venv/bin/ruff format --check .
    .venv/bin/mypy
    .venv/bin/lint-imports
}
fast() { tests -m "not slow and not slurm and not sweep" "$@"; }
slow() { tests -m slow "$@"; }
slurm() { tests -m slurm "$@"; }
matrix() { tests tests/layouts --full-matrix "$@"; }
sweep() { tests -n 0 -m sweep "$@"; }
slowest() { time tests -m "not sweep" --slowest "$@"; }
all() {
    lint # not `lint &&`: bash would then ignore every failure in it but the last
    tests -m "not sweep" "$@"
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
bash scripts/setup.sh --test
"$group" "$@"
