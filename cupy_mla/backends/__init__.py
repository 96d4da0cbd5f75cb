"""What a serving engine calls: `sparse_mla` for DeepSeek-V3.2 layers, `deepseek_v4` for V4's, `indexer` for what
chooses their rows, `workspace` for the scratch memory they share."""
