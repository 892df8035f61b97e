"""The device of an engine: rows of plain tiers, one pool of history pages, and tails, as jax arrays.

A call takes the rows it needs out of the plain tiers, runs the decoder on them and puts them back; a call of all rows
works in place. Page table and lengths come with every call, so the device remembers nothing but K and V, and the token
that it chose last for each row: a call may be started before the host has read that.

On a mesh each part of its "data" axis has `shapes.rows` rows, its own pool and its own tails; a call feeds the same
number of rows in each, under `shard_map`, so nothing of the cache ever leaves its device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from oscar_jax import sharding
from oscar_jax.cache import KVCache, begin_step
from oscar_jax.cache_settings import CacheConfig
from oscar_jax.engine.scheduler import LAST, DeviceCall, Shapes
from oscar_jax.layer_codes import LayerCodes
from oscar_jax.models.decoder import Decoder
from oscar_jax.sampling import Sampling, choose, greedy
from oscar_jax.sharding import EVERYWHERE, HISTORY, PLAIN, ROWS
from oscar_jax.step import make_step
from pallas_kernels.attention import PlainTiers
from pallas_kernels.history import History
from pallas_kernels.transform_code import TransformCodes

GREEDY = Sampling()
WARM = Sampling(temperature=1.0)
NOWHERE = np.int32(np.iinfo(np.int32).max)  # a row or page that no array has


class JaxExecutor:
    """`scheduler.Executor` over a decoder; see there for its methods.

    Attributes:
        config: of the cache, with its dtype.
        shapes: of the calls.
        plain: sinks `[L, rows, S, K, D]` and rings `[L, rows, R, K, D]` of all rows of all parts.
        tails: the same with a tail in place of a row.
        history: pages, None for a cache that stays plain.
        last: int32 `[rows]`, the tokens chosen last.
    """

    def __init__(
        self,
        decoder: Decoder,
        config: CacheConfig,
        codes: TransformCodes | LayerCodes | None,
        *,
        shapes: Shapes,
        tails: int,
    ):
        """
        Args:
            decoder: the model.
            config: of a cache of `shapes.rows` sequences a part that can take back one token more than
                `shapes.take_back`.
            codes: transform codes of the model, None for a cache that stays plain.
            shapes: of the calls.
            tails: boundaries that can be kept in each part.

        Raises:
            ValueError: a config that does not fit the model, the codes or the shapes.
        """
        if config.batch != shapes.rows * config.data_parts or config.step_tokens < shapes.take_back + 2:
            raise ValueError(
                f"batch={config.batch}, step_tokens={config.step_tokens}: expected rows={shapes.rows} a part and at "
                f"least {shapes.take_back + 2}, two more than are taken back."
            )
        step = make_step(decoder, config, codes)
        cache = step.init()
        self.config, self.shapes = step.config, shapes
        self.plain, self.history = cache.plain, cache.history
        slots = tails * config.data_parts
        place, rows = (None, None) if config.mesh is None else sharding.named(config.mesh, (PLAIN, ROWS))
        self.tails: PlainTiers = jax.tree.map(
            lambda x: jnp.zeros((x.shape[0], slots, *x.shape[2:]), x.dtype, device=place), cache.plain
        )
        self.last = jnp.zeros(config.batch, jnp.int32, device=rows)
        self._decoder, self._codes = step.decoder, step.codes
        self._pages: list[list[int]] = [[] for _ in range(config.batch)]  # of each row, as `_tables` has them
        self._tables = np.full((config.batch, config.sequence_pages), -1, np.int32)

    def restore(self, row: int, slot: int) -> None:
        to, of = self._places_of(row, row % self.shapes.rows, slot)
        self.plain = _copy_row(self.plain, self.tails, to, of, config=self.config)

    def keep(self, row: int, slot: int) -> None:
        to, of = self._places_of(row, slot, row % self.shapes.rows)
        self.tails = _copy_row(self.tails, self.plain, to, of, config=self.config)

    def copy_page(self, row: int, source: int, target: int) -> None:
        assert self.history is not None  # without pages there is nothing to copy
        self.history = _copy_page(self.history, *self._places_of(row, target, source), config=self.config)

    def start(self, call: DeviceCall) -> Callable[[], list[list[int]]]:
        places, width = self._places(call), call.width if call.every else 1
        size = call.batch * self.config.data_parts * width
        settings, indices = [GREEDY] * size, np.zeros(size, np.int64)
        spans = []
        for place, row in zip(places, call.rows, strict=True):
            last = place * width + (len(row.tokens) if call.every else 1)
            span = slice(last - row.draws, last)
            settings[span] = [row.sampling or GREEDY] * row.draws  # type: ignore[list-item]
            indices[span] = row.index + np.arange(row.draws)
            spans.append(span)
        chosen = self._chosen(call, places, settings, indices)
        chosen.copy_to_host_async()

        def drawn() -> list[list[int]]:
            if not any(row.draws for row in call.rows):
                return [[] for _ in spans]
            tokens = sharding.on_host(chosen)
            return [tokens[span].tolist() for span in spans]

        return drawn

    def warm_up(self) -> None:
        """Compiles everything, without a trace in what is stored; call it while no request runs."""
        if jax.tree.leaves(self.tails)[0].shape[1]:
            self.restore(0, 0)
            self.keep(0, 0)
        if self.history is not None:
            self.copy_page(0, 0, 0)
        for batch, width, every in self.shapes.calls():
            size = batch * self.config.data_parts * (width if every else 1)
            self._chosen(DeviceCall([], batch, width, every), [], [WARM] * size, np.zeros(size, np.int64))

    @property
    def bytes(self) -> int:
        """Bytes of all arrays of keys and values."""
        return sum(leaf.nbytes for leaf in jax.tree.leaves((self.plain, self.tails, self.history)))

    def _places_of(self, row: int, target: int, source: int) -> tuple[np.ndarray, np.ndarray]:
        """Places to copy to and from in each part: out of range, so that nothing is stored, but in the row's."""
        part = row // self.shapes.rows
        to, of = np.full(self.config.data_parts, NOWHERE), np.zeros(self.config.data_parts, np.int32)
        to[part], of[part] = target, source
        return to, of

    def _chosen(
        self, call: DeviceCall, places: list[int], settings: Sequence[Sampling], indices: np.ndarray
    ) -> jax.Array:
        """Next tokens of a call, one for each row of its logits; does not wait for them."""
        # Columns: tokens, their count, tokens stored before, row of the part, pages; one transfer for all of them.
        host = np.zeros((call.batch * self.config.data_parts, call.width + 3 + self.config.sequence_pages), np.int32)
        tokens, numbers, table = np.split(host, (call.width, call.width + 3), axis=1)
        numbers[:, 2], table[...] = NOWHERE, -1  # padding is dropped
        if call.rows:
            for place, row in zip(places, call.rows, strict=True):
                tokens[place, : len(row.tokens)] = row.tokens
            numbers[places] = [(len(row.tokens), row.start, row.row % self.shapes.rows) for row in call.rows]
            table[places] = self._table([(row.row, row.pages) for row in call.rows])
        logits, chosen, self.last, self.plain, self.history = _feed(
            self._decoder, self._codes, self.last, self.plain, self.history, host,
            config=self.config, every=call.every, whole=call.batch == self.shapes.rows,
        )  # fmt: skip
        if any(sampling.temperature for sampling in settings):
            chosen = choose(logits, settings, indices)
            if not call.every:
                chosen, self.last = _remember(self.last, chosen, numbers[:, 2].copy(), config=self.config)
        return chosen

    def _table(self, pages: list[tuple[int, list[int]]]) -> np.ndarray:
        """Page ids of some rows, padded. Few rows change from step to step, and to compare them is cheap."""
        for row, ids in pages:
            if self._pages[row] != ids:
                self._pages[row] = ids
                self._tables[row] = -1
                self._tables[row, : len(ids)] = ids
        return self._tables[[row for row, _ in pages]]

    def _places(self, call: DeviceCall) -> list[int]:
        """Where in the call each row stands: a call of all rows has them in their order."""
        if call.batch == self.shapes.rows:
            return [row.row for row in call.rows]
        places, used = [], [0] * self.config.data_parts
        for row in call.rows:
            part = row.row // self.shapes.rows
            places.append(part * call.batch + used[part])
            used[part] += 1
        return places


@partial(jax.jit, static_argnames="config", donate_argnums=0)
def _copy_row(
    target: PlainTiers, source: PlainTiers, to: jax.Array, of: jax.Array, *, config: CacheConfig
) -> PlainTiers:
    """Copies row `of` `[parts]` of the source to `to` `[parts]` of the target in each part."""

    def copy(target: PlainTiers, source: PlainTiers, to: jax.Array, of: jax.Array) -> PlainTiers:
        return jax.tree.map(lambda x, y: x.at[:, to[0]].set(y[:, of[0]], mode="drop"), target, source)

    return sharding.on_mesh(config.mesh, copy, inputs=(PLAIN, PLAIN, ROWS, ROWS), outputs=PLAIN)(target, source, to, of)


@partial(jax.jit, static_argnames="config", donate_argnums=0)
def _copy_page(history: History, to: jax.Array, of: jax.Array, *, config: CacheConfig) -> History:
    def copy(history: History, to: jax.Array, of: jax.Array) -> History:
        return jax.tree.map(lambda x: x.at[:, to[0]].set(x[:, of[0]], mode="drop"), history)

    return sharding.on_mesh(config.mesh, copy, inputs=(HISTORY, ROWS, ROWS), outputs=HISTORY)(history, to, of)


@partial(jax.jit, static_argnames="config", donate_argnums=0)
def _remember(
    last: jax.Array, chosen: jax.Array, rows: jax.Array, *, config: CacheConfig
) -> tuple[jax.Array, jax.Array]:
    """The chosen tokens `[b]`, where every process can read them, and the last ones `[rows]` with these among them."""

    def put(last: jax.Array, chosen: jax.Array, rows: jax.Array) -> jax.Array:
        return last.at[rows].set(chosen, mode="drop")

    last = sharding.on_mesh(config.mesh, put, inputs=(ROWS, ROWS, ROWS), outputs=ROWS)(last, chosen, rows)
    chosen, last = sharding.constrained(config.mesh, (chosen, last), (EVERYWHERE, ROWS))
    return chosen, last


@partial(jax.jit, static_argnames=("config", "every", "whole"), donate_argnames=("last", "plain", "history"))
def _feed(
    decoder: Decoder,
    codes: TransformCodes | LayerCodes | None,
    last: jax.Array,
    plain: PlainTiers,
    history: History | None,
    host: jax.Array,
    *,
    config: CacheConfig,
    every: bool,
    whole: bool,
) -> tuple[jax.Array, jax.Array, jax.Array, PlainTiers, History | None]:
    """Logits `[b, V]` after each row's last token, or `[b T, V]` after every one, their greedy choice, the new state.

    Args:
        last: int32 `[rows]`, the tokens chosen last, which take the place of `LAST`. Those after each row's last token
            become the new ones; they stay as they are with `every`.
        host: int32 `[b, T + 3 + pages of a sequence]`, what the host sends: see `JaxExecutor._chosen`.
    """

    def take(plain: PlainTiers, rows: jax.Array) -> PlainTiers:
        return jax.tree.map(lambda x: jnp.take(x, rows, axis=1, mode="clip"), plain)

    def put(plain: PlainTiers, part: PlainTiers, rows: jax.Array) -> PlainTiers:
        return jax.tree.map(lambda x, new: x.at[:, rows].set(new, mode="drop"), plain, part)

    def fill(tokens: jax.Array, last: jax.Array, rows: jax.Array) -> jax.Array:
        return jnp.where(tokens == LAST, jnp.take(last, rows, mode="clip")[:, None], tokens)

    host = sharding.constrained(config.mesh, host, ROWS)
    width = host.shape[1] - 3 - config.sequence_pages
    tokens, table = host[:, :width], host[:, width + 3 :]
    counts, starts, rows = (host[:, width + place] for place in range(3))
    tokens = sharding.on_mesh(config.mesh, fill, inputs=(ROWS, ROWS, ROWS), outputs=ROWS)(tokens, last, rows)
    part = plain
    if not whole:
        part = sharding.on_mesh(config.mesh, take, inputs=(PLAIN, ROWS), outputs=PLAIN)(plain, rows)
    cache = KVCache(part, history, table, starts)
    cache, attend = begin_step(cache, config, codes, counts, tokens=width)
    positions = starts[:, None] + jnp.arange(width)
    hidden, cache, _ = decoder(tokens, positions, attend, cache, unroll=config.unroll_layers)
    if every:
        hidden = hidden.reshape(-1, hidden.shape[-1])
    else:
        end = jnp.maximum(counts - 1, 0)
        hidden = jnp.take_along_axis(hidden, end[:, None, None], axis=1)[:, 0]
    part = cache.plain
    if not whole:
        part = sharding.on_mesh(config.mesh, put, inputs=(PLAIN, PLAIN, ROWS), outputs=PLAIN)(plain, part, rows)
    logits = decoder.logits(hidden)
    chosen = greedy(logits)
    if not every:
        chosen, last = _remember(last, chosen, rows, config=config)
    part, history = sharding.constrained(config.mesh, (part, cache.history), (PLAIN, HISTORY))
    return logits, chosen, last, part, history
