"""What an artifact says about itself: what is recorded, and manifests that are refused."""

import dataclasses
import json
import math
import re

import jax
import numpy as np
import pytest

from calib import artifact
from calib.manifest import Manifest
from calib.rounding import RoundingErrors
from pallas_kernels.rope import Rotary
from tests.calib.artifacts import MANIFEST, change, codes, rewrite


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


@pytest.mark.parametrize("file", ["7/", "7/mine.txt"])
def test_a_folder_that_is_no_step_is_named_and_not_taken_for_a_damaged_artifact(file, stored):
    (stored / file).parent.mkdir(exist_ok=True)
    (stored / file).mkdir() if file.endswith("/") else (stored / file).write_text("mine")
    with pytest.raises(ValueError, match=rf"artifact {stored}: '7' in it is not an artifact's; move that elsewhere\.$"):
        artifact.load(stored)


def test_a_file_is_no_artifact(tmp_path):
    (tmp_path / "a").write_text("mine")
    with pytest.raises(ValueError, match=rf"artifact {tmp_path / 'a'}: a file; expected the directory that"):
        artifact.load(tmp_path / "a")


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


ERRORS = RoundingErrors.of(*np.arange(16.0).reshape(2, 4, 2))


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
