#!/usr/bin/env bash
# Figure 7 in miniature: bash scripts/paper/figure7.sh [--data DIR] [options]
# DIR is laid out as MEGATRON_TEST_DATA, which is taken where --data is not given; without both, the
# text is the English of this Python.
# Sets up .venv first where it is missing; then --help lists the options.
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"
# shellcheck source=scripts/paper/start.sh
source "$root/scripts/paper/start.sh"

if [[ -z "$data" && -n "${MEGATRON_TEST_DATA:-}" ]]; then
    data=$MEGATRON_TEST_DATA
    set -- --data "$data" "$@"
fi
if [[ -n "$data" ]]; then
    require race/RACE_train.tar.xz
fi
start tools.experiments.figure7 "$@"
