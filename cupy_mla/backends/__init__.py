"""What a serving engine calls: `sparse_mla` for DeepSeek-V3.2 layers, `deepseek_v4` for V4's, `workspace` for the
scratch memory they share."""
