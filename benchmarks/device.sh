#!/usr/bin/env bash
# Build, test and time the package on another machine, in one go: what a lent machine with AVX-512 or a GPU is asked for.
# Usage: benchmarks/device.sh RESULTS_FOLDER [pytest arguments]
# Needs torch, cmake, ninja, setuptools, pybind11 and pytest there; nothing is downloaded.
set -u
results=$1
shift
mkdir -p "$results"
lscpu >"$results/lscpu.txt" 2>&1
python3 -m pip install -q --no-build-isolation --no-deps --target "$results/../mxfp4_site" . >"$results/build.log" 2>&1 || {
  tail -40 "$results/build.log"
  exit 1
}
site=$(cd "$results/../mxfp4_site" && pwd)
export PYTHONPATH="$site:${PYTHONPATH:-}"
python3 -c 'import mxfp4_ops, torch; print(mxfp4_ops.arch_of("cpu"), torch.__version__, torch.get_num_threads(), "threads")'
python3 -m pytest -q -p no:cacheprovider "$@" >"$results/tests.log" 2>&1
echo "tests: exit $?"
grep -E '^(FAILED|ERROR|E  )|passed|failed' "$results/tests.log" | tail -40
