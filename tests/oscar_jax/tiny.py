"""A tiny model over a tiny INT2 cache. Compiling a step takes seconds, so tests that can share its few shapes do."""

from __future__ import annotations

import numpy as np

from oscar_jax.models import Decoder, tiny_config
from oscar_jax.step import Step, cache_config, make_step
from pallas_kernels.tiers import Tiers
from pallas_kernels.transform_code import TransformCodes
from tests.pallas_kernels.codes import transform_codes

CONFIG = tiny_config()
TIERS = Tiers(sink=4, recent=8, group=4, page=8)
BATCH, CHUNK, LENGTH = 3, 16, 72


def codes() -> TransformCodes:
    """Random codes with buckets of 16 tokens."""
    return transform_codes(bucket=16, layers=CONFIG.layers, head_dim=CONFIG.head_dim)


def tokens(*lengths: int) -> list[list[int]]:
    """Random token ids, always the same ones."""
    rng = np.random.default_rng(7)
    return [rng.integers(0, CONFIG.vocab_size, length).tolist() for length in lengths]


def tiny_step(decoder: Decoder) -> Step:
    """A batch of `BATCH`; call it with 1, 4 or `CHUNK` tokens a step."""
    config = cache_config(CONFIG, max_length=LENGTH, tiers=TIERS, plain_dtype="float32", batch=BATCH, step_tokens=4)
    return make_step(decoder, config, codes())
