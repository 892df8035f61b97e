"""`inspect` tells what is in an artifact, as text and as JSON."""

import dataclasses
import json

import numpy as np
import pytest

from calib import artifact
from calib.identity import ModelIdentity, TextIdentity
from calib.rounding import RoundingErrors
from oscar_jax import cli, inspect, inspect_plots
from pallas_kernels.tiers import Tiers
from pallas_kernels.transform_code import bits_per_element
from tests.pallas_kernels import codes as seeded

MANIFEST = artifact.Manifest(
    recipe="default",
    model=ModelIdentity("tiny-llama", "llama", "c" * 64, "7" * 64),
    text=TextIdentity("four novels", "e" * 64, 16384),
    max_position=6144,
)
ERRORS = RoundingErrors.of(
    key=np.array([[0.1, 0.2], [0.3, 0.05], [0.01, 0.02]]), value=np.array([[0.2, 0.1], [0.11, 0.12], [0.13, 0.7]])
)


@pytest.fixture
def codes():
    return seeded.transform_codes(layers=3, bucket=256)


@pytest.fixture
def stored(tmp_path, codes):
    artifact.save(tmp_path / "a", codes, MANIFEST)
    return str(tmp_path / "a")


def test_json_is_the_summary(stored, codes, capsys):
    assert cli.main(["inspect", stored, "--json"]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (found["recipe"], found["layers"], found["kv_heads"], found["head_dim"]) == ("default", 3, 2, 64)
    assert (found["key"]["kind"], found["key"]["slots"], found["key"]["row_bits"]) == ("levels", 64, 144)
    for side in ("key", "value"):
        bits, mu = np.asarray(getattr(codes, side).bits), np.asarray(getattr(codes, side).mu, np.float64)
        for index, layer in enumerate(found[side]["layers"]):
            assert layer["layer"] == index
            for name, width in (("6", 6), ("4", 4), ("2", 2), ("dropped", 0)):
                counts = [(bits[index, head] == width).sum() for head in range(2)]
                assert layer["bits"][name] == {
                    "median": np.mean(counts),
                    "least": min(counts),
                    "most": max(counts),
                }
            assert layer["mean_abs_mu"] == pytest.approx(np.abs(mu[index]).mean(), rel=1e-12)
            assert layer["max_abs_mu"] == pytest.approx(np.abs(mu[index]).max(), rel=1e-12)
    for context, bits in found["bits_per_element"].items():
        assert bits == bits_per_element(codes, Tiers(), int(context))
    assert artifact.Manifest.from_json(found["manifest"]) == artifact.read_manifest(stored)


def test_counts_differ_between_heads():
    """Median and range over heads, on bits known by hand."""
    code = seeded.transform_code("levels", kv_heads=3)
    bits = np.repeat(np.repeat(np.array([[6, 4, 2, 0]], np.int8), 16, axis=1), 3, axis=0)[None]
    bits[0, 0, :48], bits[0, 1, :16] = 2, 4
    object.__setattr__(code, "bits", bits)
    [layer] = inspect._side(code, (7,), None)["layers"]
    assert layer["layer"] == 7
    assert layer["bits"] == {
        "6": {"median": 0, "least": 0, "most": 16},
        "4": {"median": 16, "least": 0, "most": 32},
        "2": {"median": 16, "least": 16, "most": 48},
        "dropped": {"median": 16, "least": 16, "most": 16},
    }


def test_text_has_every_layer_and_the_provenance(stored, capsys):
    assert cli.main(["inspect", stored]) == 0
    text = capsys.readouterr().out
    for expected in (
        "tiny-llama (llama)",
        "four novels, 16,384 tokens",
        "3 layers, 2 KV heads of size 64",
        "bucket       256, positions up to 6144",
        "key: levels, N = 64 slots, 144 bits a row",
        "2 (2-2)",
        "at 131,072",
    ):
        assert expected in text
    lines = [line.split()[0] for line in text.splitlines() if line[:5].strip().isdigit()]
    assert lines == ["0", "1", "2"] * 2


def test_text_of_imported_rotations(tmp_path, capsys):
    codes = seeded.transform_codes("rotation-rank", "naive", layers=2)
    artifact.save(tmp_path / "a", codes, artifact.Manifest("qqt_r_h_pbr+sst_r_h_pbr", layer_ids=(3, 7)))
    assert cli.main(["inspect", str(tmp_path / "a")]) == 0
    text = capsys.readouterr().out
    assert "model        not recorded" in text
    assert "text         none" in text
    assert "key: minmax, clip rank 0.96, N = 64 slots, 160 bits a row" in text
    assert [line.split()[0] for line in text.splitlines() if line[:5].strip().isdigit()] == ["3", "7"] * 2


def test_predicted_error_is_what_rounding_unit_variance_coordinates_leaves():
    """Weights and bits known by hand: head 1 has its weight where the bits are few."""
    code = seeded.transform_code("levels", kv_heads=2)
    bits = np.repeat(np.array([6, 4, 2, 0], np.int8), 16)[None, None].repeat(2, 1)
    weight = np.repeat(np.array([[8.0, 4, 2, 0], [1, 1, 6, 0]]), 16, axis=-1)[None]
    object.__setattr__(code, "bits", bits)
    object.__setattr__(code, "weight", weight)
    good, bad = (8 * 0.00112 + 4 * 0.0118 + 2 * 0.119) / 14, (0.00112 + 0.0118 + 6 * 0.119) / 8
    predicted = inspect_plots.predicted_error(code)
    assert predicted is not None
    np.testing.assert_allclose(predicted, [[good, bad]])
    worst = inspect_plots.worst_heads(predicted, (7,))
    assert worst == [
        {"layer": 7, "head": 1, "error": pytest.approx(bad)},
        {"layer": 7, "head": 0, "error": pytest.approx(good)},
    ]


def test_codes_that_do_not_tell_coordinates_apart_predict_nothing():
    assert inspect_plots.predicted_error(seeded.transform_code("rotation-rank")) is None


def test_recorded_errors_of_both_sides_are_told_and_drawn(codes, tmp_path, capsys):
    path, plots = str(tmp_path / "a"), tmp_path / "plots"
    artifact.save(path, codes, dataclasses.replace(MANIFEST, rounding=ERRORS, layer_ids=(3, 7, 8)))
    assert cli.main(["inspect", path, "--plots", str(plots), "--json"]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    for side, first in (("key", (7, 0, 0.3)), ("value", (8, 1, 0.7))):
        assert found[side]["error_kind"] == "rounding"
        assert found[side]["errors"] == [list(layer) for layer in getattr(ERRORS, side)]
        assert found[side]["worst_heads"][0] == dict(zip(("layer", "head", "error"), first, strict=True))
        assert (plots / f"{side}-rounding-error.svg").is_file()
    assert not list(plots.glob("*predicted*"))
    assert "value: worst heads by rounding error" in (plots / "inspect.html").read_text()
    assert cli.main(["inspect", path]) == 0
    text = capsys.readouterr().out
    assert "worst heads by rounding error, layer.head: 7.0 (0.3000), 3.1 (0.2000)" in text
    assert "worst heads by rounding error, layer.head: 8.1 (0.7000), 3.0 (0.2000)" in text
    assert "No rounding errors" not in text


def test_without_recorded_errors_those_of_keys_are_predicted(stored, codes, capsys):
    assert cli.main(["inspect", stored, "--json"]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    predicted = inspect_plots.predicted_error(codes.key)
    assert predicted is not None
    assert (found["key"]["error_kind"], found["key"]["errors"]) == ("predicted", predicted.tolist())
    assert cli.main(["inspect", stored]) == 0
    assert "No rounding errors are recorded: " in capsys.readouterr().out


def test_the_spectrum_is_that_of_the_decode_rows(codes):
    """`A M = I`, so the norms can be had from M as well."""
    for code in (codes.key, codes.value):
        kept = np.asarray(code.bits[0, 0]) > 0
        encode = np.asarray(code.encode[0, 0], np.float64)[:, kept]
        found = inspect_plots.spectrum(code)[0, 0]
        np.testing.assert_array_equal(np.isnan(found), ~kept)
        if kept.all():
            np.testing.assert_allclose(found, np.linalg.norm(np.linalg.inv(encode), axis=1), rtol=1e-3)


def test_plots_are_written_with_a_page(stored, tmp_path, capsys):
    assert cli.main(["inspect", stored, "--plots", str(tmp_path / "plots"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    names = {path.name for path in (tmp_path / "plots").iterdir()}
    assert {"inspect.html", "key-bit-classes.svg", "key-spectra.svg", "value-spectra.svg"} <= names
    assert ("key-predicted-error.svg" in names) == (found["key"]["worst_heads"] is not None)
    page = (tmp_path / "plots" / "inspect.html").read_text()
    assert page.count("<svg") == len(names) - 1
    assert "<script" not in page
    assert cli.main(["inspect", stored, "--plots", __file__]) == 2
    assert f"--plots {__file__}: {__file__} is a file; expected a folder" in capsys.readouterr().err


def test_a_missing_artifact_is_one_sentence(tmp_path, capsys):
    assert cli.main(["inspect", str(tmp_path / "no")]) == 2
    assert capsys.readouterr().err.startswith(f"oscar-jax: error: artifact {tmp_path}/no: no such directory;")
