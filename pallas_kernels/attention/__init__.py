"""Attention over the three tiers: one call, several implementations."""

from pallas_kernels.attention.api import AttentionSpec, PlainTiers, attend, attend_ragged, ring_positions

__all__ = ["AttentionSpec", "PlainTiers", "attend", "attend_ragged", "ring_positions"]
