"""What may be replaced by an artifact and what is left alone, the lock, and the room it takes."""

import re
import shutil

import pytest

from calib import artifact, artifact_folder
from tests.calib.artifacts import MANIFEST, assert_same_codes, codes, in_child, snapshot, steps


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
        "0/arrays/data.txt",  # "d" is a name of theirs
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


def test_a_link_to_a_step_elsewhere_is_no_step(stored, tmp_path):
    (stored / "0").rename(tmp_path / "kept")
    (stored / "0").symlink_to(tmp_path / "kept")
    with pytest.raises(ValueError, match="holds '0', which is not an artifact's"):
        artifact.save(stored, codes(seed=5), MANIFEST)
    assert (tmp_path / "kept" / "manifest" / "metadata").is_file()


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
from calib import artifact, artifact_folder
from tests.calib.artifacts import MANIFEST, codes
for attempt in (artifact.save, lambda path, *_: artifact_folder.require_replaceable(path)):
    try:
        attempt(sys.argv[1], codes(), MANIFEST)
    except OSError as error:
        print(error)
"""
    (stored / "1.orbax-checkpoint-tmp" / "arrays").mkdir(parents=True)
    with artifact_folder.replacing(stored):
        (stored / "2").mkdir()  # a step whose manifest is not there yet
        before = snapshot(stored)
        done = in_child(script, stored)
        told = f"artifact {stored}: is being saved by another process; wait or choose another path.\n"
        assert done.stdout == 2 * told
        assert snapshot(stored) == before
        (stored / "2").rmdir()
    artifact.save(stored, codes(seed=5), MANIFEST)
    assert steps(stored) == ["1"]


def test_too_little_space_is_told_before_anything_is_written(stored, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(1 << 20, 1 << 20, 1000))
    with pytest.raises(OSError, match=r"disk full, \d+ bytes needed, 1000 free\); free some space or choose"):
        artifact.save(stored, codes(seed=5), MANIFEST)
    assert_same_codes(artifact.load(stored)[0], codes())
    with pytest.raises(OSError, match="disk full"):
        artifact.save(stored.parent / "new", codes(), MANIFEST)
    assert not (stored.parent / "new").exists()
