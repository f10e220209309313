"""Attention whose cache holds latents (DeepSeek-V2, arXiv:2405.04434) instead of keys and values."""
