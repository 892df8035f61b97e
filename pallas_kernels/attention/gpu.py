"""NVIDIA GPUs: which kernel takes a call. Few query tokens read history split over many programs, many do not."""

from __future__ import annotations

import jax

from pallas_kernels.attention import triton, triton_prefill
from pallas_kernels.attention.triton import unavailable

__all__ = ["attend", "unavailable"]


def attend(q: jax.Array, *operands, **options) -> jax.Array:
    """See `pallas_kernels.attention.attend`."""
    kernel = triton.attend if q.shape[1] <= triton.MAX_TOKENS else triton_prefill.attend
    return kernel(q, *operands, **options)
