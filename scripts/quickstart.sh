#!/usr/bin/env bash
# From raw text to an evaluated GPT-2: bash scripts/quickstart.sh [CORPUS] [options]
# (--help lists them).  Sets up .venv first where it is missing.
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"

# A corpus that is not there is said at once, before anything is installed.
if [[ $# -gt 0 && $1 != -* && ! -s $1 ]]; then
    echo "error: corpus $1: no such file, or empty; name a file of {\"text\": \"...\"} lines, a .txt, or a folder" >&2
    exit 2
fi

bash "$root/scripts/setup.sh"
# -P: the folder that the command is given in may have a "tools" of its own.
PYTHONPATH="$root" exec "$root/.venv/bin/python" -P -m tools.quickstart "$@"
