"""From one engine step's batch to what the backends need: `batch` describes and splits it, `sparse_mla` (with
`compressed`) builds the device arrays of V3.2 layers and V4's compressed caches, `swa` those of V4's sliding window,
`indexer` those of what chooses rows."""
