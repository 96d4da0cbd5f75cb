"""An H200 as choices see it, for tests without one."""

from __future__ import annotations

from cupy_mla.cuda.driver import Gpu

GPU = Gpu(device=0, sms=132, capability=90, shared_kb=227)

# Clusters of 1, 2, ... 16 CTAs, each with a multiprocessor for itself, that run at a time.
CLUSTERS_AT_ONCE = (132, 66, 39, 30, 22, 17, 15, 15, 9, 7, 7, 7, 7, 7, 7, 7)
