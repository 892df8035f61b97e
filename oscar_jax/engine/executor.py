"""The device of an engine: rows of plain tiers, one pool of history pages, and tails, as jax arrays.

A call takes the rows it needs out of the plain tiers, runs the decoder on them and puts them back; a call of all rows
works in place. Page table and lengths come with every call, so the device remembers nothing but K and V.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from oscar_jax.cache import CacheConfig, KVCache, begin_step
from oscar_jax.engine.scheduler import DeviceCall, Shapes
from oscar_jax.models.decoder import Decoder
from oscar_jax.sampling import Sampling, choose
from oscar_jax.step import make_step
from pallas_kernels.attention import PlainTiers
from pallas_kernels.history import History
from pallas_kernels.transform_code import TransformCodes

GREEDY = Sampling()
WARM = Sampling(temperature=1.0)


class JaxExecutor:
    """`scheduler.Executor` over a decoder; see there for its methods.

    Attributes:
        config: of the cache, with its dtype.
        shapes: of the calls.
        plain: sinks `[L, rows, S, K, D]` and rings `[L, rows, R, K, D]` of all rows.
        tails: the same with a tail in place of a row.
        history: pages, None for a cache that stays plain.
    """

    def __init__(
        self, decoder: Decoder, config: CacheConfig, codes: TransformCodes | None, *, shapes: Shapes, tails: int
    ):
        """
        Args:
            decoder: the model.
            config: of a cache of `shapes.rows` sequences that can take back one token more than `shapes.drafts`.
            codes: transform codes of the model, None for a cache that stays plain.
            shapes: of the calls.
            tails: boundaries that can be kept.

        Raises:
            ValueError: a config that does not fit the model, the codes or the shapes.
        """
        if config.batch != shapes.rows or config.step_tokens < shapes.drafts + 2:
            raise ValueError(
                f"batch={config.batch}, step_tokens={config.step_tokens}: expected rows={shapes.rows} and at least "
                f"{shapes.drafts + 2}, two more than the drafted tokens."
            )
        step = make_step(decoder, config, codes)
        cache = step.init()
        self.config, self.shapes = step.config, shapes
        self.plain, self.history = cache.plain, cache.history
        self.tails: PlainTiers = jax.tree.map(
            lambda x: jnp.zeros((x.shape[0], tails, *x.shape[2:]), x.dtype), cache.plain
        )
        self._decoder, self._codes = decoder, codes

    def restore(self, row: int, slot: int) -> None:
        self.plain = _copy_row(self.plain, self.tails, np.int32(row), np.int32(slot))

    def keep(self, row: int, slot: int) -> None:
        self.tails = _copy_row(self.tails, self.plain, np.int32(slot), np.int32(row))

    def copy_page(self, source: int, target: int) -> None:
        assert self.history is not None  # without pages there is nothing to copy
        self.history = _copy_page(self.history, np.int32(source), np.int32(target))

    def run(self, call: DeviceCall) -> list[list[int]]:
        places = self._places(call)
        return self._choose(call, places, self._logits(call, places))

    def warm_up(self) -> None:
        """Compiles everything, without a trace in what is stored; call it while no request runs."""
        if self.tails.recent_k.shape[1]:
            self.restore(0, 0)
            self.keep(0, 0)
        if self.history is not None:
            self.copy_page(0, 0)
        for batch, width in self.shapes.calls():
            for every in {False, 1 < width <= 1 + self.shapes.drafts}:
                logits = self._logits(DeviceCall([], batch, width, every), [])
                for sampling in (GREEDY, WARM):
                    choose(logits, [sampling] * len(logits), np.zeros(len(logits), np.int64))

    @property
    def bytes(self) -> int:
        """Bytes of all arrays that stay on the device, the model's weights aside."""
        return sum(leaf.nbytes for leaf in jax.tree.leaves((self.plain, self.tails, self.history)))

    def _logits(self, call: DeviceCall, places: list[int]) -> jax.Array:
        tokens = np.zeros((call.batch, call.width), np.int32)
        counts, starts = np.zeros(call.batch, np.int32), np.zeros(call.batch, np.int32)
        table = np.full((call.batch, self.config.sequence_pages), -1, np.int32)
        for place, row in zip(places, call.rows, strict=True):
            tokens[place, : len(row.tokens)] = row.tokens
            counts[place], starts[place] = len(row.tokens), row.start
            table[place, : len(row.pages)] = row.pages
        rows = np.full(call.batch, self.shapes.rows, np.int32)  # out of range: padding is dropped
        rows[places] = [row.row for row in call.rows]
        logits, self.plain, self.history = _feed(
            self._decoder, self._codes, self.plain, self.history, tokens, counts, starts, table, rows,
            config=self.config, every=call.every, whole=call.batch == self.shapes.rows,
        )  # fmt: skip
        return logits

    def _places(self, call: DeviceCall) -> list[int]:
        """Where in the call each row stands: a call of all rows has them in their order."""
        return [row.row for row in call.rows] if call.batch == self.shapes.rows else list(range(len(call.rows)))

    def _choose(self, call: DeviceCall, places: list[int], logits: jax.Array) -> list[list[int]]:
        if not any(row.draws for row in call.rows):
            return [[] for _ in call.rows]
        width = call.width if call.every else 1
        settings, indices = [GREEDY] * (call.batch * width), np.zeros(call.batch * width, np.int64)
        spans = []
        for place, row in zip(places, call.rows, strict=True):
            last = place * width + (len(row.tokens) if call.every else 1)
            span = slice(last - row.draws, last)
            settings[span] = [row.sampling or GREEDY] * row.draws  # type: ignore[list-item]
            indices[span] = row.index + np.arange(row.draws)
            spans.append(span)
        chosen = np.asarray(choose(logits, settings, indices))
        return [chosen[span].tolist() for span in spans]


@partial(jax.jit, donate_argnums=0)
def _copy_row(target: PlainTiers, source: PlainTiers, target_row: jax.Array, source_row: jax.Array) -> PlainTiers:
    return jax.tree.map(lambda to, of: to.at[:, target_row].set(of[:, source_row]), target, source)


@partial(jax.jit, donate_argnums=0)
def _copy_page(history: History, source: jax.Array, target: jax.Array) -> History:
    return jax.tree.map(lambda x: x.at[:, target].set(x[:, source]), history)


@partial(jax.jit, static_argnames=("config", "every", "whole"), donate_argnames=("plain", "history"))
def _feed(
    decoder: Decoder,
    codes: TransformCodes | None,
    plain: PlainTiers,
    history: History | None,
    tokens: jax.Array,
    counts: jax.Array,
    starts: jax.Array,
    table: jax.Array,
    rows: jax.Array,
    *,
    config: CacheConfig,
    every: bool,
    whole: bool,
) -> tuple[jax.Array, PlainTiers, History | None]:
    """Logits `[b, V]` after each row's last token, or `[b T, V]` after every one, and the new tiers."""
    part = plain if whole else jax.tree.map(lambda x: jnp.take(x, rows, axis=1, mode="clip"), plain)
    cache = KVCache(part, history, table, starts)
    cache, attend = begin_step(cache, config, codes, counts, tokens=tokens.shape[1])
    positions = starts[:, None] + jnp.arange(tokens.shape[1])
    hidden, cache, _ = decoder(tokens, positions, attend, cache)
    if every:
        hidden = hidden.reshape(-1, hidden.shape[-1])
    else:
        last = jnp.maximum(counts - 1, 0)
        hidden = jnp.take_along_axis(hidden, last[:, None, None], axis=1)[:, 0]
    if not whole:
        put = jax.tree.map(lambda x, new: x.at[:, rows].set(new, mode="drop"), plain, cache.plain)
        return decoder.logits(hidden), put, cache.history
    return decoder.logits(hidden), cache.plain, cache.history
