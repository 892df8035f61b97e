"""Configurations of the TPU kernels that are compiled: every pair of values of the axes in CI, a full grid by command.

`nice python -m tests.pallas_kernels.tpu_spec benchmarks/results/tpu-grid.jsonl` compiles the grid for every chip, an
hour and a half on one core, and adds a line of JSON for each case that the file does not have yet.
"""

import argparse
import dataclasses
import importlib.metadata
import itertools
import json
from pathlib import Path

from pallas_kernels.tpu_compile import TOPOLOGIES, Case, outcomes
from tests.pallas_kernels.gpu_spec import covering

AXES = {
    "head_dim": [64, 128, 256],
    "heads_per_group": [1, 4, 7, 16],
    "q_len": [1, 4, 16],
    "page": [16, 32, 64, 128],
    "kv_heads": [1, 2, 5, 8],
    "recipe": ["default", "one-bucket", "oscar-reference"],
    "dtype": ["bfloat16", "float16", "float32"],
    "options": ["none", "softcap", "window", "sink-logits", "softcap+window+sink-logits"],
}
MAIN = [
    Case(),
    Case("demote"),
    Case("demote", head_dim=64, q_len=256, kv_heads=2, page=64),
    Case("demote", head_dim=256, recipe="oscar-reference", dtype="float16", kv_heads=1, page=16),
]
# Query heads a KV head and query tokens, of which the kernel sees the product, padded to 8 rows.
QUERIES = [(8, 1), (1, 16), (8, 4), (16, 4), (8, 16), (16, 16)]
PAGES = [16, 64, 128]
RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "tpu-grid.jsonl"


def cases() -> dict[str, list[Case]]:
    """Cases of each chip: the main shapes, and rows that hold every pair of values and of a value and a chip."""
    found = {chip: list(MAIN) for chip in TOPOLOGIES}
    for row in covering({"chip": list(TOPOLOGIES)} | AXES):
        chip, case = row.pop("chip"), Case(**row)
        # A page of 16 of an odd number of heads of 64 is refused; its other pairs are those of these two.
        if (case.head_dim, case.page, case.kv_heads % 2) == (64, 16, 1):
            found[chip] += [dataclasses.replace(case, kv_heads=2), dataclasses.replace(case, page=32)]
        else:
            found[chip].append(case)
    return found


def grid() -> list[Case]:
    """Head size x page x query heads x query tokens, and writes of a decode step."""
    sizes = list(itertools.product(AXES["head_dim"], PAGES))
    attention = [
        Case(head_dim=dim, page=page, heads_per_group=heads, q_len=tokens)
        for dim, page in sizes
        for heads, tokens in QUERIES
    ]
    return attention + [Case("demote", head_dim=dim, page=page) for dim, page in sizes]


def key(line: dict) -> tuple:
    """What tells lines of the results apart."""
    return tuple(line[name] for name in ("chip", "operation", "head_dim", "page", "heads_per_group", "q_len"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("results", type=Path)
    path = parser.parse_args().results
    if not path.exists():
        versions = {name: importlib.metadata.version(name) for name in ("jax", "jaxlib", "libtpu")}
        command = "python -m tests.pallas_kernels.tpu_spec benchmarks/results/tpu-grid.jsonl"
        path.write_text(json.dumps({"command": command, "versions": versions}) + "\n")
    done = {key(line) for line in map(json.loads, path.read_text().splitlines()[1:])}
    for chip in TOPOLOGIES:
        missing = [case for case in grid() if key({"chip": chip} | dataclasses.asdict(case)) not in done]
        for case, outcome in zip(missing, outcomes(chip, missing), strict=True):
            line = {"chip": chip} | dataclasses.asdict(case) | dataclasses.asdict(outcome)
            with path.open("a") as file:
                file.write(json.dumps(line | {"seconds": round(outcome.seconds, 1)}) + "\n")


if __name__ == "__main__":
    main()
