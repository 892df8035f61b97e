"""The cost model of the TPU kernels, and that the documentation has its tables."""

from pathlib import Path

import pytest

from pallas_kernels import tpu_cost
from pallas_kernels.tpu_cost import CHIPS, LAYOUTS, cost


def test_the_documentation_has_the_tables():
    text = (Path(__file__).parents[2] / "docs" / "tpu.md").read_text()
    assert tpu_cost.tables() in text


def test_memory_cycles_are_the_bytes_of_a_page():
    """Two sides of 32 bytes and a 16-bit scale a token, at 546 bytes a cycle."""
    assert cost(CHIPS["v5e"], head_dim=128).memory == pytest.approx(128 * 2 * (32 + 2) / 546)
    stored = cost(CHIPS["v5e"], head_dim=128, offsets=True)
    assert stored.memory == pytest.approx(128 * 2 * (32 + 4) / 546)


def test_the_built_layout_is_the_cheapest():
    built, *others = (cost(CHIPS["v5e"], head_dim=128, unpack=unpack).vector for unpack in LAYOUTS.values())
    assert all(built < other for other in others)


def test_the_limit_is_the_slowest_unit():
    found = cost(CHIPS["v5e"], head_dim=256)
    assert found.limit == "HBM"
    assert found.share[1] == 1
    assert cost(CHIPS["tpu7x"], head_dim=64).limit == "VPU"
    low, high = cost(CHIPS["v4"], head_dim=128).share
    assert low < high < 1
