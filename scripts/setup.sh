#!/usr/bin/env bash
# Usage: scripts/setup.sh [--test]
# Makes .venv beside this folder with what the project needs (--test: and its tests).
# Does nothing where that is done already.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

fail() { echo "error: $*" >&2; exit 2; }

case "${1:-}" in
    "") requirements=requirements.txt; stamps=(.venv/setup.stamp) ;;
    --test) requirements=requirements-test.txt; stamps=(.venv/setup.stamp .venv/setup-test.stamp) ;;
    *) fail "unknown option $1; scripts/setup.sh [--test] would work" ;;
esac
[ $# -le 1 ] || fail "too many options; scripts/setup.sh [--test] would work"

# What the environment is made from. A stamp holding the same says that it is complete; the
# folder is part of it because an environment that has been moved does not work.
made_from() { pwd && cat requirements.txt "${requirements}"; }
is_complete() { made_from | cmp --silent - "${stamps[-1]}"; }

find_python() {
    local candidate candidates=(python3 python3.14 python3.13 python3.12 python3.11)
    for candidate in "${PYTHON:-${candidates[@]}}"; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    fail "no Python 3.11 or newer found; install one, or name one: PYTHON=/path/to/python3 $0"
}

make_environment() {
    local python
    python=$(find_python)
    "$python" -c 'import ensurepip, venv' 2>/dev/null ||
        fail "$python cannot make environments; on Debian and Ubuntu: apt install python3-venv"
    "$python" -m venv --clear .venv
}

if is_complete 2>/dev/null; then
    exit 0
fi
.venv/bin/python -c 'import sys, pip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null ||
    make_environment
rm -f "${stamps[@]}"
echo "installing $requirements into .venv (once; this takes minutes)"
.venv/bin/python -m pip install --quiet --disable-pip-version-check --requirement "$requirements"
.venv/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --editable .
made_from | tee "${stamps[@]}" >/dev/null
