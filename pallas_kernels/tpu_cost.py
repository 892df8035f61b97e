"""What decode attention should cost on TPUs: counted bytes and libtpu's schedules against what chips are said to do.

A model, not a measurement: no TPU has run the kernel. `python -m pallas_kernels.tpu_cost
benchmarks/results/tpu-bundles.jsonl` prints the tables of `docs/tpu.md`. Everything is for 128 tokens of one of eight
KV heads, `pallas_kernels.attention.tpu` as it is; an operation is one on a register of 8 x 128 32-bit words, or of
twice as many 16-bit ones.

Assumed: a bundle takes a cycle, and the bytes of a step come while another is computed on.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Any

from pallas_kernels import codec
from pallas_kernels.tpu_bundles import BLOCKS, HEADS

TOKENS = 128
BUCKET_STEPS = 4  # steps of a bucket, for whose first one queries are transformed
SOFTMAX = 30  # operations on each register of logits: decode of a logit, mask, exponential, sums, two parts
NUMBERS = 10  # operations that make 16-bit floats of 8 heads fp32, each array


@dataclasses.dataclass(frozen=True)
class Chip:
    """A tensor core: bytes of HBM a second, cycles a second."""

    bandwidth: float
    clock: float

    @property
    def bytes_per_cycle(self) -> float:
        return self.bandwidth / self.clock


# Published peaks of a chip, over its cores.
CHIPS = {
    "v4": Chip(1228e9 / 2, 1.05e9),
    "v5e": Chip(819e9, 1.5e9),
    "v5p": Chip(2765e9 / 2, 1.75e9),
    "v6e": Chip(1640e9, 1.75e9),
    "tpu7x": Chip(7380e9 / 2, 2.2e9),
}

# Operations that make operands of the MXU of 128 tokens and one side, on registers of `[32, 128]` bytes (N = 128).
LAYOUTS = {
    "bytes, tokens on lanes, mantissa fields (built)": 8 + 8 + 3,  # AND, OR, distinct shifts
    "bytes, tokens on lanes, converted": 4
    + 4 * 4 * 3.5,  # widen; shift, AND, convert, half a pack, a plane and register
    "bytes, rows of 128 lanes, block-diagonal query": 4 + 4 * 4 * 3.5,
    "uint2 array": 4 + 4 * 4 * 3.5,  # the compiler's own conversion, taken to be as good as the one by hand
}


def memory_cycles(chip: Chip, *, head_dim: int, page: int = TOKENS, offsets: bool = False) -> float:
    """Cycles that HBM takes for 128 tokens of a KV head, both sides.

    Args:
        page: of shorter pages XLA gathers the numbers, which are then read, written and read again.
        offsets: offsets are stored too.
    """
    numbers = (4 if offsets else 2) * 2 * TOKENS
    return (2 * TOKENS * head_dim / codec.PLANES + numbers * (3 if page < TOKENS else 1)) / chip.bytes_per_cycle


def vector_operations(*, head_dim: int, rows: int = 8, unpack: float | None = None, offsets: bool = False) -> float:
    """Counted operations for 128 tokens of a KV head in whole pages.

    Args:
        rows: query rows of a KV head, padded to 8.
        unpack: operations a side, of `LAYOUTS`; the built one by default.
    """
    numbers = 4 if offsets else 2
    registers = max(1.0, head_dim / 128)  # of packed bytes; half-filled ones cost as much
    unpack = LAYOUTS["bytes, tokens on lanes, mantissa fields (built)"] if unpack is None else unpack
    return 2 * unpack * registers + SOFTMAX * rows / 8 + numbers * NUMBERS / HEADS + 3 * rows / 8 * registers / 4


@dataclasses.dataclass(frozen=True)
class Expected:
    """Cycles for 128 tokens of a KV head.

    Attributes:
        memory: of HBM.
        copies, queries, heads: of libtpu's schedule, as in `tpu_bundles.Schedule`.
        unit: the fullest unit of the loop over heads. full: share of the room for its instructions that they take.
    """

    memory: float
    copies: float
    queries: float
    heads: float
    unit: str
    full: float

    @property
    def schedule(self) -> float:
        return self.copies + self.queries + self.heads

    @property
    def share(self) -> float:
        """Expected share of HBM bandwidth."""
        return min(1.0, self.memory / self.schedule)

    @property
    def limit(self) -> str:
        if self.share == 1:
            return "HBM"
        if self.copies > self.heads:
            return "scalar unit, starting copies"
        return f"chain of products, {self.unit} {100 * self.full:.0f} % full"


def expected(line: dict[str, Any]) -> Expected:
    """The model for a line of `pallas_kernels.tpu_bundles`."""
    memory = memory_cycles(CHIPS[line["chip"]], head_dim=line["head_dim"], page=line["page"])
    copies, queries, heads = (line[name] / (BLOCKS * HEADS) for name in ("copies", "queries", "heads"))
    bundles = line["heads"] / HEADS
    full = {unit: line["used"][unit] / (bundles * line["capacity"][unit]) for unit in ("MXU", "XLU", "VALU")}
    unit = max(full, key=lambda name: full[name])
    return Expected(memory, copies, queries / BUCKET_STEPS, heads, {"VALU": "VPU"}.get(unit, unit), full[unit])


def tables(lines: list[dict[str, Any]]) -> str:
    """Markdown: expected share of bandwidth by chip, head size and page, and layouts by operations."""
    rows = [
        "| chip | D | page | HBM | VPU, counted | VPU, compiled | copies | queries | heads | share of HBM | limit |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    order = list(CHIPS)
    for line in sorted(lines, key=lambda x: (order.index(x["chip"]), -x["page"], x["head_dim"])):
        found, slots = expected(line), line["capacity"]["VALU"]
        counted = f"{vector_operations(head_dim=line['head_dim']) / slots:.0f}" if line["page"] == TOKENS else ""
        rows.append(
            f"| {line['chip']} | {line['head_dim']} | {line['page']} | {found.memory:.0f} | {counted} | "
            f"{line['used']['VALU'] / BLOCKS / slots:.0f} | {found.copies:.0f} | {found.queries:.0f} | "
            f"{found.heads:.0f} | {100 * found.share:.0f} % | {found.limit} |"
        )
    rows += [
        "",
        "| layout | operations a side | operations for 128 tokens | cycles of four, of HBM's on v5e |",
        "|---|---|---|---|",
    ]
    for name, unpack in LAYOUTS.items():
        operations = vector_operations(head_dim=128, unpack=unpack)
        ratio = operations / 4 / memory_cycles(CHIPS["v5e"], head_dim=128)
        rows.append(f"| {name} | {unpack:.0f} | {operations:.0f} | {ratio:.1f} |")
    return "\n".join(rows)


def read(path: Path) -> list[dict[str, Any]]:
    """Lines of the results of `pallas_kernels.tpu_bundles` after the first, which says how they were made."""
    return [json.loads(line) for line in path.read_text().splitlines()[1:]]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundles", type=Path)
    print(tables(read(parser.parse_args().bundles)))
