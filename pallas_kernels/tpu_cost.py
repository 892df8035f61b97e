"""What decode attention should cost on TPUs: counted bytes and vector operations against what chips are said to do.

A model, not a measurement: no TPU has run the kernel. `python -m pallas_kernels.tpu_cost` prints the tables of
`docs/tpu.md`. Counts are for one page of one KV head, 128 tokens, as `pallas_kernels.attention.tpu` is written; an
operation is one on a register of 8 x 128 32-bit words, or of twice as many 16-bit ones.

Assumed: four vector operations a cycle and core, every slot filled; copies hidden behind arithmetic. How fast the MXU
takes new operands is not published, so it is given as a range: a register of 16 x 128 bfloat16 a cycle, or one of its
rows a cycle.
"""

from __future__ import annotations

import dataclasses

from pallas_kernels import codec

PAGE = 128
VECTOR_SLOTS = 4
SOFTMAX = 30  # operations on each register of logits: decode of a logit, mask, exponential, sums, two parts
NUMBERS = 10  # operations that make 16-bit floats of 8 heads fp32, each array


@dataclasses.dataclass(frozen=True)
class Chip:
    """A tensor core: bytes of HBM a second, cycles a second, and MXUs of 128 x 128 that it has the rate of."""

    bandwidth: float
    clock: float
    units: int

    @property
    def bytes_per_cycle(self) -> float:
        return self.bandwidth / self.clock


# Published peaks of a chip, over its cores.
CHIPS = {
    "v4": Chip(1228e9 / 2, 1.05e9, 4),
    "v5e": Chip(819e9, 1.5e9, 4),
    "v5p": Chip(2765e9 / 2, 1.75e9, 4),
    "v6e": Chip(1640e9, 1.75e9, 16),
    "tpu7x": Chip(7380e9 / 2, 2.2e9, 16),
}

# Operations that make operands of the MXU of one page and side, on registers of `[32, 128]` bytes (N = 128).
LAYOUTS = {
    "bytes, tokens on lanes, mantissa fields (built)": 8 + 8 + 3,  # AND, OR, distinct shifts
    "bytes, tokens on lanes, converted": 4
    + 4 * 4 * 3.5,  # widen; shift, AND, convert, half a pack, a plane and register
    "bytes, rows of 128 lanes, block-diagonal query": 4 + 4 * 4 * 3.5,
    "uint2 array": 4 + 4 * 4 * 3.5,  # the compiler's own conversion, taken to be as good as the one by hand
}


@dataclasses.dataclass(frozen=True)
class Cost:
    """Cycles of each unit for a page and KV head."""

    memory: float
    vector: float
    matrix: tuple[float, float]  # at the fast and the slow rate of taking operands

    @property
    def share(self) -> tuple[float, float]:
        """Expected share of HBM bandwidth at the slow and the fast rate."""
        low, high = (self.memory / max(self.memory, self.vector, matrix) for matrix in reversed(self.matrix))
        return low, high

    @property
    def limit(self) -> str:
        """The unit that takes longest at the fast rate of the MXU."""
        units = {"HBM": self.memory, "VPU": self.vector, "MXU": self.matrix[0]}
        return max(units, key=lambda name: units[name])


def cost(chip: Chip, *, head_dim: int, rows: int = 8, unpack: float | None = None, offsets: bool = False) -> Cost:
    """Cycles for a page and KV head.

    Args:
        rows: query rows of a KV head, padded to 8.
        unpack: operations a side, of `LAYOUTS`; the built one by default.
        offsets: offsets are stored too.
    """
    numbers = 4 if offsets else 2
    size = 2 * PAGE * head_dim // codec.PLANES + 2 * numbers * PAGE
    registers = max(1.0, head_dim / 128)  # of packed bytes; half-filled ones cost as much
    unpack = LAYOUTS["bytes, tokens on lanes, mantissa fields (built)"] if unpack is None else unpack
    vector = 2 * unpack * registers + SOFTMAX * rows / 8 + numbers * NUMBERS / 8 + 3 * rows / 8 * registers / 4
    pushes = 2 * head_dim / 16 * PAGE / 128  # registers of both sides
    streams = 2 * 2 * rows / 8 * registers  # of queries and probabilities, in two parts
    fast, slow = ((pushes * cycles + streams) / chip.units for cycles in (1, 16))
    return Cost(size / chip.bytes_per_cycle, vector / VECTOR_SLOTS, (fast, slow))


def tables() -> str:
    """Markdown: expected share of bandwidth by chip and head size, and layouts by operations."""
    lines = [
        "| chip | D | HBM | VPU | MXU | expected share of HBM bandwidth | limit |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, chip in CHIPS.items():
        for head_dim in (64, 128, 256):
            found = cost(chip, head_dim=head_dim)
            low, high = found.share
            lines.append(
                f"| {name} | {head_dim} | {found.memory:.0f} | {found.vector:.0f} | {found.matrix[0]:.0f} to "
                f"{found.matrix[1]:.0f} | {100 * low:.0f} to {100 * high:.0f} % | {found.limit} |"
            )
    lines += ["", "| layout | operations a side | VPU cycles a page | of HBM's on v5e |", "|---|---|---|---|"]
    for name, unpack in LAYOUTS.items():
        found = cost(CHIPS["v5e"], head_dim=128, unpack=unpack)
        lines.append(f"| {name} | {unpack:.0f} | {found.vector:.0f} | {found.vector / found.memory:.1f} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(tables())
