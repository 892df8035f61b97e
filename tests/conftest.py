"""Eight simulated CPU devices for every test, unless the run selects the tests of a real GPU."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

_DEVICES = "--xla_force_host_platform_device_count=8"


def _selects_gpu(config: pytest.Config) -> bool:
    return "gpu" in config.option.markexpr.replace("not gpu", "").split()


def pytest_configure(config: pytest.Config) -> None:
    # Test modules import jax and triton, which read these variables once; this hook runs before the first of them.
    if _selects_gpu(config):
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # one device, many workers
    else:
        os.environ["JAX_PLATFORMS"] = "cpu"
        os.environ["TRITON_INTERPRET"] = "1"
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_DEVICES}".strip()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if _selects_gpu(config):
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a GPU; run with -m gpu on the device"))


@pytest.fixture(scope="module")
def unoptimized() -> Iterator[None]:
    """Programs that LLVM does not optimise: for modules whose time is compilation, where codegen is not the subject."""
    import jax

    if jax.default_backend() == "gpu":  # whose code is
        yield
        return
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", before)
    jax.clear_caches()  # no other module gets these programs
