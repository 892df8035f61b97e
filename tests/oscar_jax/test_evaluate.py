"""Evaluation through the real cache, and the demo on a tiny model."""

import dataclasses
import json
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from calib import artifact
from oscar_jax import calibrate as calibration
from oscar_jax import cli, corpus, evaluate
from oscar_jax import demo as demo_module
from oscar_jax.cache import cache_bytes
from oscar_jax.limits import BeyondCalibrationWarning
from oscar_jax.models import plain_attention
from oscar_jax.step import cache_config, make_step
from pallas_kernels.tiers import Tiers

TIERS = Tiers(sink=8, recent=32, group=8, page=16)
pytestmark = [
    pytest.mark.filterwarnings("ignore::calib.fit.ThinStatisticsWarning"),
    pytest.mark.filterwarnings("ignore::calib.fit.BucketCoverageWarning"),
]


@pytest.fixture(scope="module")
def arms(tiny, tiny_text):
    text = corpus.calibration_text(calibration.encoder(tiny), 1200, files=[tiny_text / "calibration.txt"])
    fitted = calibration.calibrate(tiny, text, ["naive", "default"], sequence=400, bucket=256, progress=False)
    return {name: codes for name, (codes, _) in fitted.items()}


@pytest.fixture(scope="module")
def heldout(tiny, tiny_text):
    return corpus.heldout_text(calibration.encoder(tiny), 800, file=tiny_text / "heldout.txt")


@pytest.fixture(scope="module")
def scores(tiny, arms, heldout):
    return evaluate.score(tiny, arms, heldout.tokens.reshape(2, 400), tiers=TIERS, progress=False)


def test_the_baseline_costs_nothing_and_better_codes_cost_less(scores):
    assert (scores["bf16"].kl == 0).all()
    assert scores["bf16"].agrees.all()
    assert 0 < scores["default"].kl.mean() < scores["naive"].kl.mean()
    assert scores["default"].bits_per_element < scores["naive"].bits_per_element < 16
    assert scores["default"].cache_bytes < scores["naive"].cache_bytes < scores["bf16"].cache_bytes


@jax.tree_util.register_static
class Identity:
    """A decoder whose hidden states are its logits."""

    def logits(self, hidden):
        return hidden


def test_kl_is_from_the_baseline_to_the_arm():
    base, arm = (jnp.log(jnp.asarray([[p]])) for p in ([0.5, 0.5], [0.25, 0.75]))
    target = jnp.asarray([[0]])
    reference, kl, nll, agrees = evaluate._compare(Identity(), base, target, None)
    assert kl[0, 0] == 0
    assert nll[0, 0] == pytest.approx(np.log(2))
    assert agrees[0, 0]
    _, kl, nll, _ = evaluate._compare(Identity(), arm, target, reference)
    assert kl[0, 0] == pytest.approx(0.5 * np.log(4 / 3))  # the other way round: 0.1308 instead of 0.1438
    assert nll[0, 0] == pytest.approx(np.log(4))


def test_baseline_likelihood_equals_a_forward_without_a_cache(tiny, scores, heldout):
    windows = jnp.asarray(heldout.tokens.reshape(2, 400))
    positions = jnp.broadcast_to(jnp.arange(400), windows.shape)
    hidden = tiny.decoder(windows, positions, plain_attention(tiny.config), None)[0]
    log_p = jax.nn.log_softmax(tiny.decoder.logits(hidden), axis=-1)
    nll = -np.take_along_axis(np.asarray(log_p)[:, :-1], np.asarray(windows)[:, 1:, None], axis=-1)[..., 0]
    first = TIERS.sink + TIERS.recent + evaluate.SETTLED
    assert scores["bf16"].nll.shape == nll[:, first:].shape
    assert abs(scores["bf16"].nll.mean() - nll[:, first:].mean()) < 0.01  # bf16 keys and values


def test_chunks_give_what_decoding_token_by_token_gives(tiny, arms, scores, heldout):
    """The claim that the shortcut rests on: rule E3 with bf16 tiers, KL between runs at most 2e-4."""
    window = heldout.tokens[:200].reshape(1, 200)
    config = cache_config(tiny.config, max_length=200, tiers=TIERS, plain_dtype="bfloat16")
    step = make_step(tiny.decoder, config, arms["default"])
    cache, logits = step.init(), []
    for token in window[0]:
        row, cache = step(cache, [[token]])
        logits.append(row)
    streamed = jax.nn.log_softmax(jnp.stack(logits, axis=1), axis=-1)
    whole, _ = step(step.init(), window, output="all")
    whole = jax.nn.log_softmax(whole, axis=-1)
    assert float((jnp.exp(streamed) * (streamed - whole)).sum(-1).mean()) < 2e-4


def test_bytes_are_those_of_the_arrays(tiny, arms, scores):
    config = cache_config(tiny.config, max_length=400, tiers=TIERS, plain_dtype="bfloat16", batch=2)
    cache = make_step(tiny.decoder, config, arms["default"]).init()
    assert scores["default"].cache_bytes == cache_bytes(cache)["total"] == sum(x.nbytes for x in jax.tree.leaves(cache))


def test_the_report_repeats_from_its_fields(tiny, arms, heldout):
    report = evaluate.evaluate(tiny, arms, heldout, sequence=400, tiers=TIERS, chunk=4096, progress=False)
    assert (report["windows"], report["tokens"], report["positions"]) == (2, 800, [104, 398])
    assert report["chunk"] == 400
    wanted = {"kl_mean", "kl_p99", "ppl", "dppl_percent", "top1", "cache_bytes", "bits_per_element"}
    for arm in report["arms"].values():
        assert wanted <= arm.keys()
        bins = arm["kl_by_position"]
        assert bins["position"][0] == 104
        assert len(bins["position"]) == len(bins["kl"])
        if arm is not report["arms"]["bf16"]:
            assert arm["kl_interval"][0] < arm["kl_mean"] < arm["kl_interval"][1]
            assert arm["dppl_percent_interval"][0] < arm["dppl_percent"] < arm["dppl_percent_interval"][1]
    assert report["arms"]["bf16"]["dppl_percent"] == 0
    assert report["arms"]["bf16"]["dppl_percent_interval"] == (0, 0)
    history = {name: arm["history_bits_per_element"] for name, arm in report["arms"].items()}
    assert history == {"bf16": 16, "naive": 2 + 32 / 16, "default": 2 + 16 / 16}
    json.dumps(report)
    assert "default" in evaluate.table(report["arms"])


def test_windows_begin_as_the_tokenizer_begins_every_text(tiny, heldout, monkeypatch):
    monkeypatch.setattr(calibration, "opening", lambda model: [9])
    monkeypatch.setattr(evaluate, "score", lambda model, arms, windows, **_: pytest.fail(repr(windows.tolist())))
    expected = [[9, *heldout.tokens[:399]], [9, *heldout.tokens[399:798]]]
    with pytest.raises(pytest.fail.Exception) as caught:
        evaluate.evaluate(tiny, {}, heldout, sequence=400, tiers=TIERS)
    assert str(caught.value) == repr(np.asarray(expected).tolist())


def test_requests_that_cannot_be_met_are_one_sentence(tiny, arms, heldout):
    with pytest.raises(ValueError, match="shorter than one window of 801"):
        evaluate.evaluate(tiny, arms, heldout, sequence=801, tiers=TIERS)
    with pytest.raises(ValueError, match="expected at least 106"):
        evaluate.score(tiny, arms, heldout.tokens[None, :105], tiers=TIERS)
    with pytest.raises(ValueError, match="context is 768"):
        evaluate.score(tiny, arms, np.zeros((1, 769), np.int32), tiers=TIERS)


def run(*arguments):
    return cli.main([str(argument) for argument in arguments])


def test_the_command_runs_recipes_and_artifacts_side_by_side(tiny, tiny_folder, tiny_text, arms, tmp_path, capsys):
    for folder in ("saved", "copy"):
        artifact.save(tmp_path / folder, arms["default"], artifact.Manifest(recipe="default", model=tiny.identity))
    common = ["--model", tiny_folder, "--text", tiny_text / "heldout.txt", "--tokens", 400, "--sequence", 400]
    windows = ["--sink", 8, "--recent", 32, "--json"]
    calibrated = ["--calibrate-on", tiny_text / "calibration.txt", "--calibration-tokens", 800]
    artifacts = ["--artifact", tmp_path / "saved", "--artifact", tmp_path / "copy"]
    written = ["--csv", tmp_path / "new" / "arms.csv", "--out", tmp_path / "out"]
    recipes = ["--recipes", "bf16,hadamard,default"]
    assert run("evaluate", *common, *windows, *calibrated, *recipes, *artifacts, *written) == 0
    printed = capsys.readouterr()
    report = json.loads(printed.out.splitlines()[-1])
    assert json.loads((tmp_path / "out" / "report.json").read_text()) == report
    assert (tmp_path / "new" / "arms.csv").read_text() == (tmp_path / "out" / "arms.csv").read_text()
    assert list(report["arms"]) == ["bf16", "default", "default-2", "hadamard", "default-3"]
    assert report["arms"]["default"]["kl_mean"] == report["arms"]["default-2"]["kl_mean"]
    paths = {name: arm.get("artifact") for name, arm in report["arms"].items()}
    saved, copy = str(tmp_path / "saved"), str(tmp_path / "copy")
    assert paths == {"bf16": None, "default": saved, "default-2": copy, "hadamard": None, "default-3": None}
    assert f"\ndefault-2 ({copy}) " in printed.err
    assert f",{copy}\n" in (tmp_path / "out" / "arms.csv").read_text()
    assert run("evaluate", *common, *windows) == 2
    assert "nothing to evaluate" in capsys.readouterr().err
    assert run("evaluate", *common, *windows, "--recipes", "naive", "--offset", 50_000) == 2
    assert "are needed for one window" in capsys.readouterr().err


def test_own_recipes_named_like_a_baseline_get_a_number(tiny, tiny_folder, tiny_text, arms, tmp_path, capsys):
    (tmp_path / "own.toml").write_text('name = "fp8"\nbase = "naive"\n')
    artifact.save(tmp_path / "saved", arms["default"], artifact.Manifest(recipe="kivi", model=tiny.identity))
    common = ["--model", tiny_folder, "--text", tiny_text / "heldout.txt", "--tokens", 400, "--sequence", 400]
    common += ["--calibrate-on", tiny_text / "calibration.txt", "--calibration-tokens", 800, "--sink", 8, "--json"]
    common += ["--recent", 32, "--artifact", tmp_path / "saved", "--recipes", f"fp8,{tmp_path / 'own.toml'},kivi"]
    assert run("evaluate", *common) == 0
    printed = capsys.readouterr()
    assert "note: without a cache of their own, in one pass: fp8, kivi.\n" in printed.err
    report = json.loads(printed.out.splitlines()[-1])
    assert {name: arm["one_pass"] for name, arm in report["arms"].items()} == {
        "bf16": False, "kivi-2": False, "fp8-2": False, "fp8": True, "kivi": True
    }  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--sequence", 105], "windows of 105 tokens: with sink=8 and recent=32 expected at least 106"),
        (["--sequence", 769], "the model's context is 768"),
        (["--implementation", "cuda"], "implementation='cuda': expected one of"),
        (["--recipes", "defalt"], "recipe 'defalt' is unknown; expected one of naive, "),
        (["--recipes", "no.toml"], "recipe 'no.toml': no such file"),
        (["--csv", "."], "--csv .: that is a folder"),
        (["--out", __file__], f"--out {__file__}: {__file__} is a file"),
        (["--out", f"{__file__}/out"], f"{__file__} is a file"),
        (["--one-pass", "--layer-errors"], "--layer-errors is about the cache, and --one-pass has none"),
        (["--one-pass", "--implementation", "xla"], "--implementation is about the cache"),
    ],
)
def test_what_cannot_be_met_is_refused_before_anything_is_calibrated(
    tiny_folder, tiny_text, monkeypatch, capsys, arguments, message
):
    monkeypatch.setattr(calibration, "calibrate", lambda *_, **__: pytest.fail("calibrated"))
    common = ["--model", tiny_folder, "--text", tiny_text / "heldout.txt", "--tokens", 800, "--sequence", 400]
    calibrated = ["--recipes", "naive", "--calibrate-on", tiny_text / "calibration.txt"]
    assert run("evaluate", *common, *calibrated, "--sink", 8, "--recent", 32, *arguments) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("limit", "message"),
    [
        ({"max_position": 256, "sequence": 64}, "sequences of 257 tokens are more than the 256 positions"),
        ({"sequence": 64}, r"are more than 4 times the 64 of its calibration sequences.*with sequence=65"),
    ],
)
def test_sequences_beyond_an_artifact_are_warned_of(tiny, arms, tmp_path, limit, message):
    manifest = dataclasses.replace(artifact.Manifest("default", model=tiny.identity), **limit)
    artifact.save(tmp_path / "saved", arms["default"], manifest)
    paths = [str(tmp_path / "saved")]
    assert list(evaluate.load_arms(paths, tiny, length=256)) == ["default"]
    with pytest.warns(BeyondCalibrationWarning, match=message):
        evaluate.load_arms(paths, tiny, length=257)


@pytest.mark.parametrize(
    ("limit", "length", "message"),
    [
        (["--max-position", 256], 256, "recipe 'default': sequences of 257 tokens are more than the 256 positions"),
        (["--calibration-sequence", 128], 512, r"of 513 tokens are more than 4 times the 128 of.*with sequence=129"),
    ],
)
def test_sequences_beyond_what_a_recipe_was_calibrated_on_are_warned_of(tiny, tiny_text, limit, length, message):
    arguments = ["evaluate", "--recipes", "default", "--calibrate-on", tiny_text / "calibration.txt"]
    arguments += ["--calibration-tokens", 800, *limit]
    parsed = cli.parser().parse_args([str(each) for each in arguments])
    assert list(evaluate.requested_arms(parsed, tiny, length=length)[0]) == ["default"]
    with pytest.warns(BeyondCalibrationWarning, match=message):
        evaluate.requested_arms(parsed, tiny, length=length + 1)


def test_an_artifact_of_another_model_is_refused(tiny_folder, tiny_text, arms, tiny, tmp_path, capsys):
    from tests import tiny_model

    other = tiny_model.write(tmp_path / "other", num_hidden_layers=3)
    artifact.save(tmp_path / "saved", arms["default"], artifact.Manifest(recipe="default", model=tiny.identity))
    arguments = ["--text", tiny_text / "heldout.txt", "--tokens", 400, "--sequence", 400]
    assert run("evaluate", "--model", other, *arguments, "--artifact", tmp_path / "saved") == 2
    assert "calibrate this model" in capsys.readouterr().err


@pytest.fixture
def demo(tiny_folder, tiny_text, monkeypatch):
    """The demo that fails if it calibrates, with articles of about 90 tokens instead of the downloaded ones."""
    from tests import tiny_model

    def calibrate(*arguments):
        raise AssertionError("calibrated")

    articles = [f"Title {i}\n\n{tiny_model.text(15, seed=i)}" for i in range(46)]
    monkeypatch.setattr(corpus, "wiki_summaries", lambda split, path=None: articles)
    monkeypatch.setattr(calibration, "calibrate", calibrate)
    sizes = ["--windows", 1, "--sequence", 400, "--calibration-tokens", 900]
    return lambda *arguments: run(
        "demo", "--model", tiny_folder, "--text", tiny_text / "heldout.txt", *sizes, *arguments
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--prompt", "x" * 800], "prompt of 800 tokens: expected at most 767"),
        (["--prompt", ""], "prompt is empty"),
        (["--max-tokens", 768], "max_tokens=768 after a prompt"),
        (["--sequence", 100_000], "100000 are needed for one window"),
    ],
)
def test_the_demo_refuses_early_and_leaves_nothing(demo, tmp_path, capsys, arguments, message):
    assert demo("--out", tmp_path / "out", *arguments) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.usefixtures("demo")
@pytest.mark.parametrize("max_tokens", [4, 400, 560])
def test_the_demos_question_has_as_many_articles_as_fit(tiny, max_tokens):
    room = tiny.config.max_position - max_tokens
    prompt = demo_module._prompt(tiny, None, max_tokens)
    articles = corpus.wiki_summaries("heldout")[40:46]
    count = sum(article in prompt for article in articles)
    assert prompt == demo_module._question(articles[:count])
    assert len(prompt) <= room
    assert count == 6 or len(demo_module._question(articles[: count + 1])) > room


def test_the_demo_writes_its_report_and_picture(tiny_folder, tiny_text, tmp_path, capsys, monkeypatch):
    from tests import tiny_model

    articles = [f"Title {i}\n\n{tiny_model.text(60, seed=i)}" for i in range(3)]
    monkeypatch.setattr(
        corpus, "wiki_summaries", lambda split, path=None: articles * (200 if split == "calibration" else 1)
    )
    out = tmp_path / "out"
    sizes = ["--windows", 2, "--sequence", 400, "--sink", 8, "--recent", 32, "--calibration-tokens", 900]
    arguments = ["--model", tiny_folder, "--text", tiny_text / "heldout.txt", "--out", out, *sizes]
    calibrate = calibration.calibrate
    monkeypatch.setattr(calibration, "calibrate", lambda *given: calibrate(*given, max_position=222))
    with warnings.catch_warnings():
        warnings.simplefilter("always", BeyondCalibrationWarning)
        assert run("demo", *arguments, "--prompt", "a question " * 20, "--max-tokens", 4, "--json") == 0
    captured = capsys.readouterr()
    for what in ("recipe 'default': sequences of 400 tokens", "artifact: 220 prompt tokens and up to 4 new ones"):
        assert f"warning: {what} are more than the 222 positions its statistics cover" in captured.err
    printed = json.loads(captured.out.splitlines()[-1])
    report = json.loads((out / "report.json").read_text())
    assert printed == report
    assert list(report["arms"]) == ["bf16", "naive", "hadamard", "oscar-reference", "default"]
    assert {"seconds", "model", "text", "windows", "tokens", "answers", "peak_memory_bytes"} <= report.keys()
    assert (out / "kl_by_position.png").read_bytes().startswith(b"\x89PNG")
    assert sorted(path.name for path in (out / "artifacts").iterdir()) == sorted(printed["arms"].keys() - {"bf16"})
    assert not list(out.glob("*.tmp*"))
