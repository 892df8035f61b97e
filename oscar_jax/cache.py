"""The three-tier paged KV cache: plain sinks, INT2 history in pages, plain recents.

A step of a serving loop, for every layer: `demote` writes the history pages that the new tokens push out of the
recent window, `attend` reads all tiers, `append` stores the new tokens plain; `advance` then counts them.
`step_attention` strings the three together in the form a decoder calls; `begin_step` does too, and demotes in all
layers beforehand where one launch can. Every function is pure and returns a new cache;
jit them with the old one donated. Which token is in which tier is derived from lengths (`pallas_kernels.tiers`) and
never stored, so dropping the last tokens of a sequence is just a smaller length.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from oscar_jax import sharding
from oscar_jax.cache_settings import CacheConfig
from oscar_jax.layer_codes import LayerCodes, groups_of
from oscar_jax.sharding import CODES, EVERYWHERE, HEADS, HISTORY, PLAIN, ROWS
from pallas_kernels import dispatch
from pallas_kernels.attention import PlainTiers
from pallas_kernels.attention import attend as attend_tiers
from pallas_kernels.attention.api import lane_heads
from pallas_kernels.history import History, init_history
from pallas_kernels.storage import storage_dtype, stored
from pallas_kernels.tiers import Tiers
from pallas_kernels.transform_code import TransformCodes, bits_per_element
from pallas_kernels.write import append as append_plain
from pallas_kernels.write import demote as demote_tokens
from pallas_kernels.write import demote_ahead as demote_all_layers

if TYPE_CHECKING:
    from oscar_jax.models.attention import Attend


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KVCache:
    """Device state, a pytree of static shape; K are `CacheConfig.stored_heads`.

    Attributes:
        plain: sinks `[L, B, S, K, D]` and recents `[L, B, R, K, D]` in the plain dtype's storage dtype, or
            for TPUs several heads a row (`pallas_kernels.attention.PlainTiers`).
        history: INT2 pages, None when no sequence can outgrow its windows.
        page_indices: int32 `[B, pages of a sequence]`, the page ids of each sequence in order. On a mesh they count
            from the first page of the sequence's own part of the pool.
        lengths: int32 `[B]`, stored tokens.

    Of layers of different sizes (`LayerCodes`), `plain` and `history` are tuples with an entry for each group, and a
    page id means that page in the pool of every group.
    """

    plain: PlainTiers
    history: History | None
    page_indices: jax.Array
    lengths: jax.Array


SPECS: Any = KVCache(PLAIN, HISTORY, ROWS, ROWS)  # type: ignore[arg-type]
"""Partition specs of a cache on a mesh."""


def init_cache(config: CacheConfig, codes: TransformCodes | LayerCodes | None = None) -> KVCache:
    """An empty cache in which sequence b owns pages `b n .. (b + 1) n - 1`; replace `page_indices` to share.

    On a mesh b counts from the first sequence of its part of the batch, and the arrays are made where they belong.

    Args:
        codes: transform codes of the model; None for a cache that stays plain, which needs `recent` to cover it.

    Raises:
        ValueError: codes of another model, missing codes, a page that splits a bucket, or too few pages.
    """
    if config.plain_dtype is None:
        raise ValueError("plain_dtype=None: expected a dtype by now; make_step fills in the model's, or give one.")
    needed = config.sequence_pages
    if codes is None and needed:
        raise ValueError(
            f"codes=None with max_length={config.max_length}: a plain cache needs recent >= "
            f"{config.max_length - config.tiers.sink}, got {config.tiers.recent}; pass codes for 2-bit history."
        )
    groups = groups_of(config, codes)
    for own, code in groups:
        if code is not None:
            _check_codes(own, code)
    pages = config.pool_pages
    if config.pages is not None and pages < needed * config.data_parts:
        raise ValueError(
            f"pages={pages}: one sequence of max_length={config.max_length} needs {needed}"
            + ("." if config.data_parts == 1 else f", in each of {config.data_parts} parts of the mesh.")
        )
    dtype = storage_dtype(config.plain_dtype)
    if dtype == jnp.float64 and not jax.config.read("jax_enable_x64"):
        raise ValueError("plain_dtype='float64': switch on float64 first, with jax.enable_x64(True).")
    parts = config.data_parts
    table = np.arange(config.batch // parts * needed, dtype=np.int32).reshape(config.batch // parts, needed)
    table = np.tile(np.where(table < pages // parts, table, -1), (parts, 1))

    for_tpu = dispatch.preferred(config.implementation) == "tpu"

    def plain(config: CacheConfig) -> PlainTiers:
        sides = []
        rows = lane_heads(config.head_dim, config.device_heads) if for_tpu else 1
        for tokens in (config.tiers.sink, config.ring):
            shape = (config.layers, config.batch, tokens, config.stored_heads // rows, rows * config.head_dim)
            sides += [jnp.zeros(shape, dtype), jnp.zeros(shape, dtype)]
        return PlainTiers(*sides)

    def empty() -> KVCache:
        tiers: Any = tuple(plain(own) for own, _ in groups)
        history: Any = tuple(_init_history(own, code, pages) if code and needed else None for own, code in groups)
        if not isinstance(codes, LayerCodes):
            (tiers,), (history,) = tiers, history
        return KVCache(tiers, history, page_indices=jnp.asarray(table), lengths=jnp.zeros(config.batch, jnp.int32))

    return empty() if config.mesh is None else jax.jit(empty, out_shardings=sharding.named(config.mesh, SPECS))()


def _init_history(config: CacheConfig, codes: TransformCodes, pages: int) -> History:
    # The GPU kernels want the tokens of a page of values next to each other, the TPU kernels those of keys too, and
    # short pages in words; every other reader takes all of them.
    preferred = dispatch.preferred(config.implementation)
    copies = config.stored_heads // codes.kv_heads
    return init_history(
        codes if copies == 1 else jax.tree.map(lambda leaf: jnp.repeat(leaf, copies, axis=1), codes),
        pages=pages,
        page=config.tiers.page,
        values_tokens_last=preferred == "triton",
        tpu_heads=config.device_heads if preferred == "tpu" else None,
    )


def _check_codes(config: CacheConfig, codes: TransformCodes) -> None:
    shape = (config.layers, config.kv_heads, config.head_dim)
    placed = (config.layers, config.stored_heads, config.head_dim)  # by `sharding.place_codes`
    if (codes.layers, codes.kv_heads, codes.head_dim) not in (shape, placed):
        raise ValueError(
            f"codes for {codes.layers} layers, {codes.kv_heads} KV heads of size {codes.head_dim}: expected "
            f"{shape[0]}, {shape[1]} and {shape[2]}; calibrate this model."
        )
    if codes.bucket is not None and codes.bucket % config.tiers.page:
        raise ValueError(
            f"bucket={codes.bucket} with page={config.tiers.page}: expected pages that divide the bucket, "
            "such as 16, 32, 64 or 128."
        )


def demote(
    cache: KVCache,
    k: jax.Array,
    v: jax.Array,
    *,
    layer: jax.Array,
    counts: jax.Array,
    codes: TransformCodes,
    tiers: Tiers,
    implementation: str | Sequence[str] | None = None,
) -> KVCache:
    """Writes the history pages of the tokens that leave the recent window when `counts` new tokens arrive.

    Args:
        k, v: `[B, T, K, D]`, the new tokens in the plain dtype; a long chunk demotes some of its own.
        layer: int32 `[]`. counts: int32 `[B]`, how many of the T are real.
        implementation: as `CacheConfig.implementation`.
    """
    if cache.history is None:
        return cache
    history = demote_tokens(
        cache.history,
        cache.plain,
        k,
        v,
        layer=layer,
        starts=cache.lengths,
        counts=counts,
        page_indices=cache.page_indices,
        codes=codes,
        tiers=tiers,
        implementation=implementation,
    )
    return dataclasses.replace(cache, history=history)


def demote_ahead(
    cache: KVCache, *, tokens: int, counts: jax.Array, codes: TransformCodes, config: CacheConfig
) -> KVCache | None:
    """`demote` for all layers, before the first one runs; None where that must be left to `demote`.

    Args:
        tokens: T, new tokens of the step. counts: int32 `[B]`, how many of them are real.
    """
    if cache.history is None:
        return cache
    if tokens > config.tiers.recent:
        return None
    try:
        history = demote_all_layers(
            cache.history,
            cache.plain,
            tokens=tokens,
            starts=cache.lengths,
            counts=counts,
            page_indices=cache.page_indices,
            codes=codes,
            tiers=config.tiers,
            implementation=config.implementation,
        )
    except NotImplementedError:
        return None
    return dataclasses.replace(cache, history=history)


def append(
    cache: KVCache,
    k: jax.Array,
    v: jax.Array,
    *,
    layer: jax.Array,
    counts: jax.Array,
    tiers: Tiers,
    after: jax.Array | None = None,
    implementation: str | Sequence[str] | None = None,
) -> KVCache:
    """Stores new tokens plain: sinks in their place, the others in the ring (of a long chunk, its last ones).

    Args:
        after: attention's output of this layer, `[B, T, N, D]`. With it the tiers, which attention reads, are updated
            in place.
        The rest as for `demote`.
    """
    try:
        plain = append_plain(
            cache.plain,
            k,
            v,
            layer=layer,
            starts=cache.lengths,
            counts=counts,
            tiers=tiers,
            after=after,
            implementation=implementation,
        )
        return dataclasses.replace(cache, plain=plain)
    except NotImplementedError:
        pass
    if after is not None:
        layer = _after(after, layer)
    batch, tokens = k.shape[:2]
    ring = cache.plain.recent_k.shape[2]
    positions = cache.lengths[:, None] + jnp.arange(tokens)
    end = (cache.lengths + counts)[:, None]
    real = positions < end
    sequence = jnp.arange(batch)[:, None]
    # Places out of range are dropped.
    sink_place = jnp.where(real, positions, tiers.sink)
    ring_place = jnp.where(real & (positions >= tiers.sink) & (positions >= end - ring), positions % ring, ring)

    def put(pool: jax.Array, place: jax.Array, rows: jax.Array) -> jax.Array:
        rows = rows.reshape(batch, tokens, *pool.shape[3:])
        return pool.at[layer, sequence, place].set(stored(rows), mode="drop")

    plain = cache.plain
    return dataclasses.replace(
        cache,
        plain=PlainTiers(
            put(plain.sink_k, sink_place, k) if tiers.sink else plain.sink_k,
            put(plain.sink_v, sink_place, v) if tiers.sink else plain.sink_v,
            put(plain.recent_k, ring_place, k),
            put(plain.recent_v, ring_place, v),
        ),
    )


def attend(
    cache: KVCache,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    layer: jax.Array,
    counts: jax.Array,
    codes: TransformCodes | None,
    config: CacheConfig,
    sink_logits: jax.Array | None = None,
) -> jax.Array:
    """Attention of new tokens to their sequences and to each other, `[B, T, N, D]`.

    Args:
        q: `[B, T, N, D]`. k, v: `[B, T, K, D]` in the plain dtype. The rest as for `demote`.
    """
    window = None
    if config.windows is not None:
        unlimited = np.iinfo(np.int32).max // 2
        window = jnp.asarray([unlimited if w is None else w for w in config.windows], jnp.int32)[layer]
    return attend_tiers(
        q,
        k,
        v,
        cache.plain,
        cache.history,
        layer=layer,
        starts=cache.lengths,
        counts=counts,
        page_indices=cache.page_indices,
        codes=codes if cache.history is not None else None,
        tiers=config.tiers,
        spec=config.attention,
        window=window,
        sink_logits=sink_logits,
        implementation=config.implementation,
    )


def step_attention(
    config: CacheConfig, codes: TransformCodes | None, counts: jax.Array, *, demoted: bool = False
) -> Attend:
    """The `attend(state, layer, q, k, v)` that a decoder calls in every layer, with the cache as its state.

    With a mesh in the config, each device does it with the heads and sequences that it holds.

    Args:
        codes: on a mesh those of `sharding.place_codes`.
        counts: int32 `[B]`, how many of the step's tokens are real.
        demoted: `demote_ahead` has written the history of this step.
    """

    def local(cache: KVCache, codes: TransformCodes | None, counts: jax.Array, layer: jax.Array, q, k, v):
        options = {"tiers": config.tiers, "implementation": config.implementation}
        if codes is not None and not demoted:
            cache = demote(cache, k, v, layer=layer, counts=counts, codes=codes, **options)
        out = attend(cache, q, k, v, layer=layer, counts=counts, codes=codes, config=config)
        return out, append(cache, k, v, layer=layer, counts=counts, after=out, **options)

    inputs = (SPECS, CODES, ROWS, EVERYWHERE, HEADS, HEADS, HEADS)
    on_mesh = sharding.on_mesh(config.mesh, local, inputs=inputs, outputs=(HEADS, SPECS))

    def step(cache: KVCache, layer: jax.Array, q: jax.Array, k: jax.Array, v: jax.Array):
        k, v = (sharding.copied(x.astype(config.plain_dtype), config.head_copies) for x in (k, v))
        return *on_mesh(cache, codes, counts, layer, q, k, v), None

    return step


def begin_step(
    cache: KVCache, config: CacheConfig, codes: TransformCodes | LayerCodes | None, counts: jax.Array, *, tokens: int
) -> tuple[KVCache, Attend | list[tuple[int, Attend]]]:
    """`step_attention` and the cache it starts from, with history written for all layers at once where that is faster.

    Args:
        tokens: T, new tokens of the step.

    Returns:
        The cache, and what a decoder takes as `attend`: of layers of different sizes, one for each run of layers alike.
    """
    if not isinstance(codes, LayerCodes):
        return _begin_group(cache, config, codes, counts, tokens=tokens)
    attends = []
    for number, (own, code) in enumerate(groups_of(config, codes)):
        part, attend = _begin_group(_of_group(cache, number), own, code, counts, tokens=tokens)
        cache = _with_group(cache, number, part)
        attends.append(_in_group(number, attend, codes.places))
    return cache, [(count, attends[number]) for count, number in codes.runs]


def _in_group(number: int, attend: Attend, places: Sequence[int]) -> Attend:
    """Attention of a group's layers, of the model's layers and with the whole cache as its state."""

    def step(cache: KVCache, layer: jax.Array, q: jax.Array, k: jax.Array, v: jax.Array):
        out, part, extra = attend(_of_group(cache, number), jnp.asarray(places, jnp.int32)[layer], q, k, v)
        return out, _with_group(cache, number, part), extra

    return step


def _of_group(cache: KVCache, number: int) -> KVCache:
    """A group's cache."""
    parts: Any = cache
    return dataclasses.replace(cache, plain=parts.plain[number], history=parts.history[number])


def _with_group(cache: KVCache, number: int, new: KVCache) -> KVCache:
    """The cache with another one for a group."""

    def put(parts: Any, part: Any) -> Any:
        return *parts[:number], part, *parts[number + 1 :]

    return dataclasses.replace(cache, plain=put(cache.plain, new.plain), history=put(cache.history, new.history))


def _begin_group(
    cache: KVCache, config: CacheConfig, codes: TransformCodes | None, counts: jax.Array, *, tokens: int
) -> tuple[KVCache, Attend]:
    demoted = False
    if codes is not None:

        def ahead(cache: KVCache, codes: TransformCodes, counts: jax.Array) -> KVCache:
            nonlocal demoted
            done = demote_ahead(cache, tokens=tokens, counts=counts, codes=codes, config=config)
            demoted = done is not None
            return cache if done is None else done

        cache = sharding.on_mesh(config.mesh, ahead, inputs=(SPECS, CODES, ROWS), outputs=SPECS)(cache, codes, counts)
    return cache, step_attention(config, codes, counts, demoted=demoted)


def _after(out: jax.Array, layer: jax.Array) -> jax.Array:
    """`layer`, known only once `out` is.

    The plain tiers are read, then written. XLA copies them whole in every layer unless the order follows from the data,
    and it drops optimization barriers before it looks. So the layer depends on a condition of `out` that never holds.
    """
    first = out[0, 0, 0, 0]
    return jnp.where((first == first) & (first != first), 0, layer)


def advance(cache: KVCache, counts: ArrayLike) -> KVCache:
    """Counts the tokens of a finished step, `counts` int32 `[B]`; negative counts take tokens back."""
    return dataclasses.replace(cache, lengths=cache.lengths + counts)


def cache_bytes(cache: KVCache) -> dict[str, int]:
    """Bytes of the arrays on the device: `plain`, `history`, `tables`, and `total`."""

    def size(tree: Any) -> int:
        return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))

    parts = {
        "plain": size(cache.plain),
        "history": size(cache.history),
        "tables": size((cache.page_indices, cache.lengths)),
    }
    return parts | {"total": sum(parts.values())}


def expected_bits(config: CacheConfig, codes: TransformCodes | LayerCodes | None, context: int) -> float:
    """`bits_per_element` of this cache at a context length, the mean over its layers."""
    width = 8 * jnp.dtype(config.plain_dtype).itemsize
    bits = [
        own.layers * bits_per_element(code, own.tiers, context, plain_bits=width)
        for own, code in groups_of(config, codes)
    ]
    return sum(bits) / config.layers
