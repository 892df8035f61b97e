"""Drives a three-tier cache the way a decoder does, and the definition of what must come out."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from oscar_jax.cache import KVCache, advance, begin_step, init_cache
from oscar_jax.cache_settings import CacheConfig
from pallas_kernels import codec
from pallas_kernels.attention import AttentionSpec
from pallas_kernels.history import History
from pallas_kernels.storage import loaded
from pallas_kernels.tiers import Tiers
from pallas_kernels.transform_code import TransformCodes
from tests.pallas_kernels import attention_definition as definition
from tests.pallas_kernels import codec_definition
from tests.pallas_kernels.codes import transform_codes

LAYERS, BATCH, LENGTH = 2, 2, 72
HEADS, KV_HEADS, DIM = 4, 2, 64
BASE = CacheConfig(
    layers=LAYERS, q_heads=HEADS, kv_heads=KV_HEADS, head_dim=DIM, max_length=LENGTH, batch=BATCH,
    tiers=Tiers(4, 8, 4, 8), plain_dtype="float32", step_tokens=5, attention=AttentionSpec(DIM**-0.5),
)  # fmt: skip
WIDTHS = (1, 5, 24)  # tokens of a call: one, several (read as slots), many (read as rows)


def config(**changes) -> CacheConfig:
    return dataclasses.replace(BASE, **changes)


@functools.cache
def base_codes(**changes) -> TransformCodes:
    sizes: dict[str, Any] = {"bucket": 16, "layers": LAYERS, "head_dim": DIM, "kv_heads": KV_HEADS}
    return transform_codes(**(sizes | changes))


@dataclasses.dataclass(frozen=True)
class Tokens:
    """q `[L, B, n, N, D]`, k and v `[L, B, n, K, D]` of whole sequences."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray

    @classmethod
    def random(cls, seed=0, dtype: DTypeLike = np.float32, length=LENGTH, heads=HEADS, kv_heads=KV_HEADS, dim=DIM):
        rng = np.random.default_rng(seed)
        shapes = ((LAYERS, BATCH, length, n, dim) for n in (heads, kv_heads, kv_heads))
        return cls(*(rng.normal(size=shape).astype(dtype) for shape in shapes))

    def take(self, order) -> "Tokens":
        return Tokens(*(x[:, order] for x in (self.q, self.k, self.v)))


# Compiling is nearly all the time of these tests, and LLVM's optimiser is not under test.
@functools.partial(
    jax.jit, static_argnames="config", donate_argnames="cache",
    compiler_options={"xla_backend_optimization_level": 0},
)  # fmt: skip
def step(cache: KVCache, codes, q, k, v, counts, *, config: CacheConfig):
    """All layers of one step, as a decoder runs them: a scan with the cache in its carry. Returns outputs and cache."""
    cache, attend = begin_step(cache, config, codes, counts, tokens=q.shape[2])
    assert callable(attend)  # one for all layers, which are alike

    def layer(cache, inputs):
        out, cache, _ = attend(cache, *inputs)
        return cache, out

    cache, out = jax.lax.scan(layer, cache, (jnp.arange(config.layers, dtype=jnp.int32), q, k, v))
    return out, advance(cache, counts)


def feed(cache, codes, tokens: Tokens, begins, counts, *, width, config=BASE, junk_from=None):
    """One step of `counts` tokens a sequence from `begins` on; padding is NaN, or later tokens are junk."""
    batch = len(counts)
    arrays = []
    for number, whole in enumerate((tokens.q, tokens.k, tokens.v)):
        shape = (LAYERS, batch, width, *whole.shape[3:])
        chunk = np.random.default_rng(99 + number).normal(size=shape).astype(whole.dtype)
        if junk_from is None:
            chunk[:] = np.nan
        for b, (begin, count) in enumerate(zip(begins, counts, strict=True)):
            real = count if junk_from is None else min(count, junk_from)
            chunk[:, b, :real] = whole[:, b, begin : begin + real]
        arrays.append(chunk)
    out, cache = step(cache, codes, *arrays, jnp.asarray(counts, jnp.int32), config=config)
    return np.asarray(out), cache


def run(schedule, *, width, tokens, codes, config=BASE, cache=None):
    """Feeds steps of `schedule`, a list of counts `[B]`.

    Returns:
        Outputs `[L, B, n, N, D]` (NaN past a sequence's end) and the cache.
    """
    cache = init_cache(config, codes) if cache is None else cache
    outputs = np.full(tokens.q.shape, np.nan, tokens.q.dtype)
    begins = [0] * len(schedule[0])
    for counts in schedule:
        out, cache = feed(cache, codes, tokens, begins, counts, width=width, config=config)
        for b, (begin, count) in enumerate(zip(begins, counts, strict=True)):
            outputs[:, b, begin : begin + count] = out[:, b, :count]
        begins = [a + b for a, b in zip(begins, counts, strict=True)]
    return outputs, cache


def schedule(lengths, *sizes):
    """Steps of the given sizes, the last one repeated, until every sequence has its length."""
    steps, done = [], 0
    while done < max(lengths):
        size = sizes[min(len(steps), len(sizes) - 1)]
        steps.append([max(0, min(size, length - done)) for length in lengths])
        done += size
    return steps


def pages(cache: KVCache) -> History:
    """The history of a cache that has one."""
    assert cache.history is not None
    return cache.history


def slots_of(cache: KVCache) -> list[np.ndarray]:
    """Unpacked slots of both sides, `[L, P, K, page, N]`."""
    sides = (pages(cache).key, pages(cache).value)
    return [np.asarray(codec.unpack(side.laid_out(tokens_last=False).slots)) for side in sides]


def live_rows(cache: KVCache, cfg: CacheConfig, layer, b, side) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """Slots `[h, K, N]`, scale and offset of the history tokens of sequence b, read through its page table."""
    index = np.arange(cfg.tiers.history_tokens(int(cache.lengths[b])))
    ids, places = np.asarray(cache.page_indices)[b, index // cfg.tiers.page], index % cfg.tiers.page
    pool = getattr(pages(cache), side).laid_out(tokens_last=False)

    def rows(leaf):
        return np.asarray(loaded(leaf))[layer, ids, :, places]

    slots = np.asarray(codec.unpack(pool.slots))[layer, ids, :, places]
    return slots, rows(pool.scale), None if pool.offset is None else rows(pool.offset)


def encoded_rows(codes: TransformCodes, cfg: CacheConfig, tokens: Tokens, layer, b, length):
    """Slots, scale and offset of the definition for the history tokens of sequence b, `{side: (..)}`."""
    tiers, rows = cfg.tiers, {}
    end = definition.history_end(length - 1, tiers)
    turn = definition.bucket_rotations(codes, tiers, max(length, 1), cfg.head_dim)
    for side, code, x in (("key", codes.key, tokens.k), ("value", codes.value, tokens.v)):
        one = jax.tree.map(np.asarray, code.layer(layer))
        encoded = []
        for j in range(tiers.sink, end):
            for head in range(cfg.kv_heads):
                row = np.asarray(x[layer, b, j, head], np.float64)
                row = row @ turn[j].T if side == "key" else row
                y = (row - one.mu[head].astype(np.float64)) @ one.encode[head].astype(np.float64)
                encoded.append(codec_definition.quantize_row(one, head, y.astype(x.dtype)))
        shape = (end - tiers.sink, cfg.kv_heads)
        slots, scale, offset = zip(*encoded, strict=True) if encoded else ((), (), ())
        offset = np.array(offset, np.float32).reshape(shape) if code.has_offset else None
        rows[side] = (np.array(slots).reshape(*shape, -1), np.array(scale, np.float32).reshape(shape), offset)
    return rows


def defined_outputs(codes, cfg: CacheConfig, tokens: Tokens, cache: KVCache, layer, b, **kwargs):
    """The definition's outputs `[n, N, D]` of sequence b, its history decoded from the cache's own pages."""
    length, tiers = int(cache.lengths[b]), cfg.tiers
    k, v = (x[layer, b, :length] for x in (tokens.k, tokens.v))
    turn = definition.bucket_rotations(codes, tiers, length, cfg.head_dim)
    hats = []
    for side, code, x in (("key", codes.key, k), ("value", codes.value, v)):
        hat = np.full(x.shape, np.nan)
        stored = definition.decode(code, layer, *live_rows(cache, cfg, layer, b, side))
        hat[tiers.sink : tiers.sink + len(stored)] = stored
        hats.append(np.einsum("tkd,tde->tke", hat, turn) if side == "key" else hat)
    return definition.attention(
        tokens.q[layer, b, :length], k, v, *hats, tiers=tiers, scale=cfg.attention.scale, **kwargs
    )
