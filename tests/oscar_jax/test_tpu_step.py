"""Models' decode step with the TPU kernels, compiled whole for chips that are not there. No TPU has run it."""

import json
import os
import subprocess
import sys

import pytest

from pallas_kernels import tpu_compile
from tests.oscar_jax.tpu_step import RESULTS, SETTINGS


def check(found: dict, *, tensor: int) -> None:
    assert found["aliased"] == pytest.approx(found["cache"], rel=0.001)  # donated, every array of it, and unpadded
    assert found["arguments"] == pytest.approx(found["cache"] + found["others"], rel=0.001)
    assert found["padding"] < 2
    assert found["bits_an_element"] == pytest.approx(found["expected_bits"], rel=0.02)
    assert found["temporary"] < 0.2 * found["cache"]  # no second pool
    # With several chips, sums of the embedding, and in a layer after attention and after the MLP; nothing else.
    assert list(found["collectives"].values()) == [3 if tensor > 1 else 0, 0, 0, 0]


@pytest.mark.tpu_compile
@pytest.mark.slow
@pytest.mark.skipif(not tpu_compile.installed(), reason="needs libtpu")
@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: setting.command.partition("--model ")[2])
def test_a_step_compiles_and_its_cache_takes_the_bits_it_should(setting):
    done = subprocess.run(
        [sys.executable, *setting.command.split()[1:]], capture_output=True, text=True, check=True,
        env=os.environ | tpu_compile.ENVIRONMENT,
    )  # fmt: skip
    check(json.loads(done.stdout.splitlines()[-1]), tensor=setting.tensor)


def test_the_result_that_is_committed_holds_what_is_compiled():
    rows = json.loads(RESULTS.read_text())["rows"]
    for setting, row in zip(SETTINGS, rows, strict=True):
        assert row["command"] == setting.command
        check(row, tensor=setting.tensor)
