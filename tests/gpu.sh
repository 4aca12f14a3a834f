#!/usr/bin/env bash
# The tests that need a GPU, and what measuring costs there, on a machine without a network that has PyTorch:
#
#     make gpu-wheels                     # where there is a network: what such a machine may lack, in .models/gpu-wheels
#     tests/gpu.sh .models/gpu-wheels OUT # there: OUT/tests.txt and OUT/overhead.txt
set -euo pipefail
wheels=$(realpath "$1") out=$(mkdir -p "$2" && realpath "$2")
cd "$(dirname "$0")/.."
environment=$(mktemp -d)
trap 'rm -rf "$environment"' EXIT
python=${PYTHON:-python3}
# into a folder, not a virtual environment: the python that has PyTorch may be in one
"$python" -m pip install --quiet --no-index --no-deps --target "$environment" "$wheels"/*.whl
export PYTHONPATH=$environment
status=0
"$python" -m pytest -m cuda -p no:cacheprovider -rs tests/attention tests/measuring tests/models 2>&1 \
	| tee "$out/tests.txt" || status=$?
"$python" tests/benchmarks/overhead.py --random 7b --device cuda --dtype bfloat16 2>&1 \
	| tee "$out/overhead.txt" || status=$?
exit $status
