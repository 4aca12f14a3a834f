#!/usr/bin/env bash
# What has to be known of a GPU, in one call of at most eight minutes, on a machine without a network that has PyTorch:
#
#     make gpu-wheels                     # where there is a network: what such a machine may lack, in .models/gpu-wheels
#     tests/gpu.sh .models/gpu-wheels OUT # there: OUT/machine.txt, OUT/tests.txt and OUT/costs.txt, written as results come
#     tests/gpu.sh .models/gpu-wheels OUT --rehearse  # the same steps on a CPU, with a small model
#
# Every step has a limit, and none ends the next ones. Nothing is judged here: ratios are read from the output
# afterwards, beside the estimates of tests/benchmarks/scale.py. Only a failed test or step makes the status 1.
set -uo pipefail
wheels=$(realpath "$1") out=$(mkdir -p "$2" && realpath "$2")
cd "$(dirname "$0")/.."
environment=$(mktemp -d)
trap 'rm -rf "$environment"' EXIT
python=${PYTHON:-python3}
# into a folder, not a virtual environment: the python that has PyTorch may be in one
"$python" -m pip install --quiet --no-index --no-deps --no-compile --target "$environment" "$wheels"/*.whl || exit
export PYTHONPATH=$environment PYTHONUNBUFFERED=1
[[ ${3:-} == --rehearse ]] || export SINKSCOPE_TEST_DEVICE=cuda
processes=$(nproc) status=0

# limited SECONDS FILE COMMAND …: what the command prints goes to OUT/FILE, too
limited() {
	local start=$SECONDS limit=$1 file=$2
	shift 2
	timeout --kill-after=5 "$limit" "$@" 2>&1 | tee -a "$out/$file"
	local code=${PIPESTATUS[0]}
	((code == 0)) || status=1
	echo "$file: $((SECONDS - start)) of $limit s, status $code" | tee -a "$out/$file"
}

rm -f "$out"/{machine,tests,costs}.txt
limited 20 machine.txt "$python" tests/benchmarks/gpu.py --machine
# kernels, tables against the CPU's, interventions, quantization, steps of retrofits, launches, parity at depth 32
limited 140 tests.txt "$python" -m pytest -p no:cacheprovider -q -rs -n $((processes < 8 ? processes : 8)) \
	tests/measuring/simulated_devices.py tests/measuring/test_one_pass.py tests/attention/test_kernels.py
limited 330 costs.txt "$python" tests/benchmarks/gpu.py "${@:3}"
exit $status
