"""Clipping before min/max: the order statistic of |y|, found as each writer of the OSCAR reference finds it."""

from __future__ import annotations

import math

import torch


def rank(ratio: float, size: int) -> int:
    """0-based ascending rank of the threshold among the `size` magnitudes of a row."""
    return min(math.floor(ratio * size), size - 1)


def sorted_threshold(y: torch.Tensor, ratio: float) -> torch.Tensor:
    """The order statistic of |y| `[..., D]`, exact, `[..., 1]`: the reference's prefill writer, and this project's."""
    position = rank(ratio, y.shape[-1])
    return y.abs().sort(-1).values[..., position : position + 1]


def bisected_threshold(y: torch.Tensor, ratio: float) -> torch.Tensor:
    """The same rank as the reference's demotion writer finds it: `floor(log2 D)` halvings of `[0, max |y|]`.

    A half is dropped while more than `D - rank` magnitudes exceed the middle; the upper end is returned. It lies at
    most `max |y| / D` (for D a power of two) above the magnitude one rank below the sorted one.
    """
    size = y.shape[-1]
    allowed = size - rank(ratio, size)
    magnitude = y.abs()
    high = magnitude.amax(-1, keepdim=True)
    low = torch.zeros_like(high)
    for _ in range(size.bit_length() - 1):
        middle = (low + high) * 0.5
        above = (magnitude > middle).sum(-1, keepdim=True) > allowed
        low, high = torch.where(above, middle, low), torch.where(above, high, middle)
    return high


def clamp(y: torch.Tensor, threshold: torch.Tensor) -> torch.Tensor:
    return torch.minimum(torch.maximum(y, -threshold), threshold)
