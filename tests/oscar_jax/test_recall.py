"""A quoted number is still known when it lies in 2-bit history."""

from __future__ import annotations

import pytest

from oscar_jax import calibrate, corpus, download, recall
from oscar_jax.models import load
from pallas_kernels.tiers import Tiers


def test_probes_quote_their_number_once_and_ask_for_it():
    probes = recall.probes(60, seed=1)
    assert len({probe.question for probe in probes}) == 60
    for prompt, question, number in probes:
        assert prompt.count(number) == 1
        assert number not in question
        assert question.partition('"')[2] in prompt
    assert probes != recall.probes(60, seed=2)
    for count in (0, 61):
        with pytest.raises(ValueError, match=rf"prompts={count}: expected 1 to 60"):
            recall.probes(count, seed=0)


@pytest.mark.slow
def test_smollm2_recalls_in_two_bits_what_it_recalls_in_sixteen():
    if download.find("smollm2-135m") is None:
        pytest.skip("smollm2-135m is not downloaded: run `oscar-jax download smollm2-135m`")
    model = load("smollm2-135m")
    text = corpus.calibration_text(calibrate.encoder(model), 16384)
    codes = calibrate.calibrate(model, text, ["default"], progress=False)["default"].codes
    probes = recall.probes(60, seed=0)
    found = recall.recall(model, codes, probes, tiers=Tiers(sink=16, recent=64), plain_dtype="bfloat16")
    assert found["plain_right"] >= 30
    assert found["share"] >= 0.9
