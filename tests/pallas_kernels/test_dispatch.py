"""Dispatch: which errors fall through, what they say, and what an import costs."""

import json
import subprocess
import sys
from types import MappingProxyType

import pytest

from pallas_kernels import dispatch


@pytest.fixture
def table(monkeypatch):
    """Two implementations of one operation, in this module; returns the setter of what each does."""
    actions = {}
    names = MappingProxyType({"fast": "", "tpu": "", "xla": ""})
    monkeypatch.setattr(dispatch, "_TABLE", MappingProxyType({"attention": names}))

    def load(operation, name):
        assert operation == "attention"
        if name == "tpu":
            raise NotImplementedError("absent")

        def run(*args, **kwargs):
            outcome = actions[name]
            if isinstance(outcome, Exception):
                raise outcome
            return outcome, args, kwargs

        return run

    monkeypatch.setattr(dispatch, "_load", load)
    return actions


def test_the_first_that_takes_the_case_runs(table):
    table.update(fast="fast", xla="xla")
    assert dispatch.call("attention", None, 1, a=2) == ("fast", (1,), {"a": 2})
    assert dispatch.call("attention", "xla")[0] == "xla"
    assert dispatch.call("attention", ("xla", "fast"))[0] == "xla"


def test_only_not_implemented_falls_through(table):
    table.update(fast=NotImplementedError("head size 80"), xla="xla")
    assert dispatch.call("attention", None)[0] == "xla"
    for error in (ValueError("wrong"), TypeError("wrong"), RuntimeError("wrong")):
        table["fast"] = error
        with pytest.raises(type(error), match="wrong"):
            dispatch.call("attention", None)


def test_every_reason_is_listed(table):
    table.update(fast=NotImplementedError("head size 80"), xla=NotImplementedError("soft-cap"))
    with pytest.raises(
        NotImplementedError, match=r"of attention takes this case \(fast: head size 80; tpu: absent; xla: soft-cap\)"
    ):
        dispatch.call("attention", None)
    with pytest.raises(NotImplementedError, match=r"\(tpu: absent; fast: head size 80\)"):
        dispatch.call("attention", ("tpu", "fast"))


def test_an_unknown_name_is_a_wrong_request():
    with pytest.raises(ValueError, match="implementation='cuda': expected one of triton, tpu, xla, or None"):
        dispatch.call("attention", "cuda")


def test_xla_is_always_available_and_the_rest_say_why_not():
    reasons = dispatch.availability()
    assert tuple(reasons) == dispatch.implementations()
    assert reasons["xla"] is None
    assert all(reason for name, reason in reasons.items() if name != "xla")


def test_fault_r10_without_the_triton_backend_of_pallas_xla_serves():
    program = (
        "import json, sys\n"
        "sys.modules['jax.experimental.pallas.triton'] = None\n"
        "import oscar_jax.step\n"
        "from pallas_kernels import dispatch\n"
        "print(json.dumps([dispatch.availability(name) for name in ('attention', 'write', 'demote')]))"
    )
    done = subprocess.run([sys.executable, "-W", "error", "-c", program], capture_output=True, text=True, check=True)
    for reasons in json.loads(done.stdout):
        assert "cannot be imported here" in reasons["triton"]
        assert reasons["xla"] is None


def test_a_module_that_cannot_be_imported_is_unavailable(monkeypatch):
    broken = MappingProxyType({"attention": MappingProxyType({"gone": "pallas_kernels.not_there:attend"})})
    monkeypatch.setattr(dispatch, "_TABLE", broken)
    assert "not_there" in (dispatch.availability()["gone"] or "")
    with pytest.raises(NotImplementedError, match="gone: cannot be imported here"):
        dispatch.call("attention", "gone")


def test_the_table_is_frozen():
    with pytest.raises(TypeError):
        dispatch._TABLE["attention"]["new"] = "x:y"  # type: ignore[index]


def test_importing_the_package_touches_no_device_and_loads_no_implementation():
    program = (
        "import json, sys, pallas_kernels, pallas_kernels.dispatch, pallas_kernels.attention, oscar_jax.cache\n"
        "from jax._src import xla_bridge\n"
        "print(json.dumps([xla_bridge.backends_are_initialized(), 'pallas_kernels.attention.xla' in sys.modules]))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == [False, False]
