"""The doctor reports what is there, names what is missing, and its exit code says whether anything works."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import sys
import types

import pytest

from calib import artifact
from calib.identity import ModelIdentity
from oscar_jax import doctor, download
from tests.pallas_kernels import codes as seeded


@pytest.fixture
def dispatch(monkeypatch):
    """A stand-in for the table of implementations, so that these tests do not depend on what this machine can run."""
    import pallas_kernels

    table: dict[str, str | None] = {"triton": "no NVIDIA GPU here", "xla": None, "tpu": "no TPU here"}
    module = types.ModuleType("pallas_kernels.dispatch")
    module.availability = lambda operation="attention": dict(table)  # pyright: ignore[reportAttributeAccessIssue]
    monkeypatch.setitem(sys.modules, "pallas_kernels.dispatch", module)
    monkeypatch.setattr(pallas_kernels, "dispatch", module, raising=False)
    return table


@pytest.fixture
def empty(monkeypatch, tmp_path):
    monkeypatch.setenv("OSCAR_JAX_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "work"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


@pytest.fixture
def declared(monkeypatch):
    """Replaces what the distribution asks for."""

    def replace(*requirements: str) -> None:
        monkeypatch.setattr(importlib.metadata, "requires", lambda name: list(requirements))

    return replace


def test_report_is_json_and_complete(dispatch, empty, declared):
    declared("jax>=0.10.2,<0.13", "numpy>=2.0")
    found = json.loads(json.dumps(doctor.report(empty)))
    assert found["problems"] == []
    assert found["implementations"] == {"triton": "no NVIDIA GPU here", "xla": None, "tpu": "no TPU here"}
    assert found["devices"] == [{"platform": "cpu", "kind": "cpu", "count": 8}]
    assert found["python"]["version"] == sys.version.split()[0]
    assert [package["name"] for package in found["packages"]] == ["jax", "numpy"]
    assert found["downloads"] == dict.fromkeys(download.ASSETS)


def test_wrong_version_and_missing_package_are_problems(dispatch, empty, declared):
    declared("jax>=99", "no-such-package-oscar>=1", "numpy>=2.0", "other>=1; extra == 'torch'")
    problems = doctor.report(empty)["problems"]
    assert len(problems) == 2
    assert "wanted >=99" in problems[0]
    assert "no-such-package-oscar is missing" in problems[1]


def test_broken_xla_is_a_problem_and_an_absent_gpu_is_not(dispatch, empty, declared):
    declared()
    dispatch["xla"] = "broken"
    assert doctor.report(empty)["problems"] == ["the XLA implementation, which should work anywhere, does not: broken"]


def test_what_runs_is_the_first_that_works_with_the_reasons_of_those_before(dispatch, empty, declared):
    declared()
    chosen = {"runs": "xla", "passed_over": {"triton": "no NVIDIA GPU here"}}
    names = ("decode attention", "prefill attention", "history writes", "demotion")
    assert doctor.report(empty)["operations"] == dict.fromkeys(names, chosen)
    dispatch["triton"] = None
    assert doctor.report(empty)["operations"]["demotion"] == {"runs": "triton", "passed_over": {}}
    dispatch.update(triton="gone", xla="broken")
    none = {"runs": None, "passed_over": {"triton": "gone", "xla": "broken", "tpu": "no TPU here"}}
    assert doctor.report(empty)["operations"]["history writes"] == none


def test_every_operation_is_one_that_this_machine_can_do(empty, declared):
    declared()
    found = doctor.report(empty)["operations"]
    assert all(each["runs"] for each in found.values())
    assert set(found) == {"decode attention", "prefill attention", "history writes", "demotion"}


def test_files_are_found(dispatch, empty, declared):
    declared()
    asset = download.asset("wiki-summaries")
    asset.path.parent.mkdir(parents=True)
    with asset.path.open("wb") as file:
        file.truncate(asset.bytes)
    assert doctor.report(empty)["downloads"] == {
        "smollm2-135m": None,
        "wiki-summaries": str(asset.path),
        "king-james-bible": None,
    }


def test_artifacts_are_found_and_a_broken_one_is_named(dispatch, empty, declared):
    declared()
    codes = seeded.transform_codes("naive", "naive", layers=1, head_dim=16)
    model = ModelIdentity("tiny", "llama", "c" * 64, None)
    artifact.save(empty / "one", codes, artifact.Manifest(recipe="naive", model=model))
    artifact.save(empty / "many" / "two", codes, artifact.Manifest(recipe="naive"))
    (empty / "broken" / "0" / "manifest").mkdir(parents=True)
    broken, two, one = doctor.report(empty)["artifacts"]
    assert one == {"path": str(empty / "one"), "about": "naive for tiny", "ok": True}
    assert two == {"path": str(empty / "many/two"), "about": "naive for a model not recorded", "ok": True}
    assert (broken["path"], broken["ok"]) == (str(empty / "broken"), False)
    assert str(empty / "broken") in broken["about"]


def test_text_names_every_fact(dispatch, empty, declared, capsys):
    declared("jax>=0.10.2")
    assert doctor.run(argparse.Namespace(json=False)) == 0
    text = capsys.readouterr().out
    for part in (
        "8 x cpu",
        "xla, the best that works here; not triton: no NVIDIA GPU here",
        "works here",
        "not fetched",
        "no problems found",
        "jax",
    ):
        assert part in text


def test_exit_code_tells_of_problems(dispatch, empty, declared, capsys):
    declared("jax>=99")
    assert doctor.run(argparse.Namespace(json=True)) == 1
    assert json.loads(capsys.readouterr().out)["problems"]
