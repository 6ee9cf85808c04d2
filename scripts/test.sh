#!/usr/bin/env bash
# Usage: scripts/test.sh [GROUP] [PYTEST ARGUMENTS]
# GROUP is one of the functions below: lint, fast, slow, slurm or all (the default).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
groups="lint fast slow slurm all"

lint() {
    .venv/bin/ruff check .
    .venv/bin/ruff format --check .
    .venv/bin/mypy
    .venv/bin/lint-imports
}
fast() { .venv/bin/python -m pytest -m "not slow and not slurm" "$@"; }
slow() { .venv/bin/python -m pytest -m slow "$@"; }
slurm() { .venv/bin/python -m pytest -m slurm "$@"; }
all() {
    lint # not `lint &&`: bash would then ignore every failure in it but the last
    .venv/bin/python -m pytest "$@"
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
