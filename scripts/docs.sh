#!/usr/bin/env bash
# Usage: scripts/docs.sh [OUTPUT]
# Makes a site of README and docs/, with search, that opens without a network: OUTPUT/README.html
# (by default build/docs). Its tools live in build/docs-env.
set -euo pipefail
if [[ ${1:-} = --help || ${1:-} = -h ]]; then
    sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0"
    exit
fi
output=$(realpath -m "${1:-$(dirname "${BASH_SOURCE[0]}")/../build/docs}")
cd "$(dirname "${BASH_SOURCE[0]}")/.."

environment=build/docs-env
if ! cmp --silent requirements-docs.txt "$environment/made_from"; then
    "${PYTHON:-python3}" -m venv --clear "$environment"
    "$environment/bin/pip" install --quiet --disable-pip-version-check --requirement requirements-docs.txt
    cp requirements-docs.txt "$environment/made_from"
fi
"$environment/bin/sphinx-build" --quiet --fail-on-warning -c docs . "$output"
echo "$output/README.html"
