"""What a serving engine calls: `sparse_mla` for DeepSeek-V3.2 layers, `workspace` for the scratch memory they share."""
