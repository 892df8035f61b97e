"""Layers of different sizes: measured cost, choice, storage, and who takes a plan."""

import dataclasses
import json

import numpy as np
import pytest

from calib import artifact
from oscar_jax import calibrate as calibration
from oscar_jax import cli, corpus, evaluate, layer_plan, one_pass, sensitivity
from pallas_kernels.tiers import Tiers

TIERS = Tiers(sink=8, recent=32, group=8, page=16)
pytestmark = [
    pytest.mark.filterwarnings("ignore::calib.fit.ThinStatisticsWarning"),
    pytest.mark.filterwarnings("ignore::calib.fit.BucketCoverageWarning"),
]


@pytest.fixture(scope="module")
def planned(tiny, tiny_text):
    """Two layers of 16 slots and a scale a side, (2 * 16 + 16) / 16 = 3 bits, or of 32 slots, 5 bits."""
    text = corpus.calibration_text(calibration.encoder(tiny), 800, files=[tiny_text / "calibration.txt"])
    return sensitivity.plan_layers(tiny, text, "default", 4.0, sequence=400, bucket=128, progress=False)


def windows(tiny, tiny_text):
    return corpus.heldout_text(calibration.encoder(tiny), 400, file=tiny_text / "heldout.txt").tokens[None]


def test_more_slots_go_to_the_layer_where_they_save_most(planned):
    plan, manifest = planned
    costs = {size: np.asarray(each) for size, each in plan.costs.items()}
    assert list(costs) == [16, 32]
    assert (costs[32] < 0.3 * costs[16]).all()
    wider = int((costs[16] - costs[32]).argmax())
    assert plan.slots[wider] == 32
    assert sorted(plan.slots) == [16, 32]
    assert plan.bits_per_element == 4
    assert manifest.recipe == "default"


@pytest.mark.parametrize(("bits", "sizes"), [(3, [16, 16]), (3.9, [16, 16]), (5, [32, 32]), (9.5, [None, 16])])
def test_the_average_is_kept(planned, bits, sizes):
    plan = layer_plan.choose(planned[0].codes, planned[0].costs, bits)
    assert sorted(plan.slots, key=str, reverse=True) == sorted(sizes, key=str, reverse=True)
    assert plan.bits_per_element <= bits


def test_an_average_out_of_range_is_refused(planned):
    for bits in (2.9, 16.1):
        with pytest.raises(ValueError, match=r"average_bits=.*: expected 3 \(the smallest size\) to 16 \(plain\)"):
            layer_plan.choose(planned[0].codes, planned[0].costs, bits)


def test_a_plan_rounds_each_layer_in_its_size(tiny, tiny_text, planned):
    """Equal sizes are the plain recipe, plain layers the baseline, and a mixture lies between the two sizes."""
    codes = planned[0].codes
    sizes = {"narrow": (16, 16), "mixed": planned[0].slots, "wide": (32, 32), "plain": (None, None)}
    plans = {name: dataclasses.replace(planned[0], slots=slots).arm() for name, slots in sizes.items()}
    arms = plans | {"16": one_pass.from_codes(codes[16])}
    found = evaluate.score_one_pass(tiny, arms, windows(tiny, tiny_text), tiers=TIERS, progress=False)
    assert found["narrow"].kl.mean() == pytest.approx(found["16"].kl.mean(), rel=1e-3)
    assert found["wide"].kl.mean() < found["mixed"].kl.mean() < found["narrow"].kl.mean()
    assert found["plain"].kl.mean() < 1e-6


def run(*arguments):
    return cli.main([str(argument) for argument in arguments])


def test_the_command_writes_a_plan_that_evaluate_reads_in_one_pass(tiny, tiny_folder, tiny_text, tmp_path, capsys):
    text = ["--text", tiny_text / "calibration.txt", "--tokens", 800, "--sequence", 400, "--bucket", 128, "--json"]
    out = tmp_path / "plan"
    assert run("calibrate", "--model", tiny_folder, "--average-bits", 4, "--sizes", "1,2", "--out", out, *text) == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert json.loads((out / "plan.json").read_text())["slots"] == report["slots"]
    common = ["--model", tiny_folder, "--text", tiny_text / "heldout.txt", "--tokens", 400, "--sequence", 400]
    common += ["--sink", 8, "--recent", 32, "--json", "--artifact", out]
    assert run("evaluate", *common, "--one-pass") == 0
    arm = json.loads(capsys.readouterr().out.splitlines()[-1])["arms"]["default-plan"]
    assert arm["history_bits_per_element"] == report["bits_per_element"] == 4
    plan, _ = layer_plan.load(out, tiny)
    assert [codes.layers for codes in plan.codes.values()] == [1, 1]
    whole = evaluate.score_one_pass(
        tiny, {"plan": plan.arm()}, windows(tiny, tiny_text), tiers=Tiers(sink=8, recent=32), progress=False
    )
    assert arm["kl_mean"] == pytest.approx(whole["plan"].kl.mean(), rel=1e-3)
    # No cache takes it yet, and the refusal says what does.
    assert run("evaluate", *common) == 2
    assert "its layers have different sizes, which no cache takes yet" in capsys.readouterr().err
    assert run("calibrate", "--recipe", "default,naive", "--average-bits", 4, "--out", out, *text) == 2
    assert "expected one recipe" in capsys.readouterr().err


def test_a_damaged_plan_is_named(tiny, planned, tmp_path):
    plan, manifest = planned
    manifest = dataclasses.replace(manifest, model=tiny.identity)
    layer_plan.save(tmp_path, plan, manifest)
    assert layer_plan.load(tmp_path, tiny)[0].slots == plan.slots
    with pytest.raises(ValueError, match="no cache takes yet"):
        artifact.load(tmp_path)
    content = json.loads((tmp_path / "plan.json").read_text())
    for damage, message in (
        ({"slots": content["slots"][::-1]}, r"does not hold the layers of plan\.json"),
        ({"slots": [16, 16, 16]}, "of 3 layers, the model has 2"),
        ({"slots": [64, 64]}, "slots-64: no such directory"),
        ({"costs": 3}, "not a plan of layers"),
    ):
        (tmp_path / "plan.json").write_text(json.dumps(content | damage))
        with pytest.raises(ValueError, match=message):
            layer_plan.load(tmp_path, tiny)
