#!/usr/bin/env bash
# The paper in miniature, within 45 minutes on two cores:
# bash scripts/paper/miniature.sh --data DIR [options]
# DIR is laid out as MEGATRON_TEST_DATA.
# Sets up .venv first where it is missing; then --help lists the options.
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"
# shellcheck source=scripts/paper/start.sh
source "$root/scripts/paper/start.sh"

require_all
start tools.experiments.miniature "$@"
