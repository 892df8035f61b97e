"""Which token is where: a pure function of the query's position.

Masks, allocators, kernels and byte accounting all call `Tiers`; nothing stores a tier boundary.
"""

from __future__ import annotations

import dataclasses
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np

Positions = TypeVar("Positions", int, np.ndarray, jnp.ndarray)


@dataclasses.dataclass(frozen=True)
class Tiers:
    """Sizes, in tokens, of the three tiers of one sequence.

    A query at position t reads `j < sink` plain, `sink <= j < history_end(t)` from INT2 history and
    `history_end(t) <= j <= t` plain. Between `recent` and `recent + group - 1` recent tokens are plain once
    `t + 1 >= sink + recent`; a sequence of at most `sink + recent` tokens is never quantized.

    Raises:
        ValueError: a size out of range, or a page that is not a multiple of the demotion group.
    """

    sink: int = 64
    recent: int = 256
    group: int = 8
    page: int = 128

    def __post_init__(self):
        for name, least in (("sink", 0), ("recent", 1), ("group", 1), ("page", 1)):
            value = getattr(self, name)
            if not isinstance(value, int) or value < least:
                raise ValueError(f"{name}={value!r}: expected a whole number of tokens, at least {least}.")
        if self.page % self.group:
            nearest = max(1, round(self.page / self.group)) * self.group
            raise ValueError(
                f"page={self.page}: expected a multiple of the demotion group {self.group}; the nearest is {nearest}."
            )

    def history_end(self, position: Positions) -> Positions:
        """First plain position after the history that a query at `position` sees; -1 means nothing is stored yet."""
        excess = position + 1 - self.sink - self.recent
        excess = excess * (excess > 0)
        if isinstance(excess, int) or not isinstance(excess, jax.Array):  # the second takes a microsecond
            whole = excess // self.group
        else:  # never negative: truncation is the floor, and `//` would be twenty operations
            whole = jax.lax.div(excess, jnp.full_like(excess, self.group))
        return self.sink + self.group * whole

    def demoted(self, starts: jax.Array, counts: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Positions `begin .. end - 1` that leave the recent window when `counts` tokens join `starts` stored ones."""
        begin = self.history_end(starts - 1)
        return begin, jnp.where(counts > 0, self.history_end(starts + counts - 1), begin)

    def demoted_rows(self, tokens: int) -> int:
        """Most positions of a sequence that a call of `tokens` new ones demotes."""
        return self.group * -(-tokens // self.group)

    def plain_tokens(self, length: int) -> int:
        """Tokens of a sequence of `length` that are held plain (sinks and recents)."""
        return length - self.history_tokens(length)

    def history_tokens(self, length: int) -> int:
        """Tokens of a sequence of `length` that are held in INT2."""
        return self.history_end(length - 1) - self.sink

    def history_pages(self, length: int) -> int:
        """Pages that the history of a sequence of `length` occupies."""
        return -(-self.history_tokens(length) // self.page)

    def ring(self, step_tokens: int) -> int:
        """Ring tokens needed when a decode step brings at most `step_tokens` tokens."""
        return self.recent + self.group - 1 + step_tokens - 1
