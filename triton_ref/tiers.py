"""Which token is where: this project's rule, and the OSCAR reference's, as functions of positions.

A query at position t reads `j < sink` plain, `sink <= j < h(t)` from INT2 and `h(t) <= j <= t` plain. The two differ in
h alone.
"""

from __future__ import annotations

import dataclasses

import torch


@dataclasses.dataclass(frozen=True)
class Tiers:
    """Sizes in tokens: S, W, the demotion group g, and tokens of a page."""

    sink: int = 64
    recent: int = 256
    group: int = 8
    page: int = 128

    def history_end(self, positions: torch.Tensor) -> torch.Tensor:
        """This project's h: of the query's position only, `S + g floor(max(0, t + 1 - S - W) / g)`."""
        return self.sink + self.group * ((positions + 1 - self.sink - self.recent).clamp(min=0) // self.group)

    def reference_history_end(self, positions: torch.Tensor, *, prompt: int, chunk: int) -> torch.Tensor:
        """The reference's h, for a sequence whose prompt of `prompt` tokens came in chunks of `chunk`.

        A prompt token attends to its own chunk plainly and to all earlier chunks, past the sinks, in INT2. The last
        chunk leaves its last W tokens plain; decoding then demotes g at a time, when W + g - 1 recents are held and one
        more arrives. So recents cycle W .. W+g-1 counted from the prompt's end, not from position 0.
        """
        start = positions.clamp(max=prompt - 1) // chunk * chunk
        last_chunk = (prompt - 1) // chunk * chunk
        after_prompt = max(self.sink, last_chunk, prompt - self.recent)
        excess = (positions + 1 - after_prompt - self.recent).clamp(min=0)
        decoding = after_prompt + self.group * (excess // self.group)
        return torch.where(positions < prompt, start.clamp(min=self.sink), decoding)
