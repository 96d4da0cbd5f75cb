# Temporary: the GPU runs of issue 21. usage: gpu_engines.sh one|two
set -u
tests() { CUPY_CACHE_DIR=/tmp/cp_cache python -m pytest -q -p no:cacheprovider -m gpu "$@" > "$OUT/pytest.log" 2>&1; }
if [ "$1" = one ]; then
    tests tests/ops/test_context_parallel.py &
    python benchmarks/vllm_engine.py .peer-vllm --limit 145 --profile
    wait
    tail -n 4 "$OUT/pytest.log" | cut -c1-300
else
    export CUPY_CACHE_DIR=/tmp/cp_cache NCCL_NVLS_ENABLE=0
    mkdir -p /tmp/warm
    (OUT=/tmp/warm python benchmarks/context_parallel.py --quick > /tmp/warm/log 2>&1; tail -n 3 /tmp/warm/log | cut -c1-400) &
    tests tests/integrations/test_distributed.py tests/ops/test_context_parallel.py &
    python benchmarks/vllm_engine.py .peer-vllm --tensor-parallel 2 --limit 100
    wait
    python benchmarks/context_parallel.py
    tail -n 4 "$OUT/pytest.log" | cut -c1-300
fi
