# Temporary: the GPU runs of issue 21. usage: gpu_engines.sh host|one|two
set -u
tests() {
    CUPY_CACHE_DIR=/tmp/cp_cache timeout 70 python -m pytest -q -p no:cacheprovider -m gpu "$@" > "$OUT/pytest.log" 2>&1
}
case $1 in
host) # where the time of a decode step goes: 110 s; measures once /tmp/go_engines is there, at most 40 s after starting
    timeout 122 python gpu_engines_host.py .peer-vllm --limit 98 > "$OUT/host.txt" 2>&1
    cut -c1-420 "$OUT/host.txt" | tail -n 60
    ;;
one) # the record of one GPU: 155 s at most, of which 110 to start
    python benchmarks/vllm_engine.py .peer-vllm --limit 155 --profile
    ;;
two) # tensor parallel 2, context parallelism, tests over NCCL: 200 s at most; an engine imports vLLM three times here
    export CUPY_CACHE_DIR=/tmp/cp_cache NCCL_NVLS_ENABLE=0
    mkdir -p /tmp/warm
    (OUT=/tmp/warm timeout 60 python benchmarks/context_parallel.py --quick > /tmp/warm/log 2>&1) &
    tests tests/integrations/test_distributed.py tests/ops/test_context_parallel.py &
    python benchmarks/vllm_engine.py .peer-vllm --tensor-parallel 2 --limit 130 2>&1 | cut -c1-700
    wait
    timeout 75 python benchmarks/context_parallel.py 2>&1 | cut -c1-420
    tail -n 3 "$OUT/pytest.log" | cut -c1-300
    tail -n 1 /tmp/warm/log | cut -c1-200
    ;;
esac
