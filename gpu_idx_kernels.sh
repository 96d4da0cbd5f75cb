export CUPY_CACHE_DIR=/tmp/cupycache
timeout 70 python3 gpu_idx_kernels.py 2>&1 | tail -40
timeout 40 ncu --clock-control none -k regex:logits_sm90 -s 1 -c 1 --metrics sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active,sm__inst_issued.avg.pct_of_peak_sustained_active,lts__t_sectors.avg.pct_of_peak_sustained_elapsed,sm__cycles_elapsed.max,gpu__time_duration.sum,smsp__average_warps_issue_stalled_long_scoreboard_per_issue_active.ratio python3 gpu_idx_kernels.py prefill --one U2 2>&1 | grep -E "__|rror" | cut -c1-120 | tail -12
timeout 60 python3 -m pytest -q -p no:cacheprovider -m gpu tests/cuda/test_logits.py tests/ops/test_logits.py 2>&1 | grep -v SKIP | tail -8
