"""Quantization without a cache: one forward pass in which each query sees history rounded and everything else plain.

For fast sweeps, and for baselines that have no cache here. Which token a query sees in which tier is the same function
of its position as in the cache (`pallas_kernels.tiers`), and errors propagate through the layers; no page is written,
so nothing is said about bytes or speed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from oscar_jax.layer_codes import LayerCodes, history_bits
from oscar_jax.models import Decoder, ModelConfig
from oscar_jax.models.attention import Attend
from pallas_kernels import codec
from pallas_kernels.history import bucket_tables, from_bucket, to_bucket
from pallas_kernels.tiers import Tiers
from pallas_kernels.transform_code import TransformCodes

KIVI_GROUP = 64  # tokens that share a channel's scale and zero point
PLAIN_DTYPE = "bfloat16"

Quantize = Callable[[Any, jax.Array, jax.Array, jax.Array, Tiers], tuple[jax.Array, jax.Array]]
"""`quantize(parameters, layer, k, v, tiers) -> (k_hat, v_hat)` for rows fp32 `[B, T, K, D]` at positions 0 .. T-1."""


@dataclasses.dataclass(frozen=True)
class OnePassArm:
    """How history is rounded.

    Attributes:
        quantize: the rounding, hashable: it is a compile-time constant.
        parameters: a pytree it is given; transform codes, or None.
        history_bits_per_element: of history rows, scales and zero points counted.
    """

    quantize: Quantize
    parameters: Any
    history_bits_per_element: float


def from_codes(codes: TransformCodes | LayerCodes | None) -> OnePassArm:
    """What the cache with these codes reads back."""
    if codes is None:
        return PLAIN
    if isinstance(codes, LayerCodes):
        return mixed([from_codes(code) for code in codes.codes], np.asarray(codes.group), np.asarray(codes.places))
    return OnePassArm(_coded, codes, history_bits(codes))


def _coded(codes: TransformCodes, layer: jax.Array, k: jax.Array, v: jax.Array, tiers: Tiers):
    tables = bucket_tables(codes, tiers, k.shape[1], k.dtype)
    bucket = jnp.maximum(jnp.arange(k.shape[1]) - tiers.sink, 0) // (codes.bucket or 1)
    rows = []
    for code, x in ((codes.key, to_bucket(k, bucket, tables, codes)), (codes.value, v)):
        of_layer = code.layer(layer)
        rows.append(codec.decode(of_layer, codec.encode(of_layer, x, scale_dtype=codes.scale_dtype), dtype=x.dtype))
    return from_bucket(rows[0], bucket, tables, codes), rows[1]


def mixed(arms: Sequence[OnePassArm], option: np.ndarray, index: np.ndarray | None = None) -> OnePassArm:
    """Another arm for each layer.

    Args:
        arms: the options.
        option: int `[L]`, the arm of each layer.
        index: int `[L]`, each layer's number among the layers that its arm's codes hold; 0 .. L-1 if None.
    """
    option = np.asarray(option, np.int32)
    index = np.arange(len(option), dtype=np.int32) if index is None else np.asarray(index, np.int32)
    bits = np.asarray([arm.history_bits_per_element for arm in arms])[option].mean()
    tables = jnp.asarray(option), jnp.asarray(index), tuple(arm.parameters for arm in arms)
    return OnePassArm(_Mixed(tuple(arm.quantize for arm in arms)), tables, float(bits))


@dataclasses.dataclass(frozen=True)
class _Mixed:
    quantizers: tuple[Quantize, ...]

    def __call__(self, parameters: Any, layer: jax.Array, k: jax.Array, v: jax.Array, tiers: Tiers):
        option, index, of_arms = parameters
        branches = [
            lambda layer, k, v, quantize=quantize, each=each: quantize(each, layer, k, v, tiers)
            for quantize, each in zip(self.quantizers, of_arms, strict=True)
        ]
        return jax.lax.switch(option[layer], branches, index[layer], k, v)


def _plain(_: None, layer: jax.Array, k: jax.Array, v: jax.Array, tiers: Tiers):
    return k, v


def _fp8(_: None, layer: jax.Array, k: jax.Array, v: jax.Array, tiers: Tiers):
    limit = float(jnp.finfo(jnp.float8_e4m3fn).max)  # beyond it the format has NaN only
    k_hat, v_hat = (jnp.clip(x, -limit, limit).astype(jnp.float8_e4m3fn).astype(x.dtype) for x in (k, v))
    return k_hat, v_hat


def _kivi(_: None, layer: jax.Array, k: jax.Array, v: jax.Array, tiers: Tiers):
    batch, tokens, heads, dim = k.shape
    groups = -(-max(tokens - tiers.sink, 1) // KIVI_GROUP)
    # Groups begin behind the sinks; the last one is filled up with its last token, which changes no range.
    padded = jnp.pad(
        k[:, tiers.sink :], ((0, 0), (0, groups * KIVI_GROUP - (tokens - tiers.sink)), *[(0, 0)] * 2), "edge"
    )
    by_channel = _two_bits(padded.reshape(batch, groups, KIVI_GROUP, heads, dim), axis=2)
    k_hat = by_channel.reshape(batch, groups * KIVI_GROUP, heads, dim)[:, : tokens - tiers.sink]
    return jnp.concatenate([k[:, : tiers.sink], k_hat], axis=1), _two_bits(v, axis=-1)


def _two_bits(x: jax.Array, *, axis: int) -> jax.Array:
    """Min/max quantization to four levels along an axis, scale and zero point in fp16."""
    low, high = x.min(axis, keepdims=True), x.max(axis, keepdims=True)
    scale, zero = ((value.astype(jnp.float16).astype(x.dtype)) for value in ((high - low) / 3, low))
    codes = jnp.clip(jnp.floor((x - low) / jnp.where(scale > 0, scale, 1) + 0.5), 0, 3)
    return codes * scale + zero


def baselines(head_dim: int) -> dict[str, OnePassArm]:
    """Arms that exist in this mode only.

    Returns:
        "fp8": e4m3 without scales. "kivi": INT2, keys for each channel over 64 tokens, values for each token (after
        arXiv 2402.02750; a group's range counts its tokens that are still plain).
    """
    kivi_bits = 2 + 32 * (1 / KIVI_GROUP + 1 / head_dim) / 2
    return {"fp8": OnePassArm(_fp8, None, 8.0), "kivi": OnePassArm(_kivi, None, kivi_bits)}


BASELINES = tuple(baselines(64))
PLAIN = OnePassArm(_plain, None, history_bits(None))
"""The plain cache."""


def hidden_states(decoder: Decoder, tokens: jax.Array, arm: OnePassArm, *, tiers: Tiers) -> jax.Array:
    """Hidden states `[B, T, E]` of whole sequences, int32 `[B, T]`."""
    return _hidden(decoder, tokens, arm.parameters, quantize=arm.quantize, tiers=tiers)


@partial(jax.jit, static_argnames=("quantize", "tiers"))
def _hidden(decoder: Decoder, tokens: jax.Array, parameters: Any, *, quantize: Quantize, tiers: Tiers) -> jax.Array:
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    return decoder(tokens, positions, _attention(decoder.config, quantize, parameters, tiers), None)[0]


def _attention(
    config: ModelConfig, quantize: Quantize, parameters: Any, tiers: Tiers, query_block: int = 256
) -> Attend:
    unlimited = np.iinfo(np.int32).max // 2
    windows = np.asarray([unlimited if w is None else w for w in config.windows], np.int32)

    def attend(state: Any, layer: jax.Array, q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, Any, Any]:
        wide = jnp.promote_types(q.dtype, jnp.float32)
        k, v = (x.astype(PLAIN_DTYPE).astype(wide) for x in (k, v))
        k_hat, v_hat = quantize(parameters, layer, k, v, tiers)
        batch, length, _, dim = q.shape
        grouped = q.astype(wide).reshape(batch, length, k.shape[2], -1, dim) * config.softmax_scale
        product = partial(jnp.einsum, precision="highest")
        outputs = []
        for start in range(0, length, query_block):
            stop = min(start + query_block, length)
            t, j = np.arange(start, stop)[:, None], np.arange(stop)[None]
            history = jnp.asarray((j >= tiers.sink) & (j < tiers.history_end(t)))
            visible = jnp.asarray(j <= t) & (j > t - jnp.asarray(windows)[layer])
            block = grouped[:, start:stop]
            scores = jnp.where(
                history,
                product("btkgd,bskd->bkgts", block, k_hat[:, :stop]),
                product("btkgd,bskd->bkgts", block, k[:, :stop]),
            )
            weights = jax.nn.softmax(jnp.where(visible, scores, -jnp.inf), axis=-1)
            out = product("bkgts,bskd->btkgd", jnp.where(history, weights, 0), v_hat[:, :stop])
            outputs.append(out + product("bkgts,bskd->btkgd", jnp.where(history, 0, weights), v[:, :stop]))
        return jnp.concatenate(outputs, axis=1).reshape(q.shape).astype(q.dtype), state, None

    return attend
