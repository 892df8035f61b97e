"""Attention with copies that start, and with copies that do not; run by `test_tpu_race.py`, not collected."""

import dataclasses

import pytest
from jax.experimental.pallas import tpu as pltpu

from tests.pallas_kernels.test_tpu_race import ATTENTION, attend

pytestmark = pytest.mark.tpu_race


@pytest.mark.parametrize("starts", [True, False])
def test_copies(starts, monkeypatch):
    copy = pltpu.make_async_copy

    class Copy:
        def __init__(self, *arguments):
            self.arguments = arguments

        def start(self):
            if starts:
                copy(*self.arguments).start()

        def wait(self):
            copy(*self.arguments).wait()

    monkeypatch.setattr(pltpu, "make_async_copy", Copy)
    attend(dataclasses.replace(ATTENTION, starts=(200,)))
