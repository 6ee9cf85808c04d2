#!/usr/bin/env bash
# What needs a GPU, on one H100 or H200, by groups: each takes less than 10 minutes.
#
#     bash benchmarks/gpu.sh                          # hardware matrix host loss compile dropout
#     bash benchmarks/gpu.sh speed                    # speed, sizes: only where they are named
#     bash benchmarks/gpu.sh --device cpu --small     # the short groups in miniature, to try them
#
# gpu.md, gpu.json and hardware.toml, for tools/plan.py, are left in $OUT, or in runs/gpu.
set -euo pipefail
cd "$(dirname "$0")/.."
python=python3
test -x .venv/bin/python && python=.venv/bin/python
exec "$python" benchmarks/gpu.py "$@" --output "${OUT:-runs/gpu}"
