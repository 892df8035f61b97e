"""Next tokens from logits: greedy, temperature, top-k, top-p, each sequence with its own settings and its own seed."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import ArrayLike


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How the tokens of one sequence are chosen.

    Attributes:
        temperature: divides the logits; 0 takes the largest logit (the first of equal ones), whatever the rest says.
        top_k: only the k largest logits may be drawn; 0 means all.
        top_p: of those, only the smallest set, largest first, whose probabilities sum to at least p; 1 means all.
        seed: the i-th token of a sequence depends on its logits, this seed and i alone.

    Raises:
        ValueError: a setting out of range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self):
        if not (self.temperature >= 0 and math.isfinite(self.temperature)):
            raise ValueError(f"temperature={self.temperature}: expected a finite number of at least 0 (0 is greedy).")
        if not isinstance(self.top_k, int) or not 0 <= self.top_k < 2**31:
            raise ValueError(
                f"top_k={self.top_k!r}: expected a whole number from 0 to {2**31 - 1} (0 keeps all tokens)."
            )
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p={self.top_p}: expected above 0 and at most 1 (1 keeps all tokens).")
        if not isinstance(self.seed, int) or not 0 <= self.seed < 2**32:
            raise ValueError(f"seed={self.seed!r}: expected a whole number from 0 to {2**32 - 1}.")


def choose(logits: jax.Array, settings: Sequence[Sampling], indices: ArrayLike) -> jax.Array:
    """One token for each sequence, int32 `[B]`.

    Args:
        logits: `[B, V]`.
        settings: one for each sequence.
        indices: int `[B]`, how many tokens each sequence has been given before.

    Raises:
        ValueError: another number of settings than sequences.
    """
    if len(settings) != logits.shape[0]:
        raise ValueError(f"settings for {len(settings)} sequences: expected {logits.shape[0]}, one a row of logits.")
    if all(setting.temperature == 0 for setting in settings):
        return greedy(logits)
    fields = {"temperature": np.float32, "top_k": np.int32, "top_p": np.float32, "seed": np.uint32}
    columns = [np.asarray([getattr(setting, name) for setting in settings], dtype) for name, dtype in fields.items()]
    return _draw(logits, *columns, jnp.asarray(indices, jnp.uint32))


@jax.jit
def greedy(logits: jax.Array) -> jax.Array:
    """The most likely token of each row, int32 `[B]`; of equal ones the first."""
    return jnp.argmax(logits, axis=-1).astype(jnp.int32)


@jax.jit
def _draw(logits, temperature, top_k, top_p, seeds, indices) -> jax.Array:
    def one(logits, temperature, top_k, top_p, seed, index):
        # Largest first and stable: of equal logits the lower token counts as larger, as argmax has it.
        order = jnp.argsort(logits, descending=True, stable=True)
        ranked = logits[order] / jnp.where(temperature > 0, temperature, 1)
        rank = jnp.arange(ranked.size)
        ranked = jnp.where((top_k == 0) | (rank < top_k), ranked, -jnp.inf)
        probabilities = jax.nn.softmax(ranked)
        before = jnp.cumsum(probabilities) - probabilities
        # Rank 0 always stays; with p = 1 nothing goes, although rounding may bring the sum to 1 before the end.
        ranked = jnp.where((rank == 0) | (before < top_p) | (top_p >= 1), ranked, -jnp.inf)
        key = jax.random.fold_in(jax.random.key(seed), index)
        return order[jnp.where(temperature > 0, jax.random.categorical(key, ranked), 0)]

    return jax.vmap(one)(logits, temperature, top_k, top_p, seeds, indices).astype(jnp.int32)
