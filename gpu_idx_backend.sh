#!/bin/bash
# Temporary: GPU tests of the indexer's backend, of the integrations and of compact logits, three processes at a time.
export OMP_WAIT_POLICY=passive PYTHONPATH=$PWD
run() { name=$1; shift; timeout 120 python -m pytest -q -p no:cacheprovider -m gpu --durations=3 --tb=short "$@" > "$OUT/$name.txt" 2>&1; }
run backend tests/backends/test_indexer.py tests/metadata/test_indexer.py &
run transformers tests/integrations/test_transformers.py tests/integrations/test_transformers_v4.py &
(run logits tests/test_deep_gemm.py tests/cuda/test_logits.py; run compact tests/ops/test_logits.py -k "compact or ragged") &
wait
for name in backend transformers logits compact; do
    echo "== $name"; grep -E "^(FAILED|ERROR|E  )|passed|failed|^[0-9.]+s (call|setup)" "$OUT/$name.txt" | cut -c1-200 | tail -22
done
