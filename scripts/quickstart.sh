#!/usr/bin/env bash
# From raw text to an evaluated GPT-2: bash scripts/quickstart.sh [CORPUS] [options]
# Sets up .venv first where it is missing; then --help lists the options.
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
# shellcheck source=scripts/paper/start.sh
source "$root/scripts/paper/start.sh"

# A missing corpus is reported at once, before anything is installed.
if [[ $# -gt 0 && $1 != -* && ! -s $1 ]]; then
    echo "error: corpus $1: no such file, or empty; name a file of {\"text\": \"...\"} lines, a .txt, or a folder" >&2
    exit 2
fi

start tools.experiments.quickstart "$@"
