"""The public names of the package."""

import subprocess
import sys

import pytest

import oscar_jax


def test_every_public_name_is_importable_and_there_are_few():
    assert sorted(oscar_jax._SOURCES) == sorted(oscar_jax.__all__)
    assert len(oscar_jax.__all__) < 25
    for name in oscar_jax.__all__:
        assert getattr(oscar_jax, name).__doc__


def test_unknown_names_are_refused():
    with pytest.raises(AttributeError, match="no attribute 'rotate_everything'"):
        _ = oscar_jax.rotate_everything


def test_importing_the_package_asks_for_no_device():
    code = "import sys, oscar_jax, pallas_kernels, calib; assert 'jax' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
