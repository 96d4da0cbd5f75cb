"""What a serving engine calls for a layer: `sparse_mla` (attention of DeepSeek-V3.2 layers), `deepseek_v4` (of V4 and
V4.1 layers), `indexer` (chooses the rows), `index_groups` (lists that layers share), `workspace` (scratch memory)."""
