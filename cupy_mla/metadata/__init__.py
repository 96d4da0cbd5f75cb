"""From one engine step's batch to what the backends need: `batch` describes and splits it, `sparse_mla` builds the
device arrays of a V3.2 layer group."""
