"""The calls that write history, and their dispatch."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from pallas_kernels import dispatch
from pallas_kernels.attention.api import PlainTiers, check_plain, check_table
from pallas_kernels.history import History
from pallas_kernels.storage import loaded
from pallas_kernels.tiers import Tiers
from pallas_kernels.transform_code import TransformCodes

Implementation = str | Sequence[str] | None


def write(
    history: History,
    k: jax.Array,
    v: jax.Array,
    *,
    layer: jax.Array,
    positions: jax.Array,
    valid: jax.Array,
    page_indices: jax.Array,
    codes: TransformCodes,
    tiers: Tiers,
    implementation: Implementation = None,
) -> History:
    """Encodes rows and stores them in their pages.

    Args:
        history: in place where it is donated.
        k, v: `[B, M, K, D]` in the cache's plain dtype, after rotary positions.
        layer: int32 `[]`.
        positions: int32 `[B, M]`.
        valid: bool `[B, M]`; other rows are not stored, nor are those of sinks (positions below `tiers.sink`), past the
            page table, or with a page id that the pool has not.
        page_indices: int32 `[B, pages of a sequence]`.
        implementation: a name, a sequence of names tried in order, or None for the best one here.

    Raises:
        ValueError: shapes that do not fit.
        NotImplementedError: no implementation takes this case; every reason is listed.
    """
    if k.shape != v.shape or k.ndim != 4 or k.shape[2:] != (codes.kv_heads, codes.head_dim):
        raise ValueError(
            f"k {k.shape}, v {v.shape}: expected both [B, M, {codes.kv_heads}, {codes.head_dim}], as the codes are."
        )
    if positions.shape != k.shape[:2] or valid.shape != k.shape[:2]:
        raise ValueError(f"positions {positions.shape}, valid {valid.shape}: expected {k.shape[:2]}, one for each row.")
    check_table(page_indices, len(k))
    if not k.size:
        return history
    return dispatch.call(
        "write",
        implementation,
        history,
        k,
        v,
        layer=layer,
        positions=positions,
        valid=valid,
        page_indices=page_indices,
        codes=codes,
        tiers=tiers,
    )


def demote(
    history: History,
    plain: PlainTiers,
    k: jax.Array,
    v: jax.Array,
    *,
    layer: jax.Array,
    starts: jax.Array,
    counts: jax.Array,
    page_indices: jax.Array,
    codes: TransformCodes,
    tiers: Tiers,
    implementation: Implementation = None,
) -> History:
    """Writes, in one layer, the tokens that leave the recent window when `counts` new tokens arrive.

    Args:
        history: in place where it is donated.
        plain: the plain tiers before the new tokens are stored.
        k, v: `[B, T, K, D]`, the new tokens in the plain dtype; a long chunk demotes some of its own.
        layer: int32 `[]`.
        starts: int32 `[B]`, stored tokens before this call. counts: int32 `[B]`, how many of the T new ones are real.
        page_indices, implementation: as for `write`.

    Raises:
        ValueError: shapes or dtypes that do not fit.
        NotImplementedError: no implementation takes this case; every reason is listed.
    """
    check_new(plain, k, v, starts, counts)
    check_table(page_indices, len(k))
    return dispatch.call(
        "demote",
        implementation,
        history,
        plain,
        k,
        v,
        layer=layer,
        starts=starts,
        counts=counts,
        page_indices=page_indices,
        codes=codes,
        tiers=tiers,
    )


def demote_ahead(
    history: History,
    plain: PlainTiers,
    *,
    tokens: int,
    starts: jax.Array,
    counts: jax.Array,
    page_indices: jax.Array,
    codes: TransformCodes,
    tiers: Tiers,
    implementation: Implementation = None,
) -> History:
    """`demote` in all layers at once, before the first of them runs.

    At most `tiers.recent` new tokens push out only tokens that lie in the ring, so this needs nothing of the step but
    its size.

    Args:
        tokens: T, at most `tiers.recent`.
        The rest as for `demote`.

    Raises:
        ValueError: more tokens.
        NotImplementedError: no implementation writes all layers at once here; `demote` does layer by layer.
    """
    if tokens > tiers.recent:
        raise ValueError(
            f"tokens={tokens}: expected at most recent={tiers.recent}; a longer chunk demotes tokens of its own, "
            "with demote in every layer."
        )
    return dispatch.call(
        "demote_ahead",
        implementation,
        history,
        plain,
        tokens=tokens,
        starts=starts,
        counts=counts,
        page_indices=page_indices,
        codes=codes,
        tiers=tiers,
    )


def append(
    plain: PlainTiers,
    k: jax.Array,
    v: jax.Array,
    *,
    layer: jax.Array,
    starts: jax.Array,
    counts: jax.Array,
    tiers: Tiers,
    after: jax.Array | None = None,
    implementation: Implementation = None,
) -> PlainTiers:
    """Stores new tokens plain in one launch: sinks in their place, the others in the ring (of a long chunk, the last).

    Args:
        plain: in place where it is donated.
        k, v: `[B, T, K, D]` in the plain dtype.
        layer: int32 `[]`.
        starts: int32 `[B]`, stored tokens before this call. counts: int32 `[B]`, how many of the T new tokens are real.
        after: nothing is stored before this array is known: attention's output, which reads what is overwritten.
        implementation: as for `write`.

    Raises:
        ValueError: shapes or dtypes that do not fit.
        NotImplementedError: no implementation has one launch for it here; `oscar_jax.cache.append` runs everywhere.
    """
    check_new(plain, k, v, starts, counts)
    if not k.size:
        return plain
    return dispatch.call(
        "append",
        implementation,
        plain,
        k,
        v,
        layer=layer,
        starts=starts,
        counts=counts,
        tiers=tiers,
        after=after,
    )


def check_new(plain: PlainTiers, k: jax.Array, v: jax.Array, starts: jax.Array, counts: jax.Array) -> None:
    """Raises ValueError for new tokens that the plain tiers cannot hold as they are."""
    check_plain(plain, k, v)
    if not (starts.shape == counts.shape == k.shape[:1]):
        raise ValueError(
            f"starts {starts.shape}, counts {counts.shape}: expected [{len(k)}], one for each sequence of k."
        )
    held = loaded(jnp.zeros((), plain.recent_k.dtype)).dtype
    if not k.dtype == v.dtype == held:
        raise ValueError(f"k of {k.dtype}, v of {v.dtype}: expected {held}, the plain dtype of this cache; cast them.")
