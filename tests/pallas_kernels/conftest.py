"""Tests in the TPU's interpreter run in a process each: nothing else ends a simulated wait for what never comes."""

from __future__ import annotations

import os

import pytest

from tests.pallas_kernels.tpu_races import ALONE, failure


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    if ALONE in os.environ or not pyfuncitem.get_closest_marker("tpu_race"):
        return None
    if (why := failure(pyfuncitem.nodeid)) is not None:
        pytest.fail(why, pytrace=False)
    return True
