#!/usr/bin/env bash
# What a change of a kernel has to pass on a GPU machine: small cases, the GPU tests, memcheck, racecheck, on all GPUs.
#   usage: benchmarks/gpu_check.sh [--seconds S] [pytest arguments]
# --seconds: for all steps. One that is ended by it, or not begun, has failed; tests that were run are counted.
# What each step prints goes to $OUT, or to a new folder.
# COMPUTE_SANITIZER names the tool; benchmarks/racecheck.py says which one is good.
set -uo pipefail
cd "$(dirname "$0")/.."
export PYTHONPATH=$PWD PYTHONUNBUFFERED=1
seconds='' failed=0 log=${OUT:-$(mktemp -d)}
mkdir -p "$log"
[ "${1-}" = --seconds ] && { seconds=$2; shift 2; }
gpus=$(python3 -c 'from benchmarks.run import visible_gpus; print(len(visible_gpus()))')
[ "$gpus" -gt 0 ] || { echo "no GPU was found"; exit 1; }
workers=$(($(env -u OMP_NUM_THREADS nproc) * 9 / 10)) # as OMP_NUM_THREADS is what nproc says
workers=$((workers < 1 ? 1 : workers > 16 * gpus ? 16 * gpus : workers))

step() { # NAME COMMAND...: output in $log/NAME. When the time is over it is interrupted, and killed 15 seconds later.
    local name=$1 left=$((seconds - SECONDS)) limit=()
    shift
    if [ "$seconds" ]; then
        [ $left -gt 0 ] || { echo "$name: not begun"; failed=1; return; }
        limit=(timeout -s INT -k 15 $left)
    fi
    "${limit[@]}" "$@" > "$log/$name" 2>&1 || { echo "$name: status $?"; tail -n 3 "$log/$name"; failed=1; }
}

echo "$gpus GPUs, $workers test workers; logs: $log"
step kernels python3 benchmarks/run.py load_kernels --log "$log/load" ${seconds:+--seconds $((seconds - SECONDS - 5))}
step small_cases python3 benchmarks/small_cases.py
step tests python3 -m pytest -v -n $workers --dist=worksteal -m gpu "$@"
ends=$(sed -nE 's/^\[gw[0-9]+\] (\[ *[0-9]+%\] )?([A-Z]+ )/\2/p' "$log/tests" 2> /dev/null)
grep -E '^(FAILED|ERROR)' <<< "$ends" | sort
[ "$ends" ] && cut -d ' ' -f 1 <<< "$ends" | sort | uniq -c
step sanitizers python3 benchmarks/racecheck.py --log "$log/sanitizers.cases" \
    ${seconds:+--all-seconds $((seconds - SECONDS - 5))}
grep -sv ': clean' "$log/sanitizers"
exit $failed
