"""Calibration of a model on a text, and its command."""

import copy
import dataclasses
import errno
import json
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from tokenizers import processors
from transformers import PreTrainedTokenizerFast

from calib import artifact, fit, moments
from calib.fit import BucketCoverageWarning, ThinStatisticsWarning
from oscar_jax import calibrate as calibration
from oscar_jax import cli, corpus, models
from pallas_kernels import codec
from pallas_kernels.rope import Rotary
from pallas_kernels.tiers import Tiers
from pallas_kernels.transform_code import bits_per_element
from tests import tiny_model

RECIPES = ["naive", "oscar-reference", "default"]
pytestmark = [
    pytest.mark.usefixtures("unoptimized"),
    # Tests calibrate on little text; that the warnings come is a test of its own.
    pytest.mark.filterwarnings("ignore::calib.fit.ThinStatisticsWarning"),
    pytest.mark.filterwarnings("ignore::calib.fit.BucketCoverageWarning"),
]


def source(tiny_text, model, tokens=1200):
    return corpus.calibration_text(calibration.encoder(model), tokens, files=[tiny_text / "calibration.txt"])


@pytest.fixture(scope="module")
def fitted(tiny, tiny_text):
    with pytest.warns((ThinStatisticsWarning, BucketCoverageWarning)):
        return calibration.calibrate(tiny, source(tiny_text, tiny), RECIPES, sequence=400, bucket=256, progress=False)


def test_recipes_share_passes_and_say_where_they_come_from(fitted, tiny, tiny_text):
    assert list(fitted) == RECIPES
    codes, manifest = fitted["default"]
    assert (codes.bucket, codes.rotary) == (256, tiny.config.rotary)
    assert manifest.model == tiny.identity
    assert manifest.text == source(tiny_text, tiny).identity
    assert manifest.value_metric == "output-projection"
    assert (manifest.statistics_sink, manifest.statistics_recent) == (16, 64)
    assert manifest.max_position == tiny.config.max_position
    assert manifest.covered_positions == 256
    assert fitted["naive"].codes.bucket is None
    alone = calibration.calibrate(tiny, source(tiny_text, tiny), ["default"], sequence=400, bucket=256, progress=False)
    np.testing.assert_array_equal(alone["default"].codes.key.encode, codes.key.encode)
    assert alone["default"].manifest.rounding == manifest.rounding


def test_what_rounding_costs_is_near_that_of_real_rows(fitted, tiny, tiny_text):
    """Rows of other text, all alike and without their positions' share of rotation: so only near."""
    assert fitted["naive"].manifest.rounding is None
    tokens = corpus.calibration_text(calibration.encoder(tiny), 256, files=[tiny_text / "heldout.txt"]).tokens
    q, k, v = (np.asarray(x[:, 0], np.float64) for x in calibration._capture(tiny.decoder, jnp.asarray(tokens[None])))
    codes, manifest = fitted["oscar-reference"]
    assert manifest.rounding is not None
    for name, rows, metric in (
        ("key", k, np.einsum("ltkgd,ltkge->lkde", *[q.reshape(2, 256, 2, 2, 16)] * 2)),
        ("value", v, np.asarray(tiny.decoder.value_metric(), np.float64)),
    ):
        for layer in range(2):
            code, x = getattr(codes, name).layer(layer), rows[layer]
            left = np.asarray(codec.decode(code, codec.encode(code, jnp.asarray(x, jnp.float32))), np.float64) - x
            lost, whole = (np.einsum("tkd,kde,tke->k", y, metric[layer], y) for y in (left, x - x.mean(0)))
            np.testing.assert_allclose(getattr(manifest.rounding, name)[layer], lost / whole, rtol=0.3)


def test_running_the_model_twice_equals_keeping_its_activations(fitted, tiny, tiny_text, monkeypatch):
    monkeypatch.setattr(calibration, "KEPT_BYTES", 0)
    again = calibration.calibrate(
        tiny, source(tiny_text, tiny), ["oscar-reference"], sequence=400, bucket=256, progress=False
    )
    for side in ("key", "value"):
        old = getattr(fitted["oscar-reference"].codes, side)
        np.testing.assert_array_equal(getattr(again["oscar-reference"].codes, side).encode, old.encode)


def test_a_rest_of_the_text_is_used_and_padding_is_not():
    rows, lengths = calibration._sequences(np.arange(1, 1101, dtype=np.int32), 400)
    assert rows.shape == (3, 400)
    assert lengths.tolist() == [400, 400, 300]
    assert rows[2, 300:].sum() == 0
    rows, lengths = calibration._sequences(np.arange(1, 851, dtype=np.int32), 400)
    assert rows.shape == (2, 400)  # 50 tokens hold no history pair
    assert lengths.tolist() == [400, 400]


def test_sequences_begin_as_the_tokenizer_begins_every_text(tiny):
    rows, lengths = calibration._sequences(np.arange(1, 1101, dtype=np.int32), 400, [7])
    assert rows.shape == (3, 400)
    assert rows[:, :2].tolist() == [[7, 1], [7, 400], [7, 799]]
    assert lengths.tolist() == [400, 400, 303]
    assert calibration.opening(tiny) == []
    with_start = PreTrainedTokenizerFast(
        tokenizer_object=copy.deepcopy(tiny.tokenizer.backend_tokenizer), bos_token="!"
    )
    mark = with_start.bos_token_id
    with_start.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="! $A", special_tokens=[("!", mark)]
    )
    assert calibration.opening(dataclasses.replace(tiny, tokenizer=with_start)) == [mark]


@pytest.mark.parametrize(
    ("tokens", "options", "message"),
    [
        (60, {}, r"text \(60 tokens of .*\): has 60 of the 81 tokens"),
        (500, {"sequence": 501}, "shorter than one sequence of 501"),
        (1000, {"sequence": 900}, "context is 768 tokens"),
        (500, {"sequence": 50}, "at least 81"),
        (500, {"max_position": 16}, "max_position=16: expected more than the 16 sinks"),
        (500, {"recipes": ["oscar-deluxe"]}, "oscar-deluxe"),
    ],
)
def test_requests_that_cannot_be_met_are_one_sentence(tiny, tiny_text, tokens, options, message):
    options = {"recipes": ["default"]} | options
    with pytest.raises(ValueError, match=message) as error:
        calibration.calibrate(tiny, source(tiny_text, tiny, tokens), progress=False, **options)
    assert "\n" not in str(error.value)


@pytest.fixture
def never_run(monkeypatch):
    def capture(*arguments):
        raise AssertionError("the model ran")

    monkeypatch.setattr(calibration, "_capture", capture)


def test_a_head_size_that_no_cache_takes_is_refused_before_the_model_runs(tiny_text, tmp_path, never_run):
    model = models.load(tiny_model.write(tmp_path, head_dim=20))
    with pytest.raises(ValueError, match="head_dim=20: expected a multiple of 8"):
        calibration.calibrate(model, source(tiny_text, model), ["default"], progress=False)


def test_averaged_codes_say_what_positions_they_are_for(tiny, tiny_text):
    found = calibration.calibrate(
        tiny, source(tiny_text, tiny), ["default-averaged", "naive"], sequence=400, bucket=256, progress=False
    )
    codes, manifest = found["default-averaged"]
    assert (codes.bucket, codes.rotary) == (None, None)
    assert (manifest.max_position, manifest.covered_positions, manifest.rotary) == (768, 256, tiny.config.rotary)
    absolute = found["naive"].manifest
    assert (absolute.max_position, absolute.covered_positions, absolute.rotary) == (None, None, None)


def test_layers_that_rotate_by_themselves_are_measured_by_themselves(tiny_text):
    """Windows of the text's length change nothing, so layers must come out as they do alone."""
    sizes: dict[str, Any] = {"vocab_size": 257, "layers": 4, "max_position": 512}
    local, shared = Rotary.standard(16, 100.0), Rotary.standard(16, 1e4)
    mixed = models.tiny_config(**sizes, rotary=shared, local_rotary=local, windows=(512, None, None, 512))
    text = corpus.TokenText.of(np.random.default_rng(0).integers(0, 257, 300), "random tokens")
    options: dict[str, Any] = {"sequence": 300, "bucket": 128, "progress": False}
    model = models.random_model(mixed)
    codes, manifest = calibration.calibrate(model, text, ["default-averaged"], **options)["default-averaged"]
    assert codes.layers == 4
    captured, of_windows = calibration._capture(model.decoder, jnp.asarray(text.tokens[None])), np.array([0, 3])
    alone = moments.init(
        "default-averaged", layers=2, kv_heads=2, q_heads=4, head_dim=16, bucket=128,
        value_metric=model.decoder.value_metric()[of_windows],
    )  # fmt: skip
    own = (x[of_windows] for x in captured)
    alone = moments.accumulate(alone, *own, positions=np.arange(300), lengths=np.array([300]), rope=local)
    expected = fit.fit(alone, "default-averaged", rope=local, max_position=512)
    np.testing.assert_allclose(codes.key.encode[of_windows], expected.key.encode, rtol=1e-4, atol=1e-4)
    assert np.abs(codes.key.encode[1:3] - expected.key.encode).max() > 0.1
    np.testing.assert_array_equal(codes.value.bits[of_windows], expected.value.bits)
    errors = fit.rounding_errors(alone, "default-averaged", expected, rope=local, max_position=512)
    assert manifest.rounding is not None
    np.testing.assert_allclose(np.asarray(manifest.rounding.key)[of_windows], errors["key"], rtol=1e-3)
    np.testing.assert_allclose(np.asarray(manifest.rounding.value)[of_windows], errors["value"], rtol=1e-3)
    with pytest.raises(NotImplementedError, match="turns the keys of all layers alike"):
        calibration.calibrate(model, text, ["default"], **options)


def run(*arguments):
    return cli.main([str(argument) for argument in arguments])


def test_the_command_writes_one_artifact_a_recipe(tiny, tiny_folder, tiny_text, tmp_path, capsys):
    arguments = ["--text", tiny_text / "calibration.txt", "--tokens", 800, "--sequence", 400, "--bucket", 256, "--json"]
    assert run("calibrate", "--model", tiny_folder, "--recipe", "naive,default", "--out", tmp_path, *arguments) == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert report["tokens"] == 800
    for name, path in report["artifacts"].items():
        codes, manifest = artifact.load(path, model=tiny.identity)
        assert manifest.sequence == (None if manifest.text is None else 400)
        assert manifest.recipe == name
        bits = report["bits_per_element"][name]
        assert bits == {str(n): bits_per_element(codes, Tiers(), n) for n in (2048, 8192, 32768)}


def test_a_recipe_of_ones_own_is_a_file(tiny_folder, tiny_text, tmp_path):
    recipe = tmp_path / "mine.toml"
    recipe.write_text('name = "mine"\nsummary = "clipped harder"\nbase = "hadamard-clip"\n[key]\nclip_ratio = 0.8\n')
    text = ["--text", tiny_text / "calibration.txt", "--tokens", 200]
    assert run("calibrate", "--model", tiny_folder, "--recipe", recipe, "--out", tmp_path / "out", *text) == 0
    codes, manifest = artifact.load(tmp_path / "out")
    assert manifest.recipe == "mine"
    assert (codes.key.clip_ratio, codes.value.clip_ratio) == (0.8, 0.92)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "/nowhere/model"], "/nowhere/model"),
        (["--text", "{empty}"], "is empty"),
        (["--text", "/nowhere/text"], "does not exist"),
        (["--recipe", "oscar-deluxe"], "oscar-deluxe"),
        (["--bucket", "100"], "bucket=100: expected a multiple of the cache's page, 128 tokens; the nearest is 128"),
        (["--max-position", "16"], "max_position=16: expected more than the 16 sinks"),
        (["--out", "{empty}"], "empty is a file; expected a folder"),
        (["--out", "{empty}/below"], "empty is a file; expected a folder"),
    ],
)
@pytest.mark.usefixtures("never_run")
def test_bad_input_is_one_sentence_and_writes_nothing(tiny_folder, tiny_text, tmp_path, capsys, arguments, message):
    (tmp_path / "empty").write_text("  \n")
    arguments = [argument.replace("{empty}", str(tmp_path / "empty")) for argument in arguments]
    defaults = ["--model", tiny_folder, "--text", tiny_text / "calibration.txt"]
    if arguments[0] in ("--model", "--text"):
        at = defaults.index(arguments[0])
        del defaults[at : at + 2]
    assert run("calibrate", "--out", tmp_path / "out", *defaults, *arguments) == 2
    error = capsys.readouterr().err
    assert error.count("oscar-jax: error:") == 1
    assert message in error
    assert not (tmp_path / "out").exists()


def test_an_unwritable_place_is_found_before_anything_runs(tmp_path, capsys, monkeypatch):
    def refuse(dir):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(tempfile, "TemporaryFile", refuse)  # root may write anywhere
    assert run("calibrate", "--model", "/nowhere", "--out", tmp_path / "new" / "out") == 1
    assert f"{tmp_path} is not writable (Permission denied); choose another place" in capsys.readouterr().err


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="no /proc, where even root makes no files")
def test_a_place_that_only_seems_writable_is_found_before_anything_runs(capsys):
    assert run("calibrate", "--model", "/nowhere", "--out", "/proc/x") == 1
    assert "/proc is not writable" in capsys.readouterr().err


def test_a_folder_of_something_else_is_found_before_anything_runs(tmp_path, capsys):
    for folder in (tmp_path / "2023", tmp_path / "naive" / "3"):
        folder.mkdir(parents=True)
        (folder / "thesis.txt").write_text("mine")
    for recipes, folder, held in (("naive", tmp_path, "2023"), ("default,naive", tmp_path / "naive", "3")):
        assert run("calibrate", "--model", "/nowhere", "--recipes", recipes, "--out", tmp_path) == 2
        assert f"artifact {folder}: the folder holds '{held}'" in capsys.readouterr().err
    assert len(list(tmp_path.rglob("thesis.txt"))) == 2


def killed(command, after):
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        process.wait(timeout=after)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGKILL)
        process.wait()


@pytest.mark.slow
def test_killing_calibrate_leaves_the_old_artifact_or_the_new_one(tiny, tiny_folder, tiny_text, tmp_path):
    """At random moments of the whole run; tests/calib/test_artifact.py kills the write itself again and again."""
    out = tmp_path / "artifact"
    command = [
        *(sys.executable, "-m", "oscar_jax.cli", "calibrate", "--model", str(tiny_folder), "--out", str(out)),
        *("--text", str(tiny_text / "calibration.txt"), "--tokens", "800", "--sequence", "400", "--bucket", "256"),
    ]
    begin = time.perf_counter()
    killed(command, 1.0)
    assert not out.exists() or not any(out.glob("[0-9]*"))
    subprocess.run(command, check=True)
    duration = time.perf_counter() - begin
    written = artifact.read_manifest(out)
    moments = random.Random(0)
    for _ in range(6):
        killed(command, duration * moments.uniform(0.3, 1.1))
        _, found = artifact.load(out, model=tiny.identity)
        assert found.codes == written.codes
    subprocess.run(command, check=True)
    assert artifact.load(out)[1].codes == written.codes


def test_two_recipes_of_one_name_are_refused(tmp_path):
    for name in "ab":
        (tmp_path / f"{name}.toml").write_text('name = "mine"\nbase = "default"\n')
    files = [str(tmp_path / "a.toml"), str(tmp_path / "b.toml")]
    assert [recipe.name for recipe in calibration.get_recipes(["naive", files[0]])] == ["naive", "mine"]
    with pytest.raises(ValueError, match=r"a\.toml' and .*b\.toml' are both named 'mine'; rename one"):
        calibration.get_recipes(files)
