"""Speculative decoding: cheap drafts of the next tokens, which one call of the model verifies.

Leviathan et al. 2023, "Fast inference from transformers via speculative decoding" (arXiv:2211.17192). A draft is a token here, not
a distribution, so their rejection rule is: draw from the model's own distribution, and keep the draft if it is what was drawn.
"""
