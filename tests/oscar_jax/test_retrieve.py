"""Retrieval through the real cache on a tiny model."""

import dataclasses
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from calib import artifact
from oscar_jax import calibrate as calibration
from oscar_jax import cli, corpus, retrieve
from oscar_jax.longcontext import Haystack, make_sample
from oscar_jax.models import plain_attention
from oscar_jax.retrieve import Score
from pallas_kernels.tiers import Tiers

TIERS = Tiers(sink=8, recent=64, group=8, page=16)
LENGTH = 300
pytestmark = pytest.mark.usefixtures("unoptimized")


@pytest.fixture(scope="module")
def codes(tiny):
    text = corpus.TokenText.of(np.arange(100) % 250, "any")
    return calibration.calibrate(tiny, text, ["naive"], progress=False)["naive"].codes


@pytest.fixture(scope="module")
def samples(tiny, tiny_text):
    text = re.sub(r"(\S+ \S+ \S+) ", r"\1. ", (tiny_text / "heldout.txt").read_text())
    haystack = Haystack(text, calibration.encoder(tiny))
    return [make_sample("quote", haystack, length=LENGTH, depth=0.3, tiers=TIERS, seed=0, index=i) for i in range(3)]


def _written(tiny, sample, count):
    """So many tokens as greedy decoding writes them after the sample's prompt."""
    row = sample.tokens[: -sample.answer_tokens].tolist()
    start = len(row)
    for _ in range(count):
        padded = jnp.asarray([row + [0] * (start + count - len(row))])
        row.append(int(_logits(tiny.decoder, padded)[0, len(row) - 1].argmax()))
    return row[start:]


def _continued(tiny, sample, *, lead=0):
    """The sample with the model's own greedy continuation as its answer, but for its first tokens."""
    written = _written(tiny, sample, lead + sample.answer_tokens)
    return dataclasses.replace(
        sample, tokens=np.append(sample.tokens[: -sample.answer_tokens], np.int32(written[lead:])).astype(np.int32)
    )


@jax.jit
def _logits(decoder, tokens):
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    return decoder.logits(decoder(tokens, positions, plain_attention(decoder.config), None)[0])


@pytest.mark.parametrize("lead", [0, 3])
def test_scores_are_those_of_a_forward_and_exact_is_what_greedy_decoding_writes(tiny, samples, lead):
    """The last of a batch that is not full has the model's own continuation, or what it writes after three tokens."""
    made = [*samples[:2], _continued(tiny, samples[2], lead=lead)]
    scores = retrieve.score(tiny, None, made, tiers=TIERS, batch=2, chunk=128, progress=False)
    assert [score.exact for score in scores] == [False, False, True]
    for sample, score in zip(made, scores, strict=True):
        log_p = np.asarray(jax.nn.log_softmax(_logits(tiny.decoder, jnp.asarray(sample.tokens[None])), axis=-1))[0]
        places = np.arange(LENGTH - sample.answer_tokens, LENGTH)
        assert score.log_probability == pytest.approx(log_p[places - 1, sample.tokens[places]].sum(), abs=0.2)


def test_each_row_of_a_batch_may_write_its_own_answer_and_eight_tokens_more(tiny, samples):
    """A long answer after eight tokens counts, whatever is beside it; a short one after nine does not."""
    long = _continued(tiny, samples[0], lead=retrieve.LEAD)
    short = _continued(tiny, dataclasses.replace(samples[1], answer_tokens=2), lead=retrieve.LEAD + 1)
    scores = retrieve.score(tiny, None, [long, short], tiers=TIERS, batch=2, chunk=128, progress=False)
    assert [score.exact for score in scores] == [True, False]


def test_what_is_written_ends_at_the_first_stop_token(tiny, samples, monkeypatch):
    """Behind the answer it leaves the answer; before it, also if another one is behind."""
    own = _continued(tiny, samples[0], lead=2)
    written = _written(tiny, samples[0], own.answer_tokens + retrieve.LEAD)
    behind = next(token for i, token in enumerate(written) if i >= own.answer_tokens + 2 and token not in written[:i])
    part = tiny.tokenizer.decode(own.tokens[-own.answer_tokens :]).strip()
    rows = [own, dataclasses.replace(samples[0], parts=(part, "never written"))]
    found = {}
    for name, stops in {"none": [], "behind": [behind], "before": [written[0], behind]}.items():
        monkeypatch.setattr(retrieve, "stop_tokens", lambda tokenizer, stops=stops: frozenset(stops))
        scores = retrieve.score(tiny, None, rows, tiers=TIERS, batch=2, chunk=128, progress=False)
        found[name] = [(score.exact, score.found) for score in scores]
    assert found["none"] == found["behind"] == [(True, 1), (False, 0.5)]
    assert found["before"] == [(False, 0), (False, 0)]


def test_nothing_is_written_beyond_the_context(tiny, samples):
    """What is written after five tokens counts, but not where only the answer's own tokens fit."""
    longest = tiny.config.max_position
    tokens = np.append(np.resize(samples[1].tokens, longest - LENGTH), samples[0].tokens)
    exact = {}
    for room in (0, retrieve.LEAD):
        sample = _continued(tiny, dataclasses.replace(samples[0], tokens=tokens[room:]), lead=5)
        assert len(sample.tokens) == longest - room
        [score] = retrieve.score(tiny, None, [sample], tiers=TIERS, chunk=128, progress=False)
        exact[room] = score.exact
    assert exact == {0: False, retrieve.LEAD: True}


def test_parts_of_a_list_count_one_by_one_and_in_any_order(tiny, samples):
    """Of an answer that greedy decoding does not write whole, the parts that it writes."""
    own = _continued(tiny, samples[0])
    written = tiny.tokenizer.decode(own.tokens[-own.answer_tokens :]).strip()
    first, last = written[:5], written[-5:]
    listed = dataclasses.replace(samples[0], parts=(last, "never written", first, "nor this"))
    whole = dataclasses.replace(own, parts=(first, last))
    scores = retrieve.score(tiny, None, [listed, whole, samples[1]], tiers=TIERS, batch=3, chunk=128, progress=False)
    assert [(score.exact, score.found) for score in scores] == [(False, 0.5), (True, 1), (False, 0)]


@pytest.mark.parametrize("coded", [False, True])
def test_no_score_depends_on_how_many_prompts_run_at_once(tiny, codes, samples, coded):
    """A batch of two leaves a row over; one of sixty-four is no larger than the samples."""
    arm, answer = codes if coded else None, samples[2].answer_tokens
    rows = samples if coded else [*samples[:2], _continued(tiny, samples[2])]
    at_once, *others = (
        retrieve.score(tiny, arm, rows, tiers=TIERS, batch=batch, chunk=128, progress=False)
        for batch in ((64, 2) if coded else (64, 2, 1))
    )
    for found in others:
        assert [score.exact for score in found] == [score.exact for score in at_once]
        for one, other in zip(found, at_once, strict=True):
            assert other.log_probability == pytest.approx(one.log_probability, abs=1e-4 * answer)


def test_the_report_pairs_arms_on_the_same_samples(samples):
    made = [samples[0]] * 9
    base = [Score(True, 1.0, -1.0)] * 9
    worse = [Score(i < 1, 1.0 if i < 1 else 0.25, -3.0) for i in range(9)]
    found = retrieve.summarize(made, {"bf16": base, "naive": worse}, tiers=TIERS)
    [pair] = found["pairs"]
    assert (pair["arm"], pair["task"], pair["length"], pair["samples"]) == ("naive", "quote", LENGTH, 9)
    assert pair["difference_points"] == pytest.approx(-800 / 9)
    assert pair["mcnemar_p"] == 2 / 2**8
    assert pair["in_history"] == 1
    assert (pair["found"], pair["baseline_found"]) == (pytest.approx(3 / 9), 1)
    assert pair["found_points"] == pytest.approx(-600 / 9)
    low, high = pair["found_points_interval"]
    assert -75 <= low < -600 / 9 < high < 0
    assert pair["log_probability_change"] == -2
    assert pair["log_probability_change_interval"] == (-2, -2)
    assert [cell["arm"] for cell in found["cells"]] == ["bf16", "naive"]
    assert [cell["in_history"] for cell in found["cells"]] == [1, 1]


def test_the_command(tiny, tiny_folder, tiny_text, codes, tmp_path, capsys):
    artifact.save(tmp_path / "saved", codes, artifact.Manifest(recipe="naive", model=tiny.identity))
    common = ["retrieve", "--model", tiny_folder, "--artifact", tmp_path / "saved", "--haystack"]
    common += [tiny_text / "heldout.txt", "--depths", "0,1", "--samples", 1, "--sink", 8, "--recent", 64]
    out = ["--length", 600, "--batch", 2, "--out", tmp_path / "out", "--json"]
    assert cli.main([str(each) for each in [*common, *out]]) == 0
    printed = capsys.readouterr()
    report = json.loads(printed.out.splitlines()[-1])
    assert report["artifacts"] == {"naive": str(tmp_path / "saved")}
    assert f"  naive ({tmp_path / 'saved'})  " in printed.err
    assert json.loads((tmp_path / "out" / "report.json").read_text()) == report
    assert (tmp_path / "out" / "report.html").read_text().count("<svg") == 1
    assert [(cell["arm"], cell["depth"]) for cell in report["cells"]] == [
        ("bf16", 0.0),
        ("bf16", 1.0),
        ("naive", 0.0),
        ("naive", 1.0),
    ]
    [pair] = report["pairs"]
    assert pair["log_probability_change"] != 0
    assert cli.main([str(each) for each in [*common, "--length", 900]]) == 2
    assert "length=900: the model's context is 768" in capsys.readouterr().err
    assert cli.main([str(each) for each in [*common, "--length", 600, "--tasks", "poem"]]) == 2
    assert "task 'poem' is unknown" in capsys.readouterr().err
    assert cli.main([str(each) for each in [*common, "--length", 600, "--out", __file__]]) == 2
    assert f"--out {__file__}: {__file__} is a file" in capsys.readouterr().err
