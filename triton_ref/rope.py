"""Rotary positions: the pure rotation by any whole position, angles in float64 on the host."""

from __future__ import annotations

import dataclasses

import torch


@dataclasses.dataclass(frozen=True)
class Rotary:
    """Radians a token of each pair; the leading `rotary_dim` dimensions turn, paired "half" or "interleaved"."""

    inverse_frequencies: tuple[float, ...]
    rotary_dim: int
    pairing: str = "half"

    def tables(self, positions: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines `[..., rotary_dim / 2]` for integer positions `[...]`, from float64 angles."""
        frequencies = torch.tensor(self.inverse_frequencies, dtype=torch.float64, device=positions.device)
        angles = positions[..., None].double() * frequencies
        return torch.cos(angles).to(dtype), torch.sin(angles).to(dtype)

    def rotate(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """x `[..., D]` turned to `positions`, which broadcast against `x[..., 0]`; negative ones turn back."""
        cos, sin = self.tables(positions, x.dtype)
        half = self.rotary_dim // 2
        if self.pairing == "half":
            first, second = x[..., :half], x[..., half : 2 * half]
        else:
            first, second = x[..., 0 : 2 * half : 2], x[..., 1 : 2 * half : 2]
        turned = first * cos - second * sin, second * cos + first * sin
        head = torch.cat(turned, -1) if self.pairing == "half" else torch.stack(turned, -1).flatten(-2)
        return torch.cat([head, x[..., 2 * half :].expand(*head.shape[:-1], -1)], -1)
