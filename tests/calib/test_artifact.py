"""Artifacts: round trips on any number of devices, refusals, and what a kill or a full disk leaves."""

import dataclasses
import logging
import os
import random
import re
import signal
import subprocess
import sys
import time
import types
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from calib import artifact
from calib.identity import ModelIdentity
from calib.manifest import SIDES, Manifest
from tests.calib.artifacts import MANIFEST, MODEL, ROOT, assert_same_codes, codes, in_child, rewrite, steps


@pytest.mark.parametrize(
    ("key", "value", "changes"),
    [
        ("levels", "levels-uniform", {}),
        ("levels", "feedback", {"slots": 24, "bucket": None}),
        ("rotation-rank", "rotation-static", {"bucket": None}),
        ("naive", "naive", {"bucket": None, "kv_heads": 1, "layers": 1}),
    ],
)
def test_round_trip_is_bit_equal(key, value, changes, tmp_path):
    wanted = codes(key, value, **changes)
    saved = artifact.save(tmp_path / "a", wanted, MANIFEST)
    got, manifest = artifact.load(tmp_path / "a", model=MODEL)
    assert_same_codes(got, wanted)
    assert manifest == saved == artifact.read_manifest(tmp_path / "a")
    assert dataclasses.replace(manifest, codes=None, created="", packages={}) == MANIFEST
    assert isinstance(got.key.mu, jax.Array)


def test_saving_again_replaces(stored):
    other = codes(seed=5)
    artifact.save(stored, other, dataclasses.replace(MANIFEST, recipe="other"))
    got, manifest = artifact.load(stored)
    assert_same_codes(got, other)
    assert (manifest.recipe, steps(stored)) == ("other", ["1"])


def test_fault_r4_other_number_of_devices(tmp_path):
    """Saved under a mesh of 8 devices; restored in processes that have 1 and 2."""
    mesh = jax.make_mesh((8,), ("heads",), axis_types=(jax.sharding.AxisType.Auto,))
    whole = codes(kv_heads=8)
    placed = jax.device_put(whole, NamedSharding(mesh, PartitionSpec(None, "heads")))
    assert len(placed.key.mu.sharding.device_set) == 8
    saved = artifact.save(tmp_path / "a", placed, MANIFEST)
    script = """
import sys, jax, numpy as np
from calib import artifact
codes, manifest = artifact.load(sys.argv[1])
assert jax.device_count() == int(sys.argv[2])
for leaf in jax.tree.leaves(codes):
    assert leaf.sharding.device_set == {jax.devices()[0]}, leaf.sharding
print(manifest.codes.key.arrays["encode"].sha256, artifact._sha256(np.asarray(codes.key.encode)))
"""
    for devices in (1, 2):
        done = in_child(script, tmp_path / "a", devices, devices=devices)
        assert done.returncode == 0, done.stderr
        assert saved.codes is not None
        assert done.stdout.split() == [saved.codes.key.arrays["encode"].sha256] * 2


def test_fault_r5_asked_sharding_is_obeyed(tmp_path):
    """Saved under one sharding, restored under another, under one by leaf, and on the default device."""
    mesh = jax.make_mesh((4, 2), ("layers", "heads"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    whole = codes()
    by_head, by_layer, everywhere = (
        NamedSharding(mesh, PartitionSpec(*axes)) for axes in ((None, "heads"), ("layers",), ())
    )
    artifact.save(tmp_path / "a", jax.device_put(whole, by_head), MANIFEST)
    got, _ = artifact.load(tmp_path / "a", sharding=by_layer)
    for leaf in jax.tree.leaves(got):
        assert leaf.sharding == by_layer
    assert_same_codes(got, whole)
    asked = []

    def place(name):
        asked.append(name)
        return {"key/mu": by_head, "key/encode": None}.get(name, everywhere)

    got, _ = artifact.load(tmp_path / "a", sharding=place)
    assert got.key.mu.sharding == by_head
    assert got.key.encode.sharding.device_set == {jax.devices()[0]}
    assert got.value.decode.sharding == everywhere
    assert len(asked) == len(set(asked)) == len(jax.tree.leaves(whole))
    got, _ = artifact.load(tmp_path / "a")
    assert {device for leaf in jax.tree.leaves(got) for device in leaf.sharding.device_set} == {jax.devices()[0]}


def test_a_sharding_that_does_not_fit_is_one_sentence(tmp_path):
    artifact.save(tmp_path / "a", codes(layers=3), MANIFEST)
    mesh = jax.make_mesh((8,), ("layers",), axis_types=(jax.sharding.AxisType.Auto,))
    with pytest.raises(ValueError, match=r"sharding: key/mu \[3, 2, 16\] does not fit"):
        artifact.load(tmp_path / "a", sharding=NamedSharding(mesh, PartitionSpec("layers")))


@pytest.mark.parametrize("leaf", ["delta", "weight", "gain", "encode", "decode"])
def test_fault_q14_all_zero_scales_are_refused(leaf, tmp_path):
    """Neither saved nor, had they been saved by something else, loaded."""
    good = codes()
    zero = dataclasses.replace(
        good, key=dataclasses.replace(good.key, **{leaf: np.zeros_like(getattr(good.key, leaf))})
    )
    with pytest.raises(ValueError, match="key transform code, layer 0, head 0"):
        artifact.save(tmp_path / "a", zero, MANIFEST)
    assert not (tmp_path / "a").exists()
    artifact.save(tmp_path / "a", good, MANIFEST)
    zeros = np.zeros_like(getattr(good.key, leaf))

    def seal(tree):
        tree["codes"]["key"]["arrays"][leaf]["sha256"] = artifact._sha256(zeros)

    rewrite(tmp_path / "a", seal, lambda arrays: arrays["key"].update({leaf: zeros}))
    with pytest.raises(ValueError, match=r"artifact .*/a: key transform code, layer 0, head 0"):
        artifact.load(tmp_path / "a")


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("leaf", ["mu", "encode", "decode", "weight"])
def test_codes_that_are_not_finite_are_refused(leaf, value, tmp_path):
    good = codes()
    array = np.array(getattr(good.value, leaf))
    array[2, 1, 0] = value
    bad = dataclasses.replace(good, value=dataclasses.replace(good.value, **{leaf: array}))
    with pytest.raises(ValueError, match=f"value transform code, layer 2, head 1: {leaf} has NaN or Inf"):
        artifact.save(tmp_path / "a", bad, MANIFEST)
    assert not (tmp_path / "a").exists()


def test_missing_and_empty_directories_are_named(tmp_path):
    with pytest.raises(ValueError, match=rf"artifact {tmp_path}/no: no such directory; make it with"):
        artifact.load(tmp_path / "no")
    assert not (tmp_path / "no").exists()
    (tmp_path / "empty" / "0.orbax-checkpoint-tmp").mkdir(parents=True)
    with pytest.raises(ValueError, match=rf"artifact {tmp_path}/empty: nothing complete in it"):
        artifact.load(tmp_path / "empty")


@pytest.mark.parametrize("hashes", [("d" * 64, "7" * 64), ("c" * 64, "8" * 64), ("c" * 64, None)])
def test_artifact_of_another_model_names_both(hashes, stored):
    with pytest.raises(ValueError, match=r"calibrated for tiny .*, the model is other .*calibrate this model"):
        artifact.load(stored, model=ModelIdentity("other", "llama", *hashes))


def test_name_and_architecture_of_the_model_do_not_decide(stored, tmp_path):
    artifact.load(stored, model=dataclasses.replace(MODEL, model_id="the same in another folder"))
    artifact.save(tmp_path / "b", codes(), Manifest("imported"))
    assert artifact.load(tmp_path / "b", model=MODEL)[1].model is None


def test_heads_read_apart_are_compared_with_their_own_hashes(tmp_path):
    """As processes do that see some heads only; the damage is in the second."""
    mesh = jax.make_mesh((2,), ("tensor",), devices=jax.devices()[:2], axis_types=(jax.sharding.AxisType.Auto,))

    def read(path):
        step, manifest = artifact._read_manifest(path)
        assert manifest.codes is not None
        return artifact._restore_parts(path, step, manifest.codes, NamedSharding(mesh, PartitionSpec(None, "tensor")))

    def damage(arrays):
        mu = np.array(arrays["value"]["mu"])
        mu[3, 1, 5] += 1
        arrays["value"]["mu"] = mu

    def older(tree):
        for side in SIDES:
            for record in tree["codes"][side]["arrays"].values():
                del record["heads"]

    for name in "ab":
        artifact.save(tmp_path / name, codes(), MANIFEST)
    assert_same_codes(read(tmp_path / "a"), codes())
    rewrite(tmp_path / "a", None, damage)
    with pytest.raises(ValueError, match=r"value/mu of head 1 is not as it was saved \(sha256\)"):
        read(tmp_path / "a")
    rewrite(tmp_path / "b", older, damage)
    read(tmp_path / "b")


def as_dtype(dtype):
    return lambda arrays: arrays["key"].update(mu=arrays["key"]["mu"].astype(dtype))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (as_dtype(np.float16), r"key/mu in the files is float16\[4, 2, 16\], the manifest says float32"),
        (
            lambda arrays: arrays["key"].pop("mu"),
            r"arrays \['key/mu'\] are in the files or the manifest but not in both",
        ),
        (lambda arrays: arrays["value"].update(mu=np.zeros((4, 2, 8), np.float32)), r"value/mu .* float32\[4, 2, 8\]"),
        (lambda arrays: arrays["key"].update(mu=arrays["key"]["mu"] + 1), "key/mu is not as it was saved"),
    ],
)
def test_arrays_that_disagree_are_refused(changed, message, stored):
    """A file of another dtype would be cast silently by Orbax."""
    rewrite(stored, change_arrays=changed)
    with pytest.raises(ValueError, match=f"artifact {stored}: .*{message}"):
        artifact.load(stored)


DAMAGE = """
import random, shutil, sys
from pathlib import Path
from calib import artifact
from tests.calib.artifacts import assert_same_codes
stored = Path(sys.argv[1])
wanted, manifest = artifact.load(stored)
rng = random.Random(0)
refused = 0
files = sorted(path for path in stored.rglob("*") if path.is_file() and path.stat().st_size)
for index, file in enumerate([*files, *files]):
    copy = stored.parent / f"copy{index}"
    shutil.copytree(stored, copy)
    target = copy / file.relative_to(stored)
    data = bytearray(target.read_bytes())
    data[rng.randrange(len(data))] ^= 0x55
    target.write_bytes(data)
    try:
        got = artifact.load(copy)
    except ValueError as error:
        refused += 1
        assert str(copy) in str(error) and "\\n" not in str(error), error
    else:
        assert_same_codes(got[0], wanted)
        assert got[1] == manifest
print(refused)
"""


def test_damaged_files_are_refused(stored):
    """One changed byte anywhere is a refusal or changes nothing that is loaded, and never another exception.

    In a child process, for what it says on stderr: the reads still under way when one has failed are silent.
    """
    done = in_child(DAMAGE, stored)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert int(done.stdout) >= 4


def test_a_folder_of_several_artifacts_lists_them(tmp_path):
    (tmp_path / "notes").mkdir()
    for name in ("naive", "default"):
        artifact.save(tmp_path / name, codes(), MANIFEST)
    with pytest.raises(ValueError, match=r"a folder of several; name one of them: default, naive\.$"):
        artifact.load(tmp_path)


FULL = """
import resource, signal, sys
from calib import artifact
from tests.calib.artifacts import MANIFEST, codes
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (16384, 16384))
wanted = codes(head_dim=64)
for path in sys.argv[1:] * 6:
    try:
        artifact.save(path, wanted, MANIFEST)
    except OSError as error:
        print(error)
"""


def test_a_full_disk_is_one_sentence_and_leaves_the_old(stored, tmp_path):
    """A limit on the size of files, set in a child process, fails the write itself; what fails after it is silent."""
    new = tmp_path / "new"
    done = in_child(FULL, stored, new)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    for path, line in zip([stored, new] * 6, done.stdout.splitlines(), strict=True):
        assert re.fullmatch(rf"artifact {path}: cannot be written \(File too large\); choose another path\.", line)
    assert_same_codes(artifact.load(stored)[0], codes())
    assert steps(stored) == ["0"]
    assert not new.exists()


def test_only_what_follows_orbaxs_own_error_is_silent(stored, monkeypatch, caplog):
    """And only until an artifact is read or written without one."""
    seen: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", seen.append)
    before = sys.unraisablehook
    (stored.parent / "empty").mkdir()
    with pytest.raises(ValueError, match="nothing complete in it"):
        artifact.load(stored.parent / "empty")
    with pytest.raises(ZeroDivisionError), artifact._manager(stored):
        raise ZeroDivisionError
    assert sys.unraisablehook == before
    assert not logging.getLogger("asyncio").filters
    data = next(file for file in (stored / "0" / "arrays" / "d").iterdir() if file.stat().st_size)
    content = data.read_bytes()
    data.write_bytes(bytes(len(content)))
    with pytest.raises(ValueError, match=r"arrays.* cannot be read"):
        artifact.load(stored)
    data.write_bytes(content)
    for error in (RuntimeError("Event loop is closed"), RuntimeError("Event loop"), ValueError("Event loop is closed")):
        sys.unraisablehook(types.SimpleNamespace(exc_value=error))  # type: ignore[arg-type]
    logging.getLogger("asyncio").error("Task exception was never retrieved: orbax/checkpoint")
    logging.getLogger("asyncio").error("Task unread", exc_info=(ValueError, ValueError("TensorStore: NOT_FOUND"), None))
    logging.getLogger("asyncio").error("Task exception was never retrieved: mine")
    assert [str(unraisable.exc_value) for unraisable in seen] == ["Event loop", "Event loop is closed"]
    assert caplog.messages == ["Task exception was never retrieved: mine"]
    artifact.load(stored)
    assert sys.unraisablehook == before
    assert not logging.getLogger("asyncio").filters


def test_a_path_that_cannot_be_a_directory_is_one_sentence(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(OSError, match=r"file/a: cannot be written \(Not a directory\); choose another path"):
        artifact.save(tmp_path / "file" / "a", codes(), MANIFEST)
    with pytest.raises(OSError, match="cannot be written"):
        artifact.save(tmp_path / "file", codes(), MANIFEST)
    assert (tmp_path / "file").read_text() == "x"


# Forks a process that saves without end for each line it reads, so that the imports are paid for once.
FORKS = """
import dataclasses, itertools, os, sys
from calib import artifact
from tests.calib.artifacts import MANIFEST, codes
wanted = codes()
for _ in sys.stdin:
    pid = os.fork()
    if not pid:
        for round in itertools.count(1):
            artifact.save(sys.argv[1], wanted, dataclasses.replace(MANIFEST, max_position=round))
    print(pid, flush=True)
    print(os.waitpid(pid, 0)[1], flush=True)
"""


def test_killed_at_any_moment(tmp_path):
    """Eight times a process that saves over and over is killed: what is there is complete, and saving again works."""
    path, wanted = tmp_path / "a", codes()
    rng = random.Random(0)
    found = []
    command = [sys.executable, "-c", FORKS, str(path)]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdin is not None
        assert parent.stdout is not None
        for _ in range(8):
            parent.stdin.write("\n")
            parent.stdin.flush()
            child = int(parent.stdout.readline())
            time.sleep(rng.uniform(0.1, 1.5))
            os.kill(child, signal.SIGKILL)
            assert int(parent.stdout.readline()) == signal.SIGKILL
            try:
                got, manifest = artifact.load(path)
            except ValueError as error:
                missing = str(error)
                assert not found
                assert re.search("no such directory|nothing complete", missing)
                continue
            found.append(manifest.max_position)
            assert_same_codes(got, wanted)
        parent.stdin.close()
    assert found
    artifact.save(path, wanted, MANIFEST)
    assert len(steps(path)) == 1
    assert artifact.load(path)[1].max_position == MANIFEST.max_position
