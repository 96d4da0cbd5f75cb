#!/usr/bin/env bash
# What a change of a kernel has to pass on a GPU machine: small cases, memcheck, racecheck, the GPU tests.
#   usage: benchmarks/gpu_check.sh [pytest arguments]
# COMPUTE_SANITIZER names the tool; benchmarks/racecheck.py says which one is good.
set -uo pipefail
cd "$(dirname "$0")/.."
export PYTHONPATH=$PWD PYTHONUNBUFFERED=1
failed=0
python3 benchmarks/small_cases.py | tail -n 3 || failed=1
for tool in memcheck racecheck; do python3 benchmarks/racecheck.py --tool $tool | grep -v ': clean' || failed=1; done
python3 -m pytest -q -m gpu tests "$@" | tail -n 25 || failed=1
exit $failed
