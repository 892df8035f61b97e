"""The model's decode step with the TPU kernels, compiled whole for chips that are not there. No TPU has run it."""

import json
import os
import subprocess
import sys

import pytest

from pallas_kernels import tpu_compile


@pytest.mark.tpu_compile
@pytest.mark.slow
@pytest.mark.skipif(not tpu_compile.installed(), reason="needs libtpu")
@pytest.mark.parametrize(("chip", "tensor"), [("v6e", 1), ("v5e", 4)])
def test_a_step_of_qwen3_8b_compiles_and_its_cache_takes_the_bits_it_should(chip, tensor):
    done = subprocess.run(
        [sys.executable, "-m", "tests.oscar_jax.tpu_step", "--chip", chip, "--tensor", str(tensor)],
        capture_output=True, text=True, check=True, env=os.environ | tpu_compile.ENVIRONMENT,
    )  # fmt: skip
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["aliased"] == pytest.approx(found["cache"], rel=0.001)  # donated, every array of it, and unpadded
    assert found["bits_an_element"] == pytest.approx(found["expected_bits"], rel=0.02)
    assert found["temporary"] < 0.2 * found["cache"]  # no second pool
    # With several chips, sums of the embedding, and in a layer after attention and after the MLP; nothing else.
    assert list(found["collectives"].values()) == [3 if tensor > 1 else 0, 0, 0, 0]
