#!/usr/bin/env bash
# The paper in miniature, within 45 minutes on two cores: bash scripts/paper/miniature.sh --data DIR
# [options] (--help lists them).  DIR is laid out as MEGATRON_TEST_DATA.  Sets up .venv first.
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"
# shellcheck source=scripts/paper/start.sh
source "$root/scripts/paper/start.sh"

if [[ -n "$data" ]]; then
    require race/RACE_train.tar.xz race/RACE_dev.tar.xz wikitext103/wiki.valid.tokens \
        lambada/lambada_test_first500.jsonl
fi
start tools.paper.miniature "$@"
