"""The cost model of the TPU kernels, that the documentation has its tables, and how libtpu's dumps are read."""

import itertools
from pathlib import Path

import pytest

from pallas_kernels import tpu_bundles, tpu_cost
from pallas_kernels.tpu_cost import CHIPS, LAYOUTS, memory_cycles, vector_operations

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "tpu-bundles.jsonl"


def test_the_documentation_has_the_tables():
    lines = tpu_cost.read(RESULTS)
    assert {(x["chip"], x["head_dim"], x["page"]) for x in lines} == {
        (chip, *size) for chip, size in itertools.product(CHIPS, tpu_bundles.SIZES)
    }
    assert tpu_cost.tables(lines) in (ROOT / "docs" / "tpu.md").read_text()


def test_memory_cycles_are_the_bytes_of_a_page():
    """Two sides of 32 bytes and a 16-bit scale a token, at 546 bytes a cycle."""
    assert memory_cycles(CHIPS["v5e"], head_dim=128) == pytest.approx(128 * 2 * (32 + 2) / 546)
    assert memory_cycles(CHIPS["v5e"], head_dim=128, offsets=True) == pytest.approx(128 * 2 * (32 + 4) / 546)
    assert memory_cycles(CHIPS["v5e"], head_dim=128, page=16) == pytest.approx(128 * 2 * (32 + 3 * 2) / 546)


def test_the_built_layout_is_the_cheapest():
    built, *others = (vector_operations(head_dim=128, unpack=unpack) for unpack in LAYOUTS.values())
    assert all(built < other for other in others)


def test_what_is_counted_by_hand_is_about_what_is_compiled():
    """Chips of several generations, so that the count of operations is no fit to one of them."""
    for line in tpu_cost.read(RESULTS):
        if line["page"] == 128 and line["head_dim"] == 128:
            compiled = line["used"]["VALU"] / tpu_bundles.BLOCKS
            assert vector_operations(head_dim=128) == pytest.approx(compiled, rel=0.15), line["chip"]


def line(heads, copies=0, **used):
    """Bundles of one head and of the rest, in a step of four blocks and eight heads."""
    capacity = {"MXU": 4, "XLU": 2, "VALU": 4}
    used = {"MXU": 0, "XLU": 0, "VALU": 0} | used
    bundles = {"copies": copies, "queries": 32 * 4, "heads": 8 * heads}
    return {"chip": "v5e", "head_dim": 128, "page": 128, "capacity": capacity, "used": used} | bundles


def test_the_limit_is_named():
    slow, fast, scattered = (
        tpu_cost.expected(x) for x in (line(400, VALU=400, XLU=600), line(40, VALU=100), line(40, copies=8000))
    )
    assert slow.limit == "chain of products, XLU 75 % full"
    assert slow.schedule == 100 + 1
    assert slow.share == pytest.approx(slow.memory / 101)
    assert (fast.limit, fast.share) == ("HBM", 1)
    assert scattered.limit == "scalar unit, starting copies"


def test_the_schedule_is_found_in_the_dumps(tmp_path):
    """A loop over steps with one of copies, one of queries, and one over heads that holds a bundle from outside."""
    depths = [0, 1, 1, 1, 2, 3, 3, 2, 2, 2, 3, 2, 2, 2, 3, 2, 0, 3, 3, 1, 1, 1, 2]
    loops = [1, 4, 5, 10, 14, 22]
    bundles = [f"0x{i:x} {'LB' if i in loops else '  '}: {'>' * depth} {{}}" for i, depth in enumerate(depths)]
    units = {5: (0, 0), 10: (3, 1), 14: (1, 4), 17: (5, 4), 22: (9, 2)}
    (tmp_path / "1-oscar_attend.1-72-final_bundles.txt").write_text("\n".join(["legend", *bundles]))
    rows = [f"{units.get(i, (0, 0))[0]} {units.get(i, (0, 0))[1]}" for i in range(len(depths))]
    name = "1-oscar_attend.1-70-final_hlo-static-per-bundle-utilization.txt"
    (tmp_path / name).write_text("\n".join(["== CAPACITY:", "MXU, VALU", "  4  2", "== UTILIZATION:", *rows]))
    found = tpu_bundles.schedule(tmp_path)
    assert found.used == {"MXU": 6, "VALU": 8}
    assert (found.heads, found.queries, found.copies) == (8 * 5, 8 * 1, 4 * 2 + 15 - 2 - 1 - 5)


@pytest.mark.parametrize(
    ("depths", "end"),
    [([3, 2, 2, 3, 1, 1, 1, 1], 4), ([3, 3, 2, 2, 2, 3, 1, 1, 1], 2), ([3, 3, 2, 2, 2, 3, 3, 3, 3, 1, 1, 1], 9)],
)
def test_bundles_from_outside_do_not_end_a_loop(depths, end):
    lines = [f"0x{i:x} {'  ' if i else 'LB'}: {'>' * depth} {{}}" for i, depth in enumerate(depths)]
    marks = [match for match in map(tpu_bundles._BUNDLE.match, lines) if match]
    assert tpu_bundles._end(marks, 0) == end
