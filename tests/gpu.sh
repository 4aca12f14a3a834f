#!/usr/bin/env bash
# The tests on a GPU, and what measuring costs there, on a machine without a network that has PyTorch:
#
#     make gpu-wheels                     # where there is a network: what such a machine may lack, in .models/gpu-wheels
#     tests/gpu.sh .models/gpu-wheels OUT # there: OUT/tests.txt and OUT/overhead.txt, written as results come
#
# The times are those of a model of Llama-2-7B's shape with random weights, in bfloat16. A row that takes more than
# --at-most times the bare pass fails.
set -uo pipefail
wheels=$(realpath "$1") out=$(mkdir -p "$2" && realpath "$2")
cd "$(dirname "$0")/.."
environment=$(mktemp -d)
trap 'rm -rf "$environment"' EXIT
python=${PYTHON:-python3}
# into a folder, not a virtual environment: the python that has PyTorch may be in one
"$python" -m pip install --quiet --no-index --no-deps --target "$environment" "$wheels"/*.whl || exit
export PYTHONPATH=$environment PYTHONUNBUFFERED=1
status=0
: >"$out/tests.txt"
: >"$out/overhead.txt"

tests() {
	"$python" -m pytest -p no:cacheprovider -rs "$@" 2>&1 | tee -a "$out/tests.txt" || status=$?
}
times() {
	"$python" tests/benchmarks/overhead.py --random 7b --device cuda --dtype bfloat16 --rounds 3 "$@" 2>&1 |
		tee -a "$out/overhead.txt" || status=$?
}

# kernels, tables against the CPU's, interventions, quantization, steps of retrofits, launches, parity at depth 32
SINKSCOPE_TEST_DEVICE=cuda tests tests/measuring/simulated_devices.py
tests -m cuda tests/attention
times --only forward --shape 8 64 --at-most 4
times --only forward --shape 100 64 --at-most 2
times --only forward --shape 8 2048 --at-most 1.5
times --only forward --shape 1 32768 --at-most 1.5
times --only backward --shape 8 64 --at-most 4
times --only arms --shape 8 64
exit $status
