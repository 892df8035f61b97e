"""Triton kernels of the reference: `quantize` (clip, quantize, pack) and `decode` (attention over the three tiers)."""
