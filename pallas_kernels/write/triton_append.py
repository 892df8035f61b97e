"""Stores new tokens in the plain tiers on NVIDIA GPUs: one launch for sinks and ring, K and V, in place.

XLA makes a scatter of each of the four arrays; a decode step is short enough for three launches more in every layer to
show. A program stores one token of one sequence.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.attention.api import PlainTiers
from pallas_kernels.attention.triton import ops, unavailable
from pallas_kernels.storage import stored
from pallas_kernels.tiers import Tiers

__all__ = ["append", "unavailable"]


class _Inputs(NamedTuple):
    layer: Any  # int32 [1]
    starts: Any  # int32 [B]
    counts: Any
    k: Any  # [B, T, K, D]
    v: Any
    after: Any  # not read


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
    interpret: bool = False,
) -> PlainTiers:
    """See `pallas_kernels.write.append`.

    Args:
        interpret: run in Pallas' interpreter, on any device.
    """
    batch, tokens, heads, dim = k.shape
    if plain.recent_k.shape[3:] != (heads, dim):
        raise NotImplementedError("the plain tiers were laid out for another implementation")
    sinks = [plain.sink_k, plain.sink_v] if tiers.sink else []
    pools = [*sinks, plain.recent_k, plain.recent_v]
    inputs = _Inputs(
        layer.astype(jnp.int32).reshape(1),
        starts.astype(jnp.int32),
        counts.astype(jnp.int32),
        stored(k),
        stored(v),
        after,
    )
    *new, recent_k, recent_v = pl.pallas_call(
        functools.partial(_append, sink=tiers.sink),
        grid=(batch, tokens),
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in pools],
        input_output_aliases={i: i for i in range(len(pools))},
        interpret=interpret,
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=1),
        name="oscar_append",
    )(pools, inputs)
    sink_k, sink_v = new or (plain.sink_k, plain.sink_v)
    return PlainTiers(sink_k, sink_v, recent_k, recent_v)


def _append(pools, inputs: _Inputs, *outputs, sink: int):
    del pools  # the outputs are the same memory
    sequence, token, layer = pl.program_id(0), pl.program_id(1), inputs.layer[0]
    heads, dim = inputs.k.shape[2:]
    head, d = (jnp.arange(pl.next_power_of_2(size), dtype=jnp.int32) for size in (heads, dim))
    known = (head < heads)[:, None] & (d < dim)[None, :]
    # What is masked must not name a live place: the interpreter writes there what it read.
    head, d = jnp.where(known, head[:, None], heads), jnp.where(known, d[None, :], 0)
    position = inputs.starts[sequence] + token
    end = inputs.starts[sequence] + inputs.counts[sequence]

    def put(pools, place):
        for pool, rows in zip(pools, (inputs.k, inputs.v), strict=True):
            x = plgpu.load(ops.at(rows, sequence, token, head, d), mask=known, other=0)
            plgpu.store(ops.at(pool, layer, sequence, place, head, d), x, mask=known)

    *sinks, recent_k, recent_v = outputs
    ring = recent_k.shape[2]
    if sinks:

        @pl.when((position < end) & (position < sink))
        def _():
            put(sinks, position)

    # Of a chunk longer than the ring, the last tokens.
    @pl.when((position < end) & (position >= sink) & (position >= end - ring))
    def _():
        put((recent_k, recent_v), lax.rem(position, jnp.int32(ring)))
