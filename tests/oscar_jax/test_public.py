"""The public names of the package."""

import subprocess
import sys
from importlib.metadata import requires, version
from importlib.util import find_spec

import pytest
from packaging.requirements import Requirement

import oscar_jax


def test_every_public_name_is_importable_and_there_are_few():
    assert sorted(oscar_jax._SOURCES) == sorted(oscar_jax.__all__)
    assert len(oscar_jax.__all__) < 25
    for name in oscar_jax.__all__:
        assert getattr(oscar_jax, name).__doc__
        assert find_spec(f"oscar_jax.{name}") is None  # once imported, such a module would hide what is public


def test_unknown_names_are_refused():
    with pytest.raises(AttributeError, match="no attribute 'rotate_everything'"):
        _ = oscar_jax.rotate_everything


def test_importing_the_package_asks_for_no_device():
    code = "import sys, oscar_jax, pallas_kernels, calib; assert 'jax' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_fault_r9_the_libraries_that_the_tests_ran_with_are_those_promised():
    """The CI script runs all tests in two environments; this fails where one has a version out of the range."""
    promised = [Requirement(each) for each in requires("oscar-jax") or ()]
    promised = [each for each in promised if each.marker is None or each.marker.evaluate({"extra": ""})]
    assert {"jax", "jaxlib", "flax", "orbax-checkpoint"} <= {each.name for each in promised}
    for each in promised:
        assert each.specifier.contains(version(each.name)), each
    for name in ("jax", "jaxlib"):
        [bounds] = [each.specifier for each in promised if each.name == name]
        assert {bound.operator for bound in bounds} == {">=", "<"}  # a jax that nobody ran is not installed
