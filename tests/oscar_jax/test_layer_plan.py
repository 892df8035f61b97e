"""Layers of different sizes: measured cost, choice, storage, and caches of them."""

import dataclasses
import json
import re
from typing import Any

import jax
import numpy as np
import pytest

from calib import artifact
from calib.manifest import Manifest
from calib.rounding import RoundingErrors
from oscar_jax import calibrate as calibration
from oscar_jax import cli, corpus, evaluate, layer_plan, one_pass, sensitivity
from oscar_jax.cache import init_cache
from oscar_jax.cache_check import check_cache
from oscar_jax.engine import Engine, Request, Shapes
from oscar_jax.layer_codes import LayerCodes, history_bits
from oscar_jax.limits import BeyondCalibrationWarning
from oscar_jax.models import random_decoder, tiny_config
from oscar_jax.session import Session
from oscar_jax.sharding import make_mesh
from oscar_jax.step import cache_config, make_step
from pallas_kernels import dispatch, history
from pallas_kernels.tiers import Tiers
from pallas_kernels.transform_code import TransformCodes
from tests.pallas_kernels.codes import transform_codes

TIERS = Tiers(sink=8, recent=32, group=8, page=16)
pytestmark = [
    pytest.mark.usefixtures("unoptimized"),
    pytest.mark.filterwarnings("ignore::calib.fit.ThinStatisticsWarning"),
    pytest.mark.filterwarnings("ignore::calib.fit.BucketCoverageWarning"),
]


@pytest.fixture(scope="module")
def planned(tiny, tiny_text):
    """Two layers of 16 slots and a scale a side, (2 * 16 + 16) / 16 = 3 bits, of 8 slots, 2 bits, or of 32, 5 bits."""
    text = corpus.calibration_text(calibration.encoder(tiny), 800, files=[tiny_text / "calibration.txt"])
    return sensitivity.plan_layers(tiny, text, "default", 4.0, sequence=400, bucket=128, progress=False)


def windows(tiny, tiny_text):
    return corpus.heldout_text(calibration.encoder(tiny), 400, file=tiny_text / "heldout.txt").tokens[None]


def test_more_slots_go_to_the_layer_where_they_save_most(planned):
    plan, manifest = planned
    costs = {size: np.asarray(each) for size, each in plan.costs.items()}
    assert list(costs) == [8, 16, 32]
    assert (costs[32] < 0.3 * costs[16]).all()
    wider = int((costs[16] - costs[32]).argmax())
    assert plan.slots[wider] == 32
    assert sorted(plan.slots) == [16, 32]
    assert history_bits(plan.layer_codes()) == 4
    assert manifest.recipe == "default"


@pytest.mark.parametrize(
    ("bits", "sizes"), [(3, [16, 16]), (3.4, [16, 16]), (3.9, [8, 32]), (5, [32, 32]), (10.5, [None, 32])]
)
def test_the_average_is_kept(planned, bits, sizes):
    plan = layer_plan.choose(planned[0].codes, planned[0].costs, bits)
    assert sorted(plan.slots, key=str, reverse=True) == sorted(sizes, key=str, reverse=True)
    assert history_bits(plan.layer_codes()) <= bits


def test_at_the_bits_of_equal_layers_narrow_ones_pay_for_wide_ones(planned):
    """Four layers of which one costs most: 2 + 2 + 3 + 5 bits are 4 times 3."""
    costs = {8: [0.1, 0.11, 0.12, 9], 16: [0.05, 0.05, 0.05, 1], 32: [0.01, 0.01, 0.01, 0.1]}
    assert layer_plan.choose(planned[0].codes, costs, 3).slots == (8, 8, 16, 32)


def test_an_average_out_of_range_is_refused(planned):
    for bits in (1.9, 16, 16.1):
        with pytest.raises(ValueError, match=r"average_bits=.*: expected 2 \(the smallest size\) to 16 \(plain\)"):
            layer_plan.choose(planned[0].codes, planned[0].costs, bits)


def test_averages_and_sizes_out_of_range_are_refused_before_anything_is_measured(tiny, monkeypatch):
    monkeypatch.setattr(calibration, "measure", lambda *_, **__: pytest.fail("measured"))
    text = corpus.TokenText.of(np.arange(400) % 250, "any")
    for recipe, least in (("default", "3"), ("oscar-head", "4")):
        with pytest.raises(ValueError, match=rf"average_bits=2: expected {least} \(the smallest size\) to 16"):
            sensitivity.plan_layers(tiny, text, recipe, 2.0, sizes=[1])
    with pytest.raises(ValueError, match="slots=8 on the key side of recipe 'oscar-head': expected 16, the head size"):
        sensitivity.plan_layers(tiny, text, "oscar-head", 5.0)
    with pytest.raises(ValueError, match=r"slots=0 .* expected a multiple of 8 from 8 to 48; the nearest is 8"):
        sensitivity.plan_layers(tiny, text, "default", 5.0, sizes=[0.1, 1])


def sized(planned, *slots):
    return dataclasses.replace(planned[0], slots=slots).layer_codes()


def test_a_plan_rounds_each_layer_in_its_size(tiny, tiny_text, planned):
    """Equal sizes are the plain recipe, plain layers the baseline, and a mixture lies between the two sizes."""
    sizes = {"narrow": (16, 16), "mixed": planned[0].slots, "wide": (32, 32), "plain": (None, None)}
    arms = {name: one_pass.from_codes(sized(planned, *slots)) for name, slots in sizes.items()}
    arms["16"] = one_pass.from_codes(planned[0].codes[16])
    found = evaluate.score_one_pass(tiny, arms, windows(tiny, tiny_text), tiers=TIERS, progress=False)
    assert found["narrow"].kl.mean() == pytest.approx(found["16"].kl.mean(), rel=1e-3)
    assert found["wide"].kl.mean() < found["mixed"].kl.mean() < found["narrow"].kl.mean()
    assert found["plain"].kl.mean() < 1e-6


def cache_bytes_of(tiny, tiers, *slots):
    """By hand, of one sequence of 400 tokens: pages, plain tiers, page table and length."""
    heads, pages = 2 * tiny.config.kv_heads, -(-tiers.history_tokens(400) // tiers.page)
    total = 4 * (pages + 1)
    for each in slots:
        if each is None:
            total += heads * 2 * 16 * 400
        else:
            total += heads * (pages * tiers.page * (each // 4 + 2) + 2 * 16 * (tiers.sink + tiers.ring(1)))
    return total


def test_a_cache_with_a_plain_layer_agrees_with_one_pass(tiny, tiny_text, planned):
    codes, text = sized(planned, None, 16), corpus.TokenText.of(windows(tiny, tiny_text)[0], "held out")
    options = {"tiers": TIERS, "progress": False}
    cached = evaluate.evaluate(tiny, {"plan": codes}, text, sequence=400, errors_by_layer=True, **options)
    arm = cached["arms"]["plan"]
    single = evaluate.score_one_pass(tiny, {"plan": one_pass.from_codes(codes)}, text.tokens[None], **options)["plan"]
    assert arm["kl_mean"] == pytest.approx(single.kl.mean(), rel=0.02)
    assert arm["bits_per_element"] == pytest.approx(single.bits_per_element)
    assert arm["history_bits_per_element"] == single.history_bits_per_element == 9.5
    assert arm["cache_bytes"] == cache_bytes_of(tiny, TIERS, None, 16)
    assert arm["layer_errors"][0] < 1e-6 < arm["layer_errors"][1]


@pytest.fixture(scope="module")
def shuffled():
    """A model of four layers, a cache of two sequences, and codes in one group and in groups that are no neighbours."""
    config = dataclasses.replace(tiny_config(), layers=4, windows=(None,) * 4)
    codes, group = transform_codes(bucket=16, layers=4, head_dim=config.head_dim), (1, 0, 0, 1)
    parts = [jax.tree.map(lambda leaf, each=each: leaf[np.equal(group, each)], codes) for each in (0, 1)]
    cache = cache_config(config, max_length=64, tiers=Tiers(4, 8, 4, 8), plain_dtype="float32", batch=2)
    return random_decoder(config), cache, codes, LayerCodes(tuple(parts), group)


def test_layers_in_groups_give_the_logits_of_layers_in_one_on_a_mesh_too(shuffled):
    """In float64, as rule E3 has it: in fp32 the programs may round a stored scale differently."""
    decoder, config, codes, grouped = shuffled
    tokens = np.random.default_rng(0).integers(0, decoder.config.vocab_size, (2, 48))
    found = []
    with jax.enable_x64(True):
        wide = random_decoder(decoder.config, dtype="float64")
        config = dataclasses.replace(config, plain_dtype="float64")
        on_mesh = dataclasses.replace(config, mesh=make_mesh(data=2, tensor=2))
        for settings, each in ((config, codes), (config, grouped), (on_mesh, grouped)):
            step = make_step(wide, settings, each, checked=True)
            cache, logits = step.init(), []
            for start in range(0, 48, 16):
                row, cache = step(cache, tokens[:, start : start + 16], [16, 9])
                logits.append(row)
            found.append(np.stack(logits))
    np.testing.assert_allclose(found[1:], [found[0]] * 2, atol=1e-9)
    with pytest.raises(ValueError, match="codes for 4 layers: expected 2"):
        init_cache(dataclasses.replace(config, layers=2), grouped)


def test_pools_that_triton_kernels_cannot_address_are_divided(shuffled, monkeypatch):
    decoder, config, codes, grouped = shuffled
    on_mesh = dataclasses.replace(config, mesh=make_mesh(data=2, tensor=2))

    def sizes(settings, each):
        step = make_step(decoder, settings, each)
        found = jax.eval_shape(step.init).history
        pools = [found] if isinstance(step.codes, TransformCodes) else [x for x in found if x is not None]
        devices = 1 if settings.mesh is None else settings.mesh.size
        return step, [side.slots.size // devices for pool in pools for side in (pool.key, pool.value)]

    _, whole = sizes(config, codes)
    monkeypatch.setattr(history, "UNADDRESSED", range(whole[0] // 2 + 1, whole[0] + 1))
    assert isinstance(make_step(decoder, config, codes).codes, TransformCodes)  # XLA reads any
    monkeypatch.setattr(dispatch, "preferred", lambda implementation: "triton")
    step, halves = sizes(config, codes)
    assert isinstance(step.codes, LayerCodes)
    assert step.codes.group == (0, 0, 1, 1)
    assert halves == 2 * [size // 2 for size in whole]
    _, ours = sizes(on_mesh, codes)  # a quarter of the pool on each device
    assert ours == [size // 4 for size in whole]
    monkeypatch.setattr(history, "UNADDRESSED", range(1, whole[0] + 1))
    undivided = make_step(decoder, config, grouped).codes  # no number of groups would do
    assert isinstance(undivided, LayerCodes)
    assert undivided.group == grouped.group

    monkeypatch.undo()
    tokens = np.random.default_rng(0).integers(0, decoder.config.vocab_size, (2, 48))
    one, two = (each(each.init(), tokens)[0] for each in (make_step(decoder, config, codes), step))
    np.testing.assert_allclose(one, two, atol=1e-4)


def test_an_engine_takes_layers_in_groups_and_warns_beyond_its_artifact(shuffled):
    decoder, config, codes, grouped = shuffled
    prompts = [np.random.default_rng(1).integers(0, 96, length).tolist() for length in (37, 16)]
    options: Any = {"max_length": 64, "tiers": config.tiers, "plain_dtype": "float32"}
    options |= {"shapes": Shapes(2, (2,), (2,), (16,)), "manifest": Manifest("default-plan", sequence=15)}
    with pytest.warns(BeyondCalibrationWarning, match="max_length=64 is more than 4 times the 15 of its calibration"):
        engine = Engine(decoder, grouped, **options)
    stats = engine.stats()
    assert stats.device_bytes == stats.expected_bytes
    found = engine.complete([Request(prompt, max_tokens=5) for prompt in prompts])
    session = Session(make_step(decoder, config, codes), chunks=(16,))
    logits, expected = session.prefill(prompts), []
    for _ in range(5):  # one token in calls of 16, whose program is there already
        expected.append(np.asarray(logits).argmax(-1))
        logits = session.feed(np.repeat(expected[-1][:, None], 16, axis=1), [1, 1])
    assert found == np.transpose(expected).tolist()


def test_a_damaged_scale_is_named_by_the_models_layer(shuffled):
    _, config, _, codes = shuffled
    cache: Any = init_cache(config, codes)
    pages = cache.history[1].value
    broken = dataclasses.replace(pages, scale=pages.scale.at[1, 0, 0, 2].set(np.nan))
    history = cache.history[0], dataclasses.replace(cache.history[1], value=broken)
    cache = dataclasses.replace(cache, history=history, lengths=cache.lengths + 40)
    with pytest.raises(ValueError, match="sequence 0, layer 3, head 0, position 6: value scale is nan"):
        check_cache(cache, config, codes)


def run(*arguments):
    return cli.main([str(argument) for argument in arguments])


def test_sizes_of_nothing_are_refused(tiny_folder, tmp_path, capsys):
    assert run("calibrate", "--model", tiny_folder, "--sizes", "1,2", "--out", tmp_path / "out") == 2
    assert "sizes without average_bits: expected an average too" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_the_commands_read_a_plan_as_any_artifact(tiny, tiny_folder, tiny_text, tmp_path, capsys):
    text = ["--text", tiny_text / "calibration.txt", "--tokens", 800, "--sequence", 400, "--bucket", 128, "--json"]
    out = tmp_path / "plan"
    assert run("calibrate", "--model", tiny_folder, "--average-bits", 4, "--sizes", "1,2", "--out", out, *text) == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert json.loads((out / "plan.json").read_text())["slots"] == report["slots"]
    codes, manifest = layer_plan.load(out, model=tiny.identity)
    assert isinstance(codes, LayerCodes)
    assert sorted(codes.group) == [0, 1]
    assert manifest.recipe == "default-plan"
    common = ["--model", tiny_folder, "--artifact", out, "--sink", 8, "--recent", 32, "--json"]
    evaluated = ["evaluate", *common, "--text", tiny_text / "heldout.txt", "--tokens", 400, "--sequence", 400]
    found = []
    for mode in (["--one-pass"], []):
        assert run(*evaluated, *mode) == 0
        found.append(json.loads(capsys.readouterr().out.splitlines()[-1])["arms"]["default-plan"])
        assert found[-1]["history_bits_per_element"] == report["bits_per_element"] == 4
    assert found[0]["kl_mean"] == pytest.approx(found[1]["kl_mean"], rel=0.02)
    assert found[1]["cache_bytes"] == cache_bytes_of(tiny, Tiers(sink=8, recent=32), *report["slots"])
    assert run("generate", *common, "--prompt", "a question " * 20, "--max-tokens", 4, "--no-chat") == 0
    assert 4 < json.loads(capsys.readouterr().out.splitlines()[-1])["bits_per_element"] < 16
    assert run("inspect", out) == 2
    assert "different sizes, which this does not take; name one of slots-16, slots-32" in capsys.readouterr().err
    assert run("calibrate", "--recipe", "default,naive", "--average-bits", 4, "--out", out, *text) == 2
    assert "expected one recipe" in capsys.readouterr().err


def test_a_damaged_plan_is_named(tiny, planned, tmp_path):
    plan, manifest = planned
    manifest = dataclasses.replace(manifest, model=tiny.identity)
    of_all = RoundingErrors.of(np.ones((2, 2)), np.ones((2, 2)))  # a size holds fewer layers
    layer_plan.save(tmp_path, plan, dataclasses.replace(manifest, rounding=of_all))
    assert layer_plan.load(tmp_path)[1].recipe == "default-plan"
    content = json.loads((tmp_path / "plan.json").read_text())
    for damage, message in (
        ({"slots": content["slots"][::-1]}, r"does not hold the layers of plan\.json"),
        ({"slots": [16, 32, 16]}, r"does not hold the layers of plan\.json"),
        ({"slots": [64, 64]}, "slots-64: no such directory"),
        ({"slots": 3}, r"not a plan of layers .*; delete the folder, then calibrate again\.$"),
        ({"slots": [None, None]}, "not a plan of layers"),
    ):
        (tmp_path / "plan.json").write_text(json.dumps(content | damage))
        with pytest.raises(ValueError, match=message):
            layer_plan.load(tmp_path, model=tiny.identity)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (
            ["plan.json"],
            r"holds 'plan\.json', which is not a plan's; choose a new or empty folder, or a plan to replace",
        ),
        (["a.txt", "plan.json"], r"holds 'plan\.json', which is not a plan's"),
        (["notes.txt"], r"holds 'notes\.txt', which is not a plan's"),
        (["slots-16/2023/thesis.txt"], "slots-16: the folder holds '2023', which is not an artifact's"),
        (["slots-16"], "holds 'slots-16', which is not a plan's"),
    ],
)
def test_a_plan_does_not_replace_something_else(files, message, planned, tmp_path, capsys):
    for file in files:
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text('{"mine": 1}')
    with pytest.raises(ValueError, match=message):
        layer_plan.save(tmp_path, *planned)
    assert run("calibrate", "--model", "/nowhere", "--average-bits", 4, "--out", tmp_path) == 2
    assert re.search(message, capsys.readouterr().err)
    found = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert sorted(found) == sorted(tmp_path / file for file in files)
    assert {file.read_text() for file in found} == {'{"mine": 1}'}


def test_a_plan_and_an_artifact_do_not_hide_each_other(planned, tmp_path):
    plan, manifest = planned
    artifact.save(tmp_path / "artifact", plan.codes[16], manifest)
    layer_plan.save(tmp_path / "plan", plan, manifest)
    with pytest.raises(ValueError, match="holds an artifact, which a plan of layers would hide; choose a new or empty"):
        layer_plan.save(tmp_path / "artifact", plan, manifest)
    with pytest.raises(ValueError, match=r"holds 'plan\.json', which would be read as a plan of layers"):
        artifact.save(tmp_path / "plan", plan.codes[16], manifest)
    assert isinstance(layer_plan.load(tmp_path / "artifact")[0], TransformCodes)
    assert isinstance(layer_plan.load(tmp_path / "plan")[0], LayerCodes)


def test_a_plan_replaces_a_plan_and_what_an_interrupted_one_left(planned, tmp_path):
    (tmp_path / "slots-16" / "0.orbax-checkpoint-tmp").mkdir(parents=True)
    (tmp_path / ".plan.json.tmp").touch()
    for slots in ((16, 32), (32, 16)):
        layer_plan.save(tmp_path, dataclasses.replace(planned[0], slots=slots), planned[1])
        (tmp_path / "notes.txt").write_text("mine")
        assert json.loads((tmp_path / "plan.json").read_text())["slots"] == list(slots)
        assert isinstance(layer_plan.load(tmp_path)[0], LayerCodes)
    assert (tmp_path / "notes.txt").read_text() == "mine"
