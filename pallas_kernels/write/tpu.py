"""Stores encoded rows in pages on TPUs, through Mosaic: a kernel for each side, pools in place.

No TPU has run this file. It is compiled for real chips by libtpu and simulated with race detection (`docs/tpu.md`).

XLA encodes the rows (`pallas_kernels.codec` itself, so slots and scales are the definition's) and hands them over with
rows on lanes. Tokens of a page lie on lanes too, where a token cannot be written alone: a program reads each page that
its sequence writes to, puts rows in their lanes, and writes the page back. Rows reach their lanes by a product with the
0-1 matrix of positions, exact in bfloat16 because every operand is a byte; 16-bit numbers go as two bytes. Of
short pages as many as make 128 tokens are exchanged into that order and back (`pallas_kernels.tpu_pages`); XLA stores
their scales.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import codec, tpu_pages
from pallas_kernels.attention.api import PlainTiers
from pallas_kernels.attention.tpu import HEAD_DIMS, unavailable
from pallas_kernels.history import LANES, History, SidePages
from pallas_kernels.storage import stored
from pallas_kernels.tiers import Tiers
from pallas_kernels.transform_code import TransformCode, TransformCodes
from pallas_kernels.write import xla

__all__ = ["demote", "unavailable", "write"]

NUMBER_ROWS = 16  # sublanes of a bfloat16 operand
MAX_BYTES = 4 * 2**20  # of a sequence's rows in VMEM, which holds them twice
NOWHERE = np.iinfo(np.int32).max


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
    interpret: Any = False,
) -> History:
    """See `pallas_kernels.write.write`.

    Args:
        interpret: True for Pallas' interpreter, or `pltpu.InterpretParams` for the TPU's, on any device.
    """
    for pool, code in ((history.key, codes.key), (history.value, codes.value)):
        _check(pool, code, k, tiers)
    tpu_pages.check_table(*page_indices.shape)
    pool = history.key.scale.shape[1]
    index, pages, sides = xla.encoded(k, v, pool, layer, positions, valid, page_indices, codes, tiers)
    pages = jnp.where((pages >= 0) & (pages < pool), pages, pool)
    index = jnp.where(pages < pool, index, NOWHERE).astype(jnp.int32)
    block = index // LANES
    first = block.min(1)
    end = jnp.where(index == NOWHERE, -1, block).max(1) + 1
    table = page_indices.astype(jnp.int32)
    scalars = (jnp.asarray(layer, jnp.int32).reshape(1), first, end, table.reshape(-1))
    written = []
    for side, rows in zip((history.key, history.value), sides, strict=True):
        if tpu_pages.gathers_scales(k.shape[2], tiers.page):
            side = _numbers_stored(side, rows, layer, pages, index % tiers.page)
            rows = rows._replace(scale=None, offset=None)
        written.append(_store(side, rows, scalars=scalars, index=index, page=tiers.page, interpret=interpret))
    return History(*written)


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
    interpret: Any = False,
) -> History:
    """See `pallas_kernels.write.demote`."""
    k, v, positions, valid = xla.leaving(plain, k, v, layer=layer, starts=starts, counts=counts, tiers=tiers)
    return write(
        history, k, v, layer=layer, positions=positions, valid=valid, page_indices=page_indices, codes=codes,
        tiers=tiers, interpret=interpret,
    )  # fmt: skip


def _check(pool: SidePages, code: TransformCode, k: jax.Array, tiers: Tiers) -> None:
    if k.dtype not in (jnp.float32, jnp.bfloat16, jnp.float16):
        raise NotImplementedError(f"plain tokens of {k.dtype}: float32, bfloat16 and float16 are built")
    if code.head_dim not in HEAD_DIMS or code.slots != code.head_dim:
        sizes = ", ".join(map(str, HEAD_DIMS))
        raise NotImplementedError(
            f"head size {code.head_dim} with {code.slots} slots: {sizes}, as many of both, are built"
        )
    tpu_pages.check(pool, code.slots, tiers.page)
    if (size := 2 * code.kv_heads * (code.slots // codec.PLANES) * k.shape[1]) > MAX_BYTES:
        raise NotImplementedError(f"{k.shape[1]} rows of a sequence take {size} bytes of VMEM: at most {MAX_BYTES} do")


def _numbers_stored(pool: SidePages, rows: codec.Encoded, layer, pages, offsets) -> SidePages:
    """Scales and offsets of rows by XLA. Heads have an index too, or it would lay out whole pools anew for them."""

    def put(numbers: jax.Array, new: jax.Array | None) -> jax.Array:
        assert new is not None
        place = (layer, pages[..., None], np.arange(numbers.shape[2]), offsets[..., None])
        return numbers.at[place].set(stored(new, numbers.dtype), mode="drop")

    scale = put(pool.scale, rows.scale)
    return dataclasses.replace(pool, scale=scale, offset=None if pool.offset is None else put(pool.offset, rows.offset))


def _store(pool: SidePages, rows: codec.Encoded, *, scalars, index: jax.Array, page: int, interpret) -> SidePages:
    """One side's rows `[B, M, K, ...]` at history indices `[B, M]` in the pages of each sequence.

    Scale and offset of the rows are None where only slots are to be stored.
    """
    batch, count, kv_heads = rows.slots.shape[:3]
    pad = [(0, 0)] * 2 + [(0, -count % LANES)]
    slots = jnp.pad(rows.slots.transpose(0, 2, 3, 1).astype(jnp.bfloat16), [(0, 0), *pad])
    # Rows of a byte each: high and low byte of every number of every head, then a row of ones, which counts.
    pools, halves = [pool.slots], []
    for words, number in ((pool.scale, rows.scale), (pool.offset, rows.offset)):
        if words is None or number is None:
            continue
        pools.append(lax.bitcast_convert_type(words, jnp.int16) if words.dtype == jnp.float16 else words)
        bits = lax.bitcast_convert_type(number, jnp.uint16).transpose(0, 2, 1)
        halves += [bits >> 8, bits & 0xFF]
    numbers = jnp.concatenate([*halves, jnp.ones((batch, 1, count), jnp.uint16)], axis=1).astype(jnp.bfloat16)
    numbers = jnp.pad(numbers, [(0, 0), (0, -numbers.shape[1] % NUMBER_ROWS), pad[2]])
    index = jnp.pad(index, [(0, 0), pad[2]], constant_values=NOWHERE)[:, None]

    def by_sequence(x: jax.Array) -> pl.BlockSpec:
        return pl.BlockSpec((None, *x.shape[1:]), lambda b, *_: (b, *(0,) * (x.ndim - 1)))

    anywhere = [pl.BlockSpec(memory_space=pl.ANY)] * len(pools)
    operands = (index, slots, numbers)
    kernel = pl.pallas_call(
        functools.partial(_merge, entries=len(scalars[-1]) // batch, kv_heads=kv_heads, page=page),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(batch,),
            in_specs=[*map(by_sequence, operands), *anywhere],
            out_specs=anywhere,
            scratch_shapes=[
                [pltpu.VMEM(_block(x, page), x.dtype) for x in pools], pltpu.SemaphoreType.DMA((len(pools),))
            ],
        ),
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in pools],
        input_output_aliases={len(scalars) + len(operands) + i: i for i in range(len(pools))},
        interpret=interpret,
        name="oscar_store_rows",
    )  # fmt: skip
    with jax.enable_x64(False):  # Mosaic has no 64-bit numbers, which indices would be
        found = kernel(*scalars, *operands, *pools)
    names = ("scale", "offset")[: len(found) - 1]
    numbers_of = {
        name: x if x.dtype == pool.scale.dtype else lax.bitcast_convert_type(x, pool.scale.dtype)
        for name, x in zip(names, found[1:], strict=True)
    }
    return dataclasses.replace(pool, slots=found[0], **numbers_of)


def _block(pool: jax.Array, page: int) -> tuple[int, ...]:
    """Shape of 128 tokens of a pool."""
    first, rows, *lanes = pool.shape[2:]
    return (first, rows * (LANES // page), *lanes)


def _merge(layer, first, end, table, index, slots, numbers, *refs, entries: int, kv_heads: int, page: int):
    *refs, buffers, done = refs
    pools = refs[len(refs) // 2 :]  # the outputs: the same memory as the operands
    sequence = pl.program_id(0)
    together = LANES // page

    @pl.loop(first[sequence], end[sequence])
    def _(block):
        token = block * LANES + lax.broadcasted_iota(jnp.int32, (LANES, 1), 0)
        chosen = jnp.where(token == index[...], 1.0, 0.0).astype(jnp.bfloat16)  # [128, rows]

        def placed(rows: jax.Array) -> jax.Array:
            product = lax.dot_general(rows, chosen, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
            return product.astype(jnp.int32)

        new = placed(numbers[...])
        count = 2 * kv_heads * (len(buffers) - 1)
        here = new[count : count + 1] > 0
        page_of_lane = lax.broadcasted_iota(jnp.int32, (1, LANES), 1) // page

        def each_page(action: str, *, out: bool) -> None:
            """Starts the copies of the pages that rows go to, or waits for them."""
            for i in range(together):

                @pl.when(jnp.max(jnp.where(here & (page_of_lane == i), 1, 0)) > 0)
                def _(i=i):
                    number = table[sequence * entries + block * together + i]
                    for array, (pool, buffer) in enumerate(zip(pools, buffers, strict=True)):
                        ends = pool.at[layer[0], number], buffer
                        if together > 1:
                            ends = ends[0], buffer.at[:, pl.ds(i * pool.shape[3], pool.shape[3])]
                        copy = pltpu.make_async_copy(*(ends[::-1] if out else ends), done.at[array])
                        getattr(copy, action)()

        @pl.when(jnp.max(new[count : count + 1]) > 0)
        def _():
            each_page("start", out=False)
            each_page("wait", out=False)

            @pl.loop(0, buffers[0].shape[0])
            def _(unit):
                _replace(buffers[0], slots, unit, here, placed, page)

            for i, buffer in enumerate(buffers[1:]):
                high, low = (new[(2 * i + j) * kv_heads : (2 * i + j + 1) * kv_heads] for j in range(2))
                old = buffer[...].astype(jnp.int32)
                buffer[...] = jnp.where(here, high << 8 | low, old).astype(buffer.dtype)
            each_page("start", out=True)
            each_page("wait", out=True)


def _replace(buffer, slots, unit, here: jax.Array, placed: Callable, page: int) -> None:
    """Slots of the heads of a unit, one of 128-token pages, in the lanes that get a row."""
    if page == LANES:
        old = buffer[unit].astype(jnp.int32)
        buffer[unit] = jnp.where(here, placed(slots[unit]), old).astype(jnp.uint8)
        return
    heads = slots.shape[0] // buffer.shape[0]
    new = jnp.concatenate([placed(slots[unit * heads + i]) for i in range(heads)], axis=0)
    words = pltpu.bitcast(new.astype(jnp.uint8), jnp.int32)
    old = tpu_pages.exchange(buffer[unit], page)
    buffer[unit] = tpu_pages.exchange(jnp.where(here, words, old), page)
