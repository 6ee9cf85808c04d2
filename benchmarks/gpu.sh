#!/usr/bin/env bash
# Every figure of training that needs a GPU, on one H100 or H200, in under 10 minutes.
# gpu.md and gpu.json are left in $OUT, or in runs/gpu.
#
#     bash benchmarks/gpu.sh                          # that is all
#     bash benchmarks/gpu.sh --device cpu --small     # the same in miniature, to try it
set -euo pipefail
cd "$(dirname "$0")/.."
python=python3
test -x .venv/bin/python && python=.venv/bin/python
exec "$python" benchmarks/gpu.py --output "${OUT:-runs/gpu}" "$@"
