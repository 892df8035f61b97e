"""Transform codes as tensors: the arrays both frameworks exchange, by the names of `pallas_kernels.transform_code`.

A row x of one token and KV head is encoded from `y = (x - mu) M` and read back as
`x_hat = (scale c + offset 1) E + mu`, with c the stored two-bit slots.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch

from triton_ref.rope import Rotary

SLOT_BITS = 2
PLANES = 8 // SLOT_BITS
NO_SLOT = 8  # a right shift that leaves nothing of a level: the slot has no owner
CLIPS = ("none", "rank", "static", "bisect")

_DTYPES = {"bits": torch.int32, "slot_order": torch.int64}


@dataclasses.dataclass(frozen=True)
class TransformCode:
    """One side (K or V); leaves lead with `[K]` for one layer or `[L, K]` for all.

    Attributes:
        mu `[D]`, encode `[D, D]` (M), delta, weight `[D]`, gain `[]`, decode `[N, D]` (E), clip_threshold `[]` or None,
            metric `[D, D]` or None: float. bits `[D]`, slot_order `[N]`: int.
        kind: "levels" or "minmax".
        clip: "none", "rank" (exact order statistic), "static", or "bisect" (the order statistic as the OSCAR
            reference's demotion kernel finds it, see `clip.bisected_threshold`).
        clip_ratio: rho.
    """

    mu: torch.Tensor
    encode: torch.Tensor
    bits: torch.Tensor
    delta: torch.Tensor
    weight: torch.Tensor
    gain: torch.Tensor
    slot_order: torch.Tensor
    decode: torch.Tensor
    clip_threshold: torch.Tensor | None
    metric: torch.Tensor | None
    kind: str
    clip: str = "none"
    clip_ratio: float = 1.0

    def __post_init__(self):
        if self.kind not in ("levels", "minmax") or self.clip not in CLIPS:
            raise ValueError(f"kind={self.kind!r}, clip={self.clip!r}: expected levels or minmax, and one of {CLIPS}.")

    @classmethod
    def from_arrays(
        cls, arrays: Mapping[str, Any], *, kind: str, clip: str = "none", clip_ratio: float = 1.0, device: Any = None
    ) -> TransformCode:
        """From arrays by name (numpy or anything `torch.as_tensor` takes), as `TransformCode.arrays()` of JAX gives."""
        names = [field.name for field in dataclasses.fields(cls) if field.name not in ("kind", "clip", "clip_ratio")]
        leaves = {
            name: torch.as_tensor(arrays[name], dtype=_DTYPES.get(name), device=device) if name in arrays else None
            for name in names
        }
        return cls(**leaves, kind=kind, clip=clip, clip_ratio=clip_ratio)  # type: ignore[arg-type]

    @property
    def head_dim(self) -> int:
        return self.mu.shape[-1]

    @property
    def slots(self) -> int:
        """N, two-bit slots of a stored row."""
        return self.slot_order.shape[-1]

    def layer(self, index: int) -> TransformCode:
        """Leaves `[K, ...]` of one layer."""
        return self._map(lambda leaf: leaf[index])

    def to(self, device: Any) -> TransformCode:
        return self._map(lambda leaf: leaf.to(device))

    def slot_tables(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Owner coordinate and right shift of every stored slot, int64 `[..., N]`.

        Logical order is the coordinates' order, a coordinate's slots adjacent, most significant first; stored slot p
        holds logical slot `slot_order[p]`.
        """
        bits = self.bits.reshape(-1, self.head_dim)
        owners = torch.zeros(len(bits), self.slots, dtype=torch.int64, device=bits.device)
        shifts = torch.full_like(owners, NO_SLOT)
        for owner, shift, width in zip(owners, shifts, bits, strict=True):
            counts = width // SLOT_BITS
            of = torch.repeat_interleave(torch.arange(len(counts), device=bits.device), counts)
            first = torch.cumsum(counts, 0) - counts
            within = torch.arange(len(of), device=bits.device) - first[of]
            owner[: len(of)] = of
            shift[: len(of)] = SLOT_BITS * (counts[of] - 1 - within)
        order = self.slot_order.reshape(-1, self.slots)
        shape = self.slot_order.shape
        return torch.gather(owners, 1, order).reshape(shape), torch.gather(shifts, 1, order).reshape(shape)

    def feedback_factor(self) -> torch.Tensor:
        """Upper factor U of `metric^-1 = U^T U`, in the metric's dtype, computed in float64."""
        if self.metric is None:
            raise ValueError("metric=None: expected a code with error feedback.")
        inverse = torch.linalg.inv(self.metric.double())
        return torch.linalg.cholesky((inverse + inverse.mT) / 2).mT.to(self.metric.dtype)

    def _map(self, function) -> TransformCode:
        changed = {
            field.name: function(leaf)
            for field in dataclasses.fields(self)
            if isinstance(leaf := getattr(self, field.name), torch.Tensor)
        }
        return dataclasses.replace(self, **changed)


@dataclasses.dataclass(frozen=True)
class TransformCodes:
    """Both sides, and how positions enter.

    Attributes:
        rotary: the model's rotary positions; needed with `bucket`.
        bucket: history is cut into buckets of this many tokens, each key coded relative to its bucket's start; None
            means one bucket and no rotation.
        scale_dtype: of stored scales and offsets.
    """

    key: TransformCode
    value: TransformCode
    rotary: Rotary | None = None
    bucket: int | None = None
    scale_dtype: torch.dtype = torch.float16

    def layer(self, index: int) -> TransformCodes:
        return dataclasses.replace(self, key=self.key.layer(index), value=self.value.layer(index))

    def to(self, device: Any) -> TransformCodes:
        return dataclasses.replace(self, key=self.key.to(device), value=self.value.to(device))

    def origins(self, positions: torch.Tensor, sink: int) -> torch.Tensor:
        """Start of the bucket of each position; sinks count to the first."""
        if self.bucket is None:
            return torch.zeros_like(positions)
        return sink + self.bucket * ((positions - sink).clamp(min=0) // self.bucket)

    def turn(self, x: torch.Tensor, origins: torch.Tensor) -> torch.Tensor:
        """`x R(origin)` for rows `[..., K, D]` and origins `[...]`; x itself without buckets."""
        if self.bucket is None:
            return x
        if self.rotary is None:
            raise ValueError(f"bucket={self.bucket} without rotary: expected the model's rotation.")
        return self.rotary.rotate(x, origins[..., None])
