"""Artifacts: round trips on any number of devices, refusals, and what a kill or a full disk leaves."""

import dataclasses
import json
import logging
import math
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
import types
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from calib import artifact
from calib.artifact import Manifest
from calib.identity import ModelIdentity, TextIdentity
from calib.rounding import RoundingErrors
from pallas_kernels.rope import Rotary
from tests.pallas_kernels import codes as seeded

ROOT = Path(__file__).parents[2]
MODEL = ModelIdentity("tiny", "llama", "c" * 64, "7" * 64)
MANIFEST = Manifest(
    recipe="default",
    model=MODEL,
    text=TextIdentity("novels", "e" * 64, 16384),
    value_metric="output-projection",
    statistics_sink=16,
    statistics_recent=64,
    max_position=6144,
    covered_positions=2048,
)
ERRORS = RoundingErrors.of(*np.arange(16.0).reshape(2, 4, 2))


def codes(key="levels", value="levels-uniform", **changes):
    return seeded.transform_codes(key, value, **({"layers": 4, "head_dim": 16, "bucket": 256} | changes))


def assert_same_codes(got, wanted):
    assert jax.tree.structure(got) == jax.tree.structure(wanted)
    for (path, leaf), other in zip(jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_array_equal(leaf, other, err_msg=jax.tree_util.keystr(path), strict=True)


def in_child(script, *arguments, devices=1, **options):
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
    }
    command = [sys.executable, "-W", "error", "-c", script, *map(str, arguments)]
    return subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120, check=False, **options
    )


def steps(path):
    return sorted(child.name for child in path.iterdir())


def rewrite(path, change_manifest=None, change_arrays=None):
    """A new step of the artifact with its content changed, as Orbax would store it, sealed anew."""
    _, manifest = artifact.load(path)
    arrays = {side: getattr(artifact.load(path)[0], side).arrays() for side in artifact.SIDES}
    tree = manifest.to_json()
    for change, content in ((change_manifest, tree), (change_arrays, arrays)):
        if change is not None:
            change(content)
    with artifact._manager(path) as manager:
        manager.save(
            1,
            args=ocp.args.Composite(
                arrays=ocp.args.StandardSave(arrays), manifest=ocp.args.JsonSave(artifact._sealed(tree))
            ),
        )


@pytest.fixture
def stored(tmp_path):
    artifact.save(tmp_path / "a", codes(), MANIFEST)
    return tmp_path / "a"


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


def test_manifest_records_what_is_stored(stored):
    manifest = artifact.read_manifest(stored)
    assert manifest.codes is not None
    assert manifest.packages["jax"] == jax.__version__
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00", manifest.created)
    side = manifest.codes.key
    assert (side.kind, side.clip, side.slots, manifest.codes.bucket) == ("levels", "none", 16, 256)
    assert side.arrays["mu"].shape == (4, 2, 16)
    assert side.arrays["bits"].dtype == "int8"
    assert len({record.sha256 for record in side.arrays.values()}) == len(side.arrays)


def test_rotary_parameters_come_back_exactly(tmp_path):
    awkward = tuple(float(f) for f in np.nextafter([1.0, 0.1, 1e-300, 5e-324], 2))
    wanted = dataclasses.replace(codes(), rotary=Rotary(awkward, 8, "interleaved"))
    artifact.save(tmp_path / "a", wanted, dataclasses.replace(MANIFEST, rotary=wanted.rotary))
    found, manifest = artifact.load(tmp_path / "a")
    assert found.rotary == manifest.rotary == wanted.rotary


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


def change(path, value):
    def apply(tree):
        *parents, last = path.split(".")
        for name in parents:
            tree = tree[name]
        tree[last] = value

    return apply


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (change("format_version", 2), "format_version 2 is unknown, this oscar-jax reads 1"),
        (change("surprise", 2), "the manifest is malformed"),
        (change("codes.rotary.pairing", "other"), "the manifest is malformed .*pairing"),
        (change("codes", None), "describes no codes"),
        (change("codes.key.clip", "static"), "clip 'static' does not fit the stored arrays"),
        (
            change("codes.key.arrays.mu.dtype", "bfloat16"),
            "key/mu in the files is float32.*, the manifest says bfloat16",
        ),
        (
            change("codes.value.arrays.mu.shape", [4, 2, 8]),
            r"value/mu in the files is float32\[4, 2, 16\], the manifest",
        ),
        (change("codes.key.arrays.extra", {"shape": [1], "dtype": "int8", "sha256": ""}), r"arrays \['key/extra'\]"),
        (change("codes.key.arrays.bits.sha256", "0" * 64), "key/bits is not as it was saved"),
    ],
)
def test_a_manifest_that_disagrees_is_refused(changed, message, stored):
    rewrite(stored, changed)
    with pytest.raises(ValueError, match=f"artifact {stored}: .*{message}"):
        artifact.load(stored)


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
        for side in artifact.SIDES:
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
from tests.calib.test_artifact import assert_same_codes
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


def test_a_changed_manifest_file_is_refused(stored):
    file = stored / "0" / "manifest" / "metadata"
    file.write_text(file.read_text().replace('"max_position": 6144', '"max_position": 8144'))
    with pytest.raises(ValueError, match="the manifest is not as it was saved"):
        artifact.load(stored)
    file.write_text("{")
    with pytest.raises(ValueError, match=r"unreadable manifest .*; delete the folder, then calibrate again\.$"):
        artifact.load(stored)
    with pytest.raises(ValueError, match="which is not an artifact's"):  # so calibrating again alone would not do
        artifact.save(stored, codes(), MANIFEST)


def test_a_folder_of_several_artifacts_lists_them(tmp_path):
    (tmp_path / "notes").mkdir()
    for name in ("naive", "default"):
        artifact.save(tmp_path / name, codes(), MANIFEST)
    with pytest.raises(ValueError, match=r"a folder of several; name one of them: default, naive\.$"):
        artifact.load(tmp_path)


def test_layer_ids_must_fit(tmp_path):
    with pytest.raises(ValueError, match="layer_ids has 2 ids, the codes 4 layers"):
        artifact.save(tmp_path / "a", codes(), dataclasses.replace(MANIFEST, layer_ids=(3, 7)))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (change("rounding.key", [[0.1, 0.2]]), "rounding errors of keys: expected 4 layers of 2 heads"),
        (change("rounding.value", [[0.1]] * 4), "rounding errors of values: expected 4 layers of 2 heads"),
        (change("rounding.key", [[0.1, -0.2]] * 4), "rounding errors of keys: expected finite numbers of at least 0"),
        (change("rounding.key", [[0.1, math.nan]] * 4), "of keys: expected finite numbers"),
        (change("rounding.value", [[0.1, "x"]] * 4), "of values: expected finite numbers"),
        (change("rounding.surprise", 1), "the manifest is malformed"),
        (change("rounding", 1), "the manifest is malformed"),
    ],
)
def test_rounding_errors_that_cannot_be_are_refused(changed, message, tmp_path):
    stored, manifest = tmp_path / "a", dataclasses.replace(MANIFEST, rounding=ERRORS)
    assert artifact.save(stored, codes(), manifest).rounding == artifact.read_manifest(stored).rounding == ERRORS
    rewrite(stored, changed)
    with pytest.raises(ValueError, match=f"artifact {stored}: .*{message}"):
        artifact.load(stored)


def test_rounding_errors_of_other_layers_are_not_saved(tmp_path):
    manifest = dataclasses.replace(MANIFEST, rounding=ERRORS)
    with pytest.raises(ValueError, match="rounding errors of keys: expected 3 layers of 2 heads"):
        artifact.save(tmp_path / "a", codes(layers=3), manifest)


def test_an_artifact_from_before_rounding_errors_loads(stored):
    rewrite(stored, lambda tree: tree.pop("rounding"))
    assert artifact.load(stored)[1].rounding is None


def test_manifest_survives_json():
    manifest = dataclasses.replace(MANIFEST, layer_ids=(3, 7), rounding=ERRORS)
    assert Manifest.from_json(json.loads(json.dumps(manifest.to_json()))) == manifest


def snapshot(folder):
    return {str(path.relative_to(folder)): path.is_file() and path.read_bytes() for path in folder.rglob("*")}


@pytest.mark.parametrize(
    ("files", "named"),
    [
        (["2023/thesis.txt"], "2023"),
        (["3/"], "3"),
        (["0/arrays/x", "0/manifest/metadata"], "0"),  # steps of another program
        (["7.orbax-checkpoint-tmp/state/x"], "7.orbax-checkpoint-tmp"),
        (["x.orbax-checkpoint-tmp-notes/x"], "x.orbax-checkpoint-tmp-notes"),
        (["0"], "0"),
        (["notes.txt"], "notes.txt"),
        (["slots-16/0/arrays/x"], "slots-16"),
    ],
)
def test_a_folder_of_something_else_is_refused_and_left_alone(files, named, tmp_path):
    for file in files:
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).mkdir() if file.endswith("/") else (tmp_path / file).write_text("{}")
    before = snapshot(tmp_path)
    with pytest.raises(ValueError, match=rf"artifact {tmp_path}: the folder holds '{re.escape(named)}', which is not"):
        artifact.save(tmp_path, codes(), MANIFEST)
    assert snapshot(tmp_path) == before


@pytest.mark.parametrize("beside", [False, True])
def test_a_folder_of_a_plan_is_refused_and_left_alone(beside, tmp_path):
    """Also one that an artifact is hidden in already."""
    if beside:
        artifact.save(tmp_path, codes(), MANIFEST)
    (tmp_path / "plan.json").write_text("{}")
    before = snapshot(tmp_path)
    with pytest.raises(
        ValueError, match=r"holds 'plan\.json', which would be read as a plan of layers in the artifact's"
    ):
        artifact.save(tmp_path, codes(seed=5), MANIFEST)
    assert snapshot(tmp_path) == before


@pytest.mark.parametrize(
    "file",
    [
        *("5/thesis.txt", "0/thesis.txt", "7/thesis.txt", "1.orbax-checkpoint-tmp/thesis.txt"),
        *("0/arrays/thesis.txt", "7/arrays/thesis.txt"),  # where a step has arrays
        *(
            "0/manifest/metadata",
            "7/arrays/manifest.ocdbt",
        ),  # another program's step, and what could be newer than ours
    ],
)
def test_what_is_no_step_of_an_artifact_keeps_it_from_being_replaced(file, stored):
    (stored / "0").rename(stored / "5")
    (stored / file).parent.mkdir(parents=True, exist_ok=True)
    (stored / file).write_text("mine")
    before = snapshot(stored)
    with pytest.raises(ValueError, match=rf"holds '{file.split('/')[0]}', which is not an artifact's"):
        artifact.save(stored, codes(seed=5), MANIFEST)
    assert snapshot(stored) == before


def test_what_an_interrupted_save_left_is_replaced(stored, tmp_path):
    """Beside a file and a folder of the user's, which stay."""
    (stored / "notes.txt").write_text("mine")
    (stored / "x.orbax-checkpoint-tmp-notes").mkdir()
    (stored / "x.orbax-checkpoint-tmp-notes" / "arrays").write_text("mine")
    (stored / "0").rename(stored / "2")
    (stored / "3.orbax-checkpoint-tmp" / "arrays.orbax-checkpoint-tmp").mkdir(parents=True)
    shutil.copytree(stored / "2" / "arrays", stored / "0" / "arrays")  # as the deletion of an old step leaves it
    artifact.save(stored, codes(seed=5), MANIFEST)
    assert steps(stored) == ["3", "notes.txt", "x.orbax-checkpoint-tmp-notes"]
    assert (stored / "x.orbax-checkpoint-tmp-notes" / "arrays").read_text() == "mine"
    (tmp_path / "b" / "0.orbax-checkpoint-tmp").mkdir(parents=True)
    artifact.save(tmp_path / "b", codes(), MANIFEST)
    assert steps(tmp_path / "b") == ["0"]


def test_only_one_saves_at_a_time(stored):
    """Another process is told so, and leaves alone what the first has under way."""
    script = """
import sys
from calib import artifact
from tests.calib.test_artifact import MANIFEST, codes
try:
    artifact.save(sys.argv[1], codes(), MANIFEST)
except OSError as error:
    print(error)
"""
    (stored / "1.orbax-checkpoint-tmp" / "arrays").mkdir(parents=True)
    before = snapshot(stored)
    with artifact._exclusive(stored):
        done = in_child(script, stored)
        assert done.stdout == f"artifact {stored}: is being saved by another process; wait or choose another path.\n"
        assert snapshot(stored) == before
    artifact.save(stored, codes(seed=5), MANIFEST)
    assert steps(stored) == ["1"]


FULL = """
import resource, signal, sys
from calib import artifact
from tests.calib.test_artifact import MANIFEST, codes
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
    logging.getLogger("asyncio").error("Task exception was never retrieved: mine")
    assert [str(unraisable.exc_value) for unraisable in seen] == ["Event loop", "Event loop is closed"]
    assert caplog.messages == ["Task exception was never retrieved: mine"]
    artifact.load(stored)
    assert sys.unraisablehook == before
    assert not logging.getLogger("asyncio").filters


def test_too_little_space_is_told_before_anything_is_written(stored, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(1 << 20, 1 << 20, 1000))
    with pytest.raises(OSError, match=r"disk full, \d+ bytes needed, 1000 free\); free some space or choose"):
        artifact.save(stored, codes(seed=5), MANIFEST)
    assert_same_codes(artifact.load(stored)[0], codes())
    with pytest.raises(OSError, match="disk full"):
        artifact.save(stored.parent / "new", codes(), MANIFEST)
    assert not (stored.parent / "new").exists()


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
from tests.calib.test_artifact import MANIFEST, codes
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
