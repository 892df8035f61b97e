"""Configurations of decode attention that are lowered in CI and checked on the device: `gpu_spec.json`.

The file lists axes and rows; every pair of values of two axes is in some row. `python -m tests.pallas_kernels.gpu_spec`
writes its rows anew after a change of the axes.
"""

import dataclasses
import itertools
import json
from pathlib import Path
from typing import Any

from pallas_kernels.tiers import Tiers
from tests.pallas_kernels.states import Case

PATH = Path(__file__).with_name("gpu_spec.json")
SINK, RECENT, GROUP = 4, 8, 8
RECIPES = {
    "default": dict(key="levels", value="levels-uniform"),
    "one-bucket": dict(key="levels", value="levels-uniform"),
    "oscar-reference": dict(key="rotation-rank", value="rotation-rank"),
}
OPTIONS = {
    "softcap": dict(softcap=2.0),
    "window": dict(window=150),
    "sink-logits": dict(sinks=True),
}


@dataclasses.dataclass(frozen=True)
class Configuration:
    """One row of the file; fields are its axes."""

    head_dim: int
    heads_per_group: int
    q_len: int
    page: int
    recipe: str
    dtype: str
    options: str  # of OPTIONS, joined by "+"; "none"

    def __str__(self) -> str:
        return (
            f"D{self.head_dim}-G{self.heads_per_group}-T{self.q_len}-page{self.page}-{self.recipe}-{self.dtype}-"
            f"{self.options}"
        )

    @property
    def case(self) -> Case:
        """Sequences at every edge: empty, S, S + 1, S + W, one page of history and a token either way, some buckets."""
        full = SINK + RECENT + self.page  # tokens in all when the last of a page has become history
        lengths = (0, SINK, SINK + 1, SINK + RECENT, full - 1, full, full + 1, 333)
        starts = tuple(max(0, length - self.q_len) for length in lengths)
        counts = tuple(min(length, self.q_len) for length in lengths)
        options: dict[str, Any] = {}
        for name in self.options.split("+"):
            options |= OPTIONS.get(name, {})
        return Case(
            starts, tokens=self.q_len, counts=counts, head_dim=self.head_dim, q_heads=2 * self.heads_per_group,
            kv_heads=2, tiers=Tiers(SINK, RECENT, GROUP, self.page),
            bucket=max(64, self.page) if self.recipe == "default" else None, dtype=self.dtype,
            **RECIPES[self.recipe], **options,
        )  # fmt: skip


def axes() -> dict[str, list]:
    return json.loads(PATH.read_text())["axes"]


def configurations() -> list[Configuration]:
    return [Configuration(*row) for row in json.loads(PATH.read_text())["rows"]]


def product() -> list[Configuration]:
    """Every combination of the first three axes; those of the others take turns."""
    first, rest = list(axes().values())[:3], list(itertools.product(*list(axes().values())[3:]))
    return [Configuration(*row, *rest[i % len(rest)]) for i, row in enumerate(itertools.product(*first))]


def pairs(row: dict[str, Any]) -> set[frozenset]:
    """Every two values of a row, each as `(axis, value)`."""
    return set(map(frozenset, itertools.combinations(row.items(), 2)))


def all_pairs(axes: dict[str, list]) -> set[frozenset]:
    return {
        frozenset([(a, x), (b, y)])
        for a, b in itertools.combinations(axes, 2)
        for x, y in itertools.product(axes[a], axes[b])
    }


def covering(axes: dict[str, list]) -> list[dict[str, Any]]:
    """Rows that hold every pair.

    Each is the best of some that start from a missing pair and take, axis by axis, the value that adds most.
    """
    order = sorted(all_pairs(axes), key=lambda pair: sorted(map(str, pair)))
    missing, rows = set(order), []
    while missing:
        candidates = []
        for seed in itertools.islice((pair for pair in order if pair in missing), 100):
            row = dict(seed)
            for axis in [name for name in axes if name not in row]:
                row[axis] = max(axes[axis], key=lambda x: len(pairs({**row, axis: x}) & missing))
            candidates.append({axis: row[axis] for axis in axes})
        rows.append(max(candidates, key=lambda row: len(pairs(row) & missing)))
        missing -= pairs(rows[-1])
    return rows


def main() -> None:
    rows = sorted((list(row.values()) for row in covering(axes())), key=str)
    lines = [
        '{\n "axes": {',
        ",\n".join(f"  {json.dumps(name)}: {json.dumps(values)}" for name, values in axes().items()),
        ' },\n "rows": [',
        ",\n".join(f"  {json.dumps(row)}" for row in rows),
        " ]\n}",
    ]
    PATH.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
