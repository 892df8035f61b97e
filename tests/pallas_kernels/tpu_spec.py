"""Configurations of TPU decode attention that are compiled in CI: every pair of values of two axes, on the chips.

`python -m tests.pallas_kernels.tpu_spec` compiles every combination on every chip instead, and prints a line for each.
"""

import dataclasses
import itertools
import json

from pallas_kernels.tpu_compile import TOPOLOGIES, Case, outcomes
from tests.pallas_kernels.gpu_spec import covering

AXES = {
    "head_dim": [64, 128, 256],
    "heads_per_group": [1, 2, 4, 7, 8, 16],
    "q_len": [1, 2, 4, 16],
    "kv_heads": [1, 2, 8],
    "recipe": ["default", "one-bucket", "oscar-reference"],
    "dtype": ["bfloat16", "float16", "float32"],
    "options": ["none", "softcap", "window", "sink-logits", "softcap+window+sink-logits"],
}
MAIN = [
    Case(),
    Case(head_dim=64, heads_per_group=7, kv_heads=2),
    Case("demote"),
    Case("demote", head_dim=64, q_len=256, kv_heads=2),
    Case("demote", head_dim=256, recipe="oscar-reference", dtype="float16", kv_heads=1),
]


def cases() -> dict[str, list[Case]]:
    """Cases of each chip: the main shapes, and rows that hold every pair of values and of a value and a chip."""
    found = {chip: list(MAIN) for chip in TOPOLOGIES}
    for row in covering({"chip": list(TOPOLOGIES)} | AXES):
        chip = row.pop("chip")
        found[chip].append(Case(**row))
    return found


def main() -> None:
    product = [Case(**dict(zip(AXES, values, strict=True))) for values in itertools.product(*AXES.values())]
    for chip in TOPOLOGIES:
        for case, outcome in zip(product, outcomes(chip, product), strict=True):
            print(json.dumps({"chip": chip} | dataclasses.asdict(case) | dataclasses.asdict(outcome)), flush=True)


if __name__ == "__main__":
    main()
