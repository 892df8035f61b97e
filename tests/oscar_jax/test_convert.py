"""`convert` brings rotation files in and out of artifacts without changing a bit."""

import json

import numpy as np
import pytest

from calib import artifact, rotation_zoo
from calib.identity import ModelIdentity
from oscar_jax import cli, convert, models
from tests.calib.test_rotation_zoo import QWEN3, real, rotation_file
from tests.pallas_kernels import codes as seeded

VALUES = "sst_r_h_pbr"  # objective of the reference's value files
IDENTITY = ModelIdentity("tiny", "llama", "c" * 64, "7" * 64)


@pytest.fixture
def files(tmp_path):
    """A function that writes a pair of files and gives their paths."""

    def write(key, value):
        paths = tmp_path / "k.pt", tmp_path / "v.pt"
        for path, file in zip(paths, (key, value), strict=True):
            rotation_zoo.write(path, file)
        return [str(path) for path in paths]

    return write


def test_real_files_round_trip_bit_equal(tmp_path):
    paths = [real(path) for path in QWEN3]
    codes, manifest = convert.import_rotations(*paths, out=tmp_path / "a", shape=(36, 8, 128), identity=IDENTITY)
    assert (codes.layers, codes.kv_heads, codes.head_dim) == (36, 8, 128)
    assert manifest.recipe == "qqt_r_h_pbr+sst_r_h_pbr"
    assert convert.export_rotations(tmp_path / "a", out=tmp_path / "out") == (0.96, 0.92)
    for path, name in zip(paths, (convert.KEY_FILE, convert.VALUE_FILE), strict=True):
        original, again = rotation_zoo.read(path), rotation_zoo.read(tmp_path / "out" / name)
        assert (again.format_version, list(again.layers)) == (1, list(original.layers))
        for layer, entry in original.layers.items():
            np.testing.assert_array_equal(again.layers[layer].rotation, entry.rotation, strict=True)


@pytest.mark.parametrize("as_json", [False, True])
def test_command_imports_and_exports_rotations_by_head(as_json, files, tmp_path, capsys):
    key, value = rotation_file(heads=2), rotation_file(heads=2, seed=1, objective=VALUES)
    flags = ["--json"] if as_json else []
    stored, out = str(tmp_path / "a"), str(tmp_path / "out")
    assert cli.main(["convert", "import", *files(key, value), "--out", stored, *flags]) == 0
    printed = capsys.readouterr().out.splitlines()[-1]
    if as_json:
        assert json.loads(printed) == {
            "artifact": stored,
            "recipe": "qqt_r_h_pbr+sst_r_h_pbr",
            "layers": 3,
            "kv_heads": 2,
            "head_dim": 16,
            "clip": [0.96, 0.92],
        }
    else:
        assert printed == f"{stored}: 3 layers, 2 KV heads of size 16, clip [0.96, 0.92]"
    assert cli.main(["convert", "export", stored, "--out", out, *flags]) == 0
    printed = capsys.readouterr().out.splitlines()[-1]
    assert (
        (json.loads(printed)["clip"] == [0.96, 0.92]) if as_json else ("clip ratios 0.96 (K) and 0.92 (V)" in printed)
    )
    for original, name in ((key, convert.KEY_FILE), (value, convert.VALUE_FILE)):
        again = rotation_zoo.read(tmp_path / "out" / name)
        assert (again.format_version, again.objective) == (2, original.objective)
        for layer, entry in original.layers.items():
            np.testing.assert_array_equal(again.layers[layer].rotation, entry.rotation, strict=True)


def test_the_named_model_gives_heads_and_identity(files, tmp_path, monkeypatch, capsys):
    model = models.random_model(models.tiny_config(layers=3, kv_heads=2, head_dim=16))
    monkeypatch.setattr(models, "load", lambda source: model if source == "somewhere" else None)
    arguments = [
        "convert",
        "import",
        *files(rotation_file(), rotation_file(objective=VALUES)),
        "--out",
        str(tmp_path / "a"),
    ]
    assert cli.main([*arguments, "--model", "somewhere"]) == 0
    identity = ModelIdentity(**vars(model.identity))
    codes, manifest = artifact.load(tmp_path / "a", model=identity)
    assert codes.kv_heads == 2
    assert manifest.model == identity
    capsys.readouterr()
    assert cli.main([*arguments]) == 2
    assert "the number of KV heads is unknown; name the model with --model" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((3, 2, 32), r"rotations of head size 16, the model has 32"),
        ((4, 2, 16), r"has 3 layers up to 2, the model has layers 0 to 3"),
        ((3, 4, 16), r"rotations of 2 heads, the model has kv_heads=4"),
    ],
)
def test_files_of_another_model_are_refused(shape, message, files, tmp_path):
    with pytest.raises(ValueError, match=message):
        convert.import_rotations(
            *files(rotation_file(heads=2), rotation_file(heads=2, objective=VALUES)), out=tmp_path / "a", shape=shape
        )
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize(("key", "value", "side"), [(VALUES, VALUES, "key"), ("qqt_r_h_pbr", "qqt_r_h_pbr", "value")])
def test_swapped_files_are_refused(key, value, side, files, tmp_path):
    pair = files(rotation_file(heads=2, objective=key), rotation_file(heads=2, objective=value))
    with pytest.raises(ValueError, match=rf"/{side[0]}\.pt: objective .* is not of the {side} side"):
        convert.import_rotations(*pair, out=tmp_path / "a")
    assert not (tmp_path / "a").exists()


def test_exported_files_know_their_sides(tmp_path):
    """Of codes calibrated here, whose recipe has one name; what was imported keeps its objectives."""
    codes = seeded.transform_codes("rotation-rank", "rotation-rank", bucket=None)
    artifact.save(tmp_path / "a", codes, artifact.Manifest("oscar-head"))
    paths = [tmp_path / "out" / name for name in (convert.KEY_FILE, convert.VALUE_FILE)]
    objectives = ["oscar-head-key", "oscar-head-value"]
    for source in ("a", "b"):
        convert.export_rotations(tmp_path / source, out=tmp_path / "out")
        assert [rotation_zoo.read(path).objective for path in paths] == objectives
        with pytest.raises(ValueError, match=r"v_rotation\.pt: objective 'oscar-head-value' is not of the key side"):
            convert.import_rotations(*reversed(paths), out=tmp_path / "swapped")
        convert.import_rotations(*paths, out=tmp_path / "b")
    with pytest.raises(ValueError, match=r"k_rotation\.pt: objective 'oscar-head-key' is not of the value side"):
        convert.import_rotations(paths[0], paths[0], out=tmp_path / "swapped")


def test_a_folder_of_something_else_is_refused_before_a_model_is_read(files, tmp_path, capsys):
    (tmp_path / "ud" / "2023").mkdir(parents=True)
    (tmp_path / "ud" / "2023" / "thesis.txt").write_text("mine")
    pair = files(rotation_file(heads=2), rotation_file(heads=2, objective=VALUES))
    assert cli.main(["convert", "import", *pair, "--model", "/nowhere", "--out", str(tmp_path / "ud")]) == 2
    assert "the folder holds '2023', which is not an artifact's; choose a new" in capsys.readouterr().err
    assert (tmp_path / "ud" / "2023" / "thesis.txt").read_text() == "mine"


def test_layers_of_a_hybrid_model_keep_their_numbers(files, tmp_path):
    file = rotation_file(heads=2, layers=2)
    file = rotation_zoo.RotationFile(2, "o", "per_kv_head", {3: file.layers[0], 7: file.layers[1]})
    _, manifest = convert.import_rotations(*files(file, file), out=tmp_path / "a")
    assert manifest.layer_ids == (3, 7)
    convert.export_rotations(tmp_path / "a", out=tmp_path / "out")
    assert list(rotation_zoo.read(tmp_path / "out" / convert.KEY_FILE).layers) == [3, 7]


def test_only_rotations_are_exported(tmp_path, capsys):
    artifact.save(tmp_path / "a", seeded.transform_codes(), artifact.Manifest("default"))
    assert cli.main(["convert", "export", str(tmp_path / "a"), "--out", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert "the key code has kind 'levels'" in error
    assert "export codes of the recipes hadamard" in error
    assert not (tmp_path / "out").exists()


def test_a_file_that_is_not_one_is_one_sentence(tmp_path, capsys):
    (tmp_path / "k.pt").write_bytes(b"cos\nsystem\n(S'true'\ntR.")
    arguments = [str(tmp_path / "k.pt")] * 2
    assert cli.main(["convert", "import", *arguments, "--out", str(tmp_path / "a")]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"oscar-jax: error: {tmp_path}/k.pt: not an intact torch zip archive")
    assert error.count("\n") == 1
