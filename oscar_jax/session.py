"""`Session`: a batch of sequences being decoded, as token ids. No tokenizer, no text."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

import jax
import numpy as np
from numpy.typing import ArrayLike
from tqdm import tqdm

from oscar_jax.cache import advance, cache_bytes
from oscar_jax.sampling import Sampling, choose
from oscar_jax.sharding import on_host
from oscar_jax.step import CHUNKS, Output, Step, prefill


class Session:
    """A batch of sequences: the cache, and what the host must know to use it rightly.

    Attributes:
        step: the model and its cache's configuration.
        cache: replaced by every call; never keep an old one.
        lengths: int64 `[B]`, stored tokens.
    """

    def __init__(self, step: Step, *, chunks: Sequence[int] = CHUNKS):
        """
        Args:
            step: from `make_step`.
            chunks: token counts of prefill calls, as for `step.prefill`.
        """
        self.step = step
        self._chunks = tuple(chunks)
        self.cache = step.init()
        self.lengths = np.zeros(step.config.batch, np.int64)
        self._longest = self.lengths.copy()

    def feed(self, tokens: ArrayLike, counts: ArrayLike | None = None, *, output: Output = "last") -> jax.Array:
        """Stores tokens `[B, T]`, of which `counts` `[B]` are real, and returns the output of `Step`.

        Raises:
            ValueError: a count out of range, or a sequence that would outgrow the cache.
        """
        wide = np.shape(tokens)[-1] if np.ndim(tokens) else 0
        real = np.full(len(self.lengths), wide) if counts is None else np.asarray(counts)
        if ((real < 0) | (real > wide)).any():
            raise ValueError(f"counts={real.tolist()}: expected 0 to {wide}, the tokens of the step.")
        self._check_room(real)
        result, self.cache = self.step(self.cache, tokens, real, output=output)
        self._stored(real)
        return result

    def prefill(self, prompts: Sequence[Sequence[int]], *, progress: bool = False) -> jax.Array:
        """Stores a prompt for each sequence, of any lengths, and returns logits `[B, V]` after the last tokens.

        Raises:
            ValueError: another number of prompts than sequences, an empty prompt, or one too long for the cache.
        """
        lengths = np.asarray([len(prompt) for prompt in prompts])
        if len(prompts) == len(self.lengths):
            check_not_empty(prompts)
            self._check_room(lengths)
        longest = int(lengths.max(initial=0))
        with tqdm(total=longest, desc="prompt", unit="tok", disable=not progress, leave=False) as bar:
            report = bar.update if progress else None
            logits, self.cache = prefill(self.step, self.cache, prompts, chunks=self._chunks, progress=report)
        self._stored(lengths)
        return logits

    def take_back(self, counts: ArrayLike) -> None:
        """Removes the last `counts` int `[B]` tokens, as after drafted tokens that were rejected.

        Raises:
            ValueError: more than are there, or so many that plain tokens they pushed out would be needed again.
        """
        counts = np.asarray(counts)
        limit = self.step.config.step_tokens - 1
        lengths = self.lengths - counts
        if (counts < 0).any() or (lengths < 0).any() or (self._longest - lengths > limit).any():
            raise ValueError(
                f"counts={counts.tolist()}: expected 0 to {limit} tokens behind the longest each sequence has been; "
                "for more, give the cache's configuration a larger step_tokens."
            )
        self.cache = advance(self.cache, -counts.astype(np.int32))
        self.lengths = lengths

    def decode(
        self,
        logits: jax.Array,
        sampling: Sequence[Sampling],
        *,
        max_tokens: Sequence[int],
        stop_tokens: Collection[int] = (),
    ) -> Iterator[list[int | None]]:
        """New tokens, one for each sequence at a time.

        Args:
            logits: `[B, V]`, where to begin (from `prefill`).
            sampling: one for each sequence.
            max_tokens: at least 1, one for each sequence.
            stop_tokens: a sequence ends with the first of these.

        Yields:
            For each sequence its next token, a stop token included, or None once it has ended. A sequence that has
            ended no longer changes, and leaves the others alone. Its last token is not stored in the cache.

        Raises:
            ValueError: `max_tokens` out of range or beyond the cache.
        """
        limits = np.asarray(max_tokens)
        if limits.shape != self.lengths.shape or (limits < 1).any():
            raise ValueError(
                f"max_tokens={limits.tolist()}: expected at least 1 for each of {len(self.lengths)} sequences."
            )
        self._check_room(limits - 1)
        given = np.zeros(len(limits), np.int64)
        live = np.ones(len(limits), bool)
        while True:
            tokens = on_host(choose(logits, sampling, given))
            yield [int(token) if alive else None for token, alive in zip(tokens, live, strict=True)]
            given += live
            live = live & (given < limits) & ~np.isin(tokens, list(stop_tokens))
            if not live.any():
                return
            logits = self.feed(tokens[:, None], live.astype(np.int32))

    def bytes(self) -> int:
        """Bytes of the cache's arrays on the device."""
        return cache_bytes(self.cache)["total"]

    def _check_room(self, counts: np.ndarray) -> None:
        limit = self.step.config.max_length
        over = np.flatnonzero(self.lengths + counts > limit)
        if over.size:
            row = over[0]
            raise ValueError(
                f"sequence {row}: {self.lengths[row]} stored and {counts[row]} new tokens, expected at most "
                f"max_length={limit}; build the cache with a larger max_length."
            )

    def _stored(self, counts: np.ndarray) -> None:
        self.lengths = self.lengths + counts
        self._longest = np.maximum(self._longest, self.lengths)


def check_not_empty(prompts: Sequence[Sequence[int]]) -> None:
    """Raises ValueError if a prompt has no tokens."""
    for row, prompt in enumerate(prompts):
        if not len(prompt):
            which = f"prompt {row}" if len(prompts) > 1 else "prompt"
            raise ValueError(f"{which} is empty: expected at least one token.")
