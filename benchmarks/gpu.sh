#!/usr/bin/env bash
# Every figure of training that needs a GPU, on one H100 or H200, in under 10 minutes.
# gpu.md, gpu.json and hardware.toml, for tools/plan.py, are left in $OUT, or in runs/gpu.
#
#     bash benchmarks/gpu.sh                          # that is all
#     bash benchmarks/gpu.sh --device cpu --small     # the same in miniature, to try it
set -euo pipefail
cd "$(dirname "$0")/.."
python=python3
test -x .venv/bin/python && python=.venv/bin/python
out=${OUT:-runs/gpu}
mkdir -p "$out"
"$python" tools/plan.py --measure "$out/hardware.toml"
exec "$python" benchmarks/gpu.py --output "$out" "$@"
