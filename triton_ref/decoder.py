"""A Llama decoder over the three-tier cache in eager PyTorch: what a whole decode must say, token by token.

A query's view depends on its position only, so one causal pass over a sequence is every way of cutting it into calls.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import NamedTuple

import torch

from triton_ref import attention, codec
from triton_ref.code import TransformCodes
from triton_ref.rope import Rotary
from triton_ref.tiers import Tiers


@dataclasses.dataclass(frozen=True)
class Config:
    q_heads: int
    kv_heads: int
    head_dim: int
    norm_eps: float
    rotary: Rotary


class Decoded(NamedTuple):
    """Logits `[n, V]`, and by layer the stored rows `[h - S, K, ...]` of keys and values."""

    logits: torch.Tensor
    keys: list[codec.Encoded]
    values: list[codec.Encoded]


def decode(
    weights: Mapping[str, torch.Tensor],
    config: Config,
    tokens: torch.Tensor,
    codes: TransformCodes,
    tiers: Tiers,
    *,
    plain_dtype: torch.dtype,
) -> Decoded:
    """Logits after every token of one sequence `[n]`.

    Args:
        weights: embedding `[V, E]`, final_norm `[E]`, and stacked over layers `layers.<name>`: attention_norm, query,
            key, value, output, mlp_norm, gate, up, down, matrices `[inputs, outputs]`. Their dtype is the arithmetic's.
        codes: all layers.
        plain_dtype: of the plain tiers; every row is rounded to it before it is stored, read or encoded.
    """
    positions = torch.arange(len(tokens), device=tokens.device)
    ends = tiers.history_end(positions)
    x = weights["embedding"][tokens]
    stored: tuple[list[codec.Encoded], list[codec.Encoded]] = ([], [])
    for index in range(weights["layers.query"].shape[0]):
        layer = {name.removeprefix("layers."): w[index] for name, w in weights.items() if name.startswith("layers.")}
        y = _rms_norm(x, layer["attention_norm"], config.norm_eps)
        q, k, v = ((y @ layer[name]).unflatten(-1, (-1, config.head_dim)) for name in ("query", "key", "value"))
        q, k = (config.rotary.rotate(rows, positions[:, None]) for rows in (q, k))
        k, v = k.to(plain_dtype).to(x.dtype), v.to(plain_dtype).to(x.dtype)
        keys, values, hats = _history(k, v, codes.layer(index), positions, tiers)
        out = attention.attend(
            q, k, v, *hats, positions=positions, history_end=ends, sink=tiers.sink, scale=config.head_dim**-0.5
        )
        x = x + out.flatten(-2) @ layer["output"]
        y = _rms_norm(x, layer["mlp_norm"], config.norm_eps)
        x = x + (torch.nn.functional.silu(y @ layer["gate"]) * (y @ layer["up"])) @ layer["down"]
        held = slice(tiers.sink, int(ends[-1]))
        for rows, side in zip((keys, values), stored, strict=True):
            side.append(codec.Encoded(*(None if part is None else part[held] for part in rows)))  # type: ignore[arg-type]
    logits = _rms_norm(x, weights["final_norm"], config.norm_eps) @ weights["embedding"].T
    return Decoded(logits, *stored)


def _history(k: torch.Tensor, v: torch.Tensor, codes: TransformCodes, positions: torch.Tensor, tiers: Tiers):
    """Stored rows of every position, keys then values, and both decoded `[n, K, D]`."""
    origins = codes.origins(positions, tiers.sink)
    keys = codec.encode(codes.key, codes.turn(k, -origins), scale_dtype=codes.scale_dtype)
    values = codec.encode(codes.value, v, scale_dtype=codes.scale_dtype)
    key_hat = codes.turn(codec.decode(codes.key, keys, dtype=k.dtype), origins)
    return keys, values, (key_hat, codec.decode(codes.value, values, dtype=v.dtype))


def _rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight
