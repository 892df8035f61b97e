"""The attention call: arguments, checks and dispatch."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import dispatch
from pallas_kernels.history import LANES, History
from pallas_kernels.storage import loaded
from pallas_kernels.tiers import Tiers
from pallas_kernels.transform_code import TransformCodes

UNLIMITED = 2**30
"""A sliding window that sees everything; a larger one could not be added to positions."""


@dataclasses.dataclass(frozen=True)
class AttentionSpec:
    """What a model asks of attention, the same for every layer.

    Attributes:
        scale: factor on q . k.
        softcap: logits become `softcap tanh(logits / softcap)`; None switches it off.
        exact_chunk: the tokens of one call attend to each other plainly even where decoding would read them from
            history (the reference's prefill); off, what a query reads depends on its position only.
    """

    scale: float
    softcap: float | None = None
    exact_chunk: bool = False

    def __post_init__(self):
        if self.softcap is not None and not self.softcap > 0:
            raise ValueError(f"softcap={self.softcap}: expected a positive number, or None for no soft-cap.")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PlainTiers:
    """Plain tokens of all layers in the plain dtype's storage dtype (`pallas_kernels.storage`).

    Sinks `[L, B, S, K, D]`; recents in a ring `[L, B, R, K, D]`, position p at place p mod R. For TPUs h heads of a
    token make a row, `[.., K/h, h D]` (`lane_heads`).
    """

    sink_k: jax.Array
    sink_v: jax.Array
    recent_k: jax.Array
    recent_v: jax.Array


def lane_heads(head_dim: int, kv_heads: int) -> int:
    """h, the heads of a token side by side on a TPU's lanes: as few as fill them, or all of a device's."""
    heads = LANES // math.gcd(LANES, head_dim)
    return heads if kv_heads % heads == 0 else kv_heads


def check_plain(plain: PlainTiers, k: jax.Array, v: jax.Array) -> None:
    """Raises ValueError for new tokens `[B, T, K, D]` that the plain tiers do not hold the like of."""
    if k.shape != v.shape or k.ndim != 4:
        raise ValueError(f"k {k.shape}, v {v.shape}: expected both [B, T, K, D].")
    batch, _, heads, dim = k.shape
    rows = lane_heads(dim, heads)
    for name in ("sink_k", "sink_v", "recent_k", "recent_v"):
        tier = getattr(plain, name)
        if tier.ndim != 5 or tier.shape[1] != batch or tier.shape[3:] not in (
            (heads, dim), (heads // rows, rows * dim),
        ):  # fmt: skip
            raise ValueError(
                f"plain.{name} {tier.shape} with k {k.shape}: expected [L, {batch}, tokens, {heads}, {dim}], tiers of "
                "the same sequences and heads."
            )


def plain_rows(tier: jax.Array, layer: jax.Array, heads: tuple[int, ...]) -> jax.Array:
    """One layer of a plain tier, `[B, S or R, K, D]` in the plain dtype.

    Args:
        heads: K and D.
    """
    return loaded(tier[layer]).reshape(*tier.shape[1:3], *heads)


def ring_positions(lengths: jax.Array, ring: int) -> jax.Array:
    """Position `[B, R]` that each place of the ring holds when `lengths` `[B, 1]` tokens are stored.

    It is the latest one that is the place's index modulo R; negative where there is none.
    """
    return lengths - 1 - (lengths - 1 - jnp.arange(ring, dtype=lengths.dtype)) % ring


def attend(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    plain: PlainTiers,
    history: History | None,
    *,
    layer: jax.Array,
    starts: jax.Array,
    counts: jax.Array,
    page_indices: jax.Array,
    codes: TransformCodes | None,
    tiers: Tiers,
    spec: AttentionSpec,
    window: jax.Array | None = None,
    sink_logits: jax.Array | None = None,
    implementation: str | Sequence[str] | None = None,
) -> jax.Array:
    """Attention of new tokens to their sequences: sink | INT2 history | recent | the new tokens themselves.

    The pages of every token below `tiers.history_end` of the last new token must have been written; `plain` holds the
    tokens before `starts`. A query at t sees `j < sink` plain, `sink <= j < history_end(t)` from history, the rest
    plain.

    Args:
        q: `[B, T, N, D]`; k, v: `[B, T, K, D]`, after rotary positions, k and v rounded to the plain dtype.
        plain, history: the cache; `history` and `codes` are None when every token is plain.
        layer: int32 `[]`.
        starts: int32 `[B]`, stored tokens before this call. counts: int32 `[B]`, how many of the T new tokens are real.
        page_indices: int32 `[B, pages of a sequence]`; entries past the history are ignored.
        window: int32 `[]`, a query at t sees `j > t - window` only; None sees all.
        sink_logits: `[N]`, learnt logits that take probability without a value.
        implementation: a name, a sequence of names tried in order, or None for the best one here.

    Returns:
        `[B, T, N, D]` in q's dtype; zeros for rows that see nothing.

    Raises:
        ValueError: shapes that do not fit.
        NotImplementedError: no implementation takes this case; every reason is listed.
    """
    _check_shapes(q, k, v, codes, history)
    check_plain(plain, k, v)
    _check_batch(q, starts, counts, sink_logits)
    for name, x in {"starts": starts, "counts": counts, "page_indices": page_indices, "window": window}.items():
        if x is not None and not jnp.issubdtype(jnp.result_type(x), jnp.integer):
            raise ValueError(f"{name} of {jnp.result_type(x)}: expected integers.")
    if history is not None and codes is not None:
        check_table(page_indices, len(q))
        _check_tiers(plain, history, codes, tiers)
    if not q.size:
        return jnp.zeros_like(q)
    if window is not None:
        window = jnp.minimum(jnp.asarray(window, jnp.int32), UNLIMITED)
    return dispatch.call(
        "attention",
        implementation,
        q,
        k,
        v,
        plain,
        history,
        layer=layer,
        starts=starts,
        counts=counts,
        page_indices=page_indices,
        codes=codes,
        tiers=tiers,
        spec=spec,
        window=window,
        sink_logits=sink_logits,
    )


def attend_ragged(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    plain: PlainTiers,
    history: History | None,
    *,
    layer: jax.Array,
    kv_lens: jax.Array,
    page_indices: jax.Array,
    cu_q_lens: jax.Array,
    max_q_len: int,
    **options: Any,
) -> jax.Array:
    """`attend` with the arguments of ragged paged attention: new tokens of all sequences one after another.

    Args:
        q: `[tokens, N, D]`; k, v: `[tokens, K, D]`. Those of sequence b are rows `cu_q_lens[b]` to `cu_q_lens[b + 1]`.
        layer, page_indices: as for `attend`.
        kv_lens: int32 `[B]`, tokens of each sequence, its new ones included; a sequence with fewer than those is NaN.
        cu_q_lens: int32 `[B + 1]`, from 0, not decreasing, or all is NaN; rows from its last entry on belong to no
            sequence.
        max_q_len: most new tokens of a sequence. Queries are padded to it, so mixed steps cost least in two calls, of
            short and of long ones. A longer sequence gets NaN past it: lengths are not known when this is traced.
        options: the other arguments of `attend`.

    Returns:
        `[tokens, N, D]` in q's dtype; zeros for rows that belong to no sequence.

    Raises:
        ValueError: shapes that do not fit.
        NotImplementedError: no implementation takes this case; every reason is listed.
    """
    if q.ndim != 3 or k.shape != v.shape or k.ndim != 3 or len(q) != len(k):
        raise ValueError(f"q {q.shape}, k {k.shape}, v {v.shape}: expected q [tokens, N, D] and k, v [tokens, K, D].")
    if cu_q_lens.shape != (len(kv_lens) + 1,):
        raise ValueError(f"cu_q_lens {cu_q_lens.shape} with kv_lens {kv_lens.shape}: expected one entry more.")
    if max_q_len < 1:
        raise ValueError(f"max_q_len={max_q_len}: expected at least 1.")
    if not q.size:
        return jnp.zeros_like(q)
    lengths = cu_q_lens[1:] - cu_q_lens[:-1]
    place = jnp.clip(cu_q_lens[:-1, None] + jnp.arange(max_q_len), 0, len(q) - 1)
    padded = attend(
        q[place], k[place], v[place], plain, history, layer=layer,
        starts=jnp.maximum(kv_lens - lengths, 0), counts=jnp.clip(lengths, 0, max_q_len),
        page_indices=page_indices, **options,
    )  # fmt: skip
    padded = jnp.where((kv_lens < lengths)[:, None, None, None], jnp.nan, padded)
    row = jnp.arange(len(q))
    sequence = jnp.clip(jnp.searchsorted(cu_q_lens, row, side="right") - 1, 0, len(lengths) - 1)
    token = row - cu_q_lens[sequence]
    rows = padded.at[sequence, token].get(mode="fill", fill_value=jnp.nan)
    unordered = (cu_q_lens[0] != 0) | jnp.any(lengths < 0)
    return jnp.where(unordered, jnp.nan, jnp.where((token < lengths[sequence])[:, None, None], rows, 0))


def _check_shapes(q, k, v, codes: TransformCodes | None, history: History | None) -> None:
    if q.ndim != 4 or k.shape != v.shape or q.shape[:2] != k.shape[:2] or q.shape[3] != k.shape[3]:
        raise ValueError(f"q {q.shape}, k {k.shape}, v {v.shape}: expected q [B, T, N, D] and k, v [B, T, K, D].")
    if q.shape[2] % k.shape[2]:
        raise ValueError(
            f"q has {q.shape[2]} heads and k {k.shape[2]}: expected a whole number of query heads a KV head."
        )
    if (codes is None) != (history is None):
        raise ValueError("codes and history: expected both, or neither for a cache that is all plain.")
    if codes is not None and (codes.kv_heads, codes.head_dim) != k.shape[2:]:
        raise ValueError(
            f"codes for {codes.kv_heads} KV heads of size {codes.head_dim}, k has {k.shape[2]} of {k.shape[3]}: "
            "expected codes calibrated on this model."
        )


def _check_batch(q, starts, counts, sink_logits) -> None:
    batch, _, heads, _ = q.shape
    if not (starts.shape == counts.shape == (batch,)):
        raise ValueError(
            f"starts {starts.shape}, counts {counts.shape}: expected [{batch}], one for each sequence of q."
        )
    if sink_logits is not None and sink_logits.shape != (heads,):
        raise ValueError(f"sink_logits {sink_logits.shape}: expected [{heads}], one for each head of q.")


def _check_tiers(plain: PlainTiers, history: History, codes: TransformCodes, tiers: Tiers) -> None:
    if plain.sink_k.shape[2] != tiers.sink:
        raise ValueError(f"plain.sink_k {plain.sink_k.shape}: expected sink={tiers.sink} places a sequence.")
    if plain.recent_k.shape[2] < tiers.recent:
        raise ValueError(
            f"plain.recent_k {plain.recent_k.shape}: expected a ring of at least recent={tiers.recent} places, "
            "tiers.ring(tokens) of them."
        )
    for name, side, code in (("key", history.key, codes.key), ("value", history.value, codes.value)):
        if side.scale.shape[-1] != tiers.page:
            raise ValueError(f"history.{name} has pages of {side.scale.shape[-1]} tokens: expected page={tiers.page}.")
        if (side.offset is not None) != code.has_offset:
            found, wanted = ("offsets", "none") if side.offset is not None else ("no offsets", "some")
            raise ValueError(f"history.{name} has {found}: its code expects {wanted}; make it with init_history.")


def check_table(page_indices, batch: int) -> None:
    """Raises ValueError for a page table of another shape."""
    if page_indices.ndim != 2 or len(page_indices) != batch or not page_indices.shape[1]:
        raise ValueError(
            f"page_indices {page_indices.shape}: expected [{batch}, pages of a sequence], a row for each sequence and "
            "at least one page."
        )


def check_dtypes(q: jax.Array, plain: PlainTiers) -> None:
    """Raises NotImplementedError for dtypes of queries or plain tokens that no fused kernel takes."""
    plain_dtype = loaded(jnp.zeros((), plain.recent_k.dtype)).dtype
    for name, dtype in (("queries", q.dtype), ("plain tokens", plain_dtype)):
        if dtype not in (jnp.float32, jnp.bfloat16, jnp.float16):
            raise NotImplementedError(f"{name} of {dtype}: float32, bfloat16 and float16 are built")


def window_limit(window: jax.Array | None) -> jax.Array:
    """int32 `[1]` of a sliding window, `UNLIMITED` without one."""
    return jnp.asarray(UNLIMITED if window is None else window, jnp.int32).reshape(1)


def softmax_dtype(q: jax.Array) -> jnp.dtype:
    """Logits, softmax and accumulators: fp32, or float64 for float64 queries."""
    return jnp.promote_types(q.dtype, jnp.float32)
