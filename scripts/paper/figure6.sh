#!/usr/bin/env bash
# Figure 6 and table 3 in miniature: bash scripts/paper/figure6.sh --data DIR [options]
# DIR is laid out as MEGATRON_TEST_DATA.
# Sets up .venv first where it is missing; then --help lists the options.
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"
# shellcheck source=scripts/paper/start.sh
source "$root/scripts/paper/start.sh"

require_all
start tools.experiments.figure6 "$@"
