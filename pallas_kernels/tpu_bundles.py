"""What libtpu's own schedule of the decode attention kernel costs: instruction bundles of its loop over steps.

`python -m pallas_kernels.tpu_bundles FILE` compiles the kernel for every chip and size with libtpu's dumps and writes a
line of JSON for each; `pallas_kernels.tpu_cost` makes its table of them. A bundle takes a cycle at least. A step is 512
tokens: it starts and awaits copies, transforms queries where a bucket begins, decodes scales, and runs the loop over
KV heads, which is nearly all.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from pallas_kernels import tpu_compile
from pallas_kernels.tpu_compile import TOPOLOGIES, Case

STEP, BLOCKS, HEADS = 512, 4, 8  # tokens, blocks of 128, KV heads
SIZES = [(dim, page) for page in (128, 64, 16) for dim in (64, 128, 256)]  # head size and page
_BUNDLE = re.compile(r"\s*(?:0x[0-9a-f]+|0)\s+(LB|LH|LE|PB|PF)?\s*:\s*(>*)")


@dataclasses.dataclass(frozen=True)
class Schedule:
    """Bundles of one step, of 8 KV heads, and what the loop over heads has of them.

    Attributes:
        copies: all that is neither a loop over heads nor queries: copies, scales, the step itself.
        queries: of the transform of a bucket's queries.
        heads: of reading history.
        capacity: instructions of each unit that a bundle has room for. used: those of the loop over heads, one head.
    """

    copies: int
    queries: int
    heads: int
    capacity: dict[str, int]
    used: dict[str, int]


def schedule(folder: Path) -> Schedule:
    """Of the dumps of a compilation."""
    [bundles] = [x for x in folder.glob("*oscar_attend*-final_bundles.txt") if "analysis" not in x.name]
    [units] = folder.glob("*oscar_attend*-final_hlo-static-per-bundle-utilization.txt")
    _, names, capacity, _, *rows = units.read_text().splitlines()
    names, used = names.split(", "), [[int(n) for n in row.split()] for row in rows]
    marks = [match for match in map(_BUNDLE.match, bundles.read_text().splitlines()) if match]
    loops = [(i, _end(marks, i)) for i, mark in enumerate(marks) if mark[1] == "LB"]

    def work(loop: tuple[int, int]) -> dict[str, int]:
        return dict(zip(names, (sum(column) for column in zip(*used[slice(*loop)], strict=True)), strict=True))

    inner = [x for x in loops if not any(x[0] < y[0] < x[1] for y in loops)]
    heads = max(inner, key=lambda x: work(x)["VALU"])
    step = max(x for x in loops if x[0] < heads[0] and heads[1] <= x[1])
    inside = [x for x in inner if step[0] < x[0] < step[1] and x != heads]
    queries = [x for x in inside if work(x)["MXU"]]
    copies = [x for x in inside if not work(x)["MXU"]]
    size = {x: x[1] - x[0] for x in (step, heads, *inside)}
    straight = size[step] - sum(size[x] for x in (heads, *inside))
    return Schedule(
        straight + BLOCKS * sum(size[x] for x in copies), HEADS * sum(size[x] for x in queries), HEADS * size[heads],
        dict(zip(names, map(int, capacity.split()), strict=True)), work(heads),
    )  # fmt: skip


def _end(marks: list[re.Match], first: int) -> int:
    """Where a loop ends: at the next that is not inside, or with three bundles in a row that are not.

    Fewer such, or with more that are inside after them, are instructions moved in from outside; a bundle without a mark
    is an empty one.
    """
    depth = len(marks[first][2])
    outside: list[int] = []
    for i in range(first + 1, len(marks)):
        inside = len(marks[i][2])
        if marks[i][1] == "LB" and inside <= depth:
            return outside[0] if outside else i
        if inside >= depth:
            if len(outside) >= 3 and any(len(mark[2]) < depth for mark in marks[i : i + len(outside) + 1]):
                break
            outside = []
        elif inside:
            outside.append(i)
    return outside[0] if outside else len(marks)


def compiled(chip: str, case: Case) -> Schedule:
    """Of a case, compiled in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        flags = {"LIBTPU_INIT_ARGS": f"--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true"}
        done = subprocess.run(
            [sys.executable, "-m", tpu_compile.MODULE, "--worker", "--chip", chip], text=True, capture_output=True,
            input=json.dumps(dataclasses.asdict(case)) + "\n", env=os.environ | tpu_compile.ENVIRONMENT | flags,
        )  # fmt: skip
        outcome = tpu_compile.Outcome(**json.loads(done.stdout))
        if not outcome.compiled:
            raise RuntimeError(f"{chip}, {case}: {outcome.error or outcome.refused}")
        return schedule(Path(folder))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path)
    path = parser.parse_args().results
    if not path.exists():
        versions = {name: importlib.metadata.version(name) for name in ("jax", "jaxlib", "libtpu")}
        command = "python -m pallas_kernels.tpu_bundles benchmarks/results/tpu-bundles.jsonl"
        path.write_text(json.dumps({"command": command, "versions": versions}) + "\n")
    done = {
        (line["chip"], line["head_dim"], line["page"]) for line in map(json.loads, path.read_text().splitlines()[1:])
    }
    for chip, (head_dim, page) in itertools.product(TOPOLOGIES, SIZES):
        if (chip, head_dim, page) in done:
            continue
        found = compiled(chip, Case(head_dim=head_dim, page=page, kv_heads=HEADS))
        with path.open("a") as file:
            line = {"chip": chip, "head_dim": head_dim, "page": page} | dataclasses.asdict(found)
            file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
