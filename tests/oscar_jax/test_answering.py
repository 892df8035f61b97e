"""Many prompts at once, as a benchmark harness asks: equal to one at a time, and budgets kept apart."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from oscar_jax import cli, generate
from oscar_jax.answering import Answerer, seeds
from oscar_jax.models import plain_attention
from oscar_jax.sampling import Sampling
from tests import tiny_model


@pytest.fixture(scope="module")
def answerer(tiny):
    return Answerer(tiny, max_length=320, max_tokens=12, rows=2)


def ids(model, text):
    return model.tokenizer(text, add_special_tokens=False)["input_ids"]


def test_log_likelihoods_equal_a_forward_without_a_cache(tiny, answerer):
    """Ragged, across a chunk's border, and one that loses its beginning."""
    text = ids(tiny, tiny_model.text(100))
    pairs = [(text[:3], text[3:8]), (text[:250], text[250:262]), (text[:400], text[400:403])]
    for (context, continuation), (log_p, greedy) in zip(pairs, answerer.log_likelihoods(pairs), strict=True):
        tokens = np.asarray([[*context, *continuation][-321:]])
        positions = np.arange(tokens.shape[1] - 1)[None]
        hidden = tiny.decoder(jnp.asarray(tokens[:, :-1]), positions, plain_attention(tiny.config), None)[0]
        rows = np.asarray(jax.nn.log_softmax(tiny.decoder.logits(hidden[0, -len(continuation) :]), axis=-1))
        assert log_p == pytest.approx(rows[np.arange(len(continuation)), continuation].sum(), abs=1e-3)
        assert greedy == (rows.argmax(-1) == continuation).all()
    best = int(rows[0].argmax())
    assert answerer.log_likelihoods([(tokens[0, :-3].tolist(), [best])])[0][1]


def test_answers_are_those_of_one_prompt_at_a_time(tiny, answerer):
    prompts = [ids(tiny, tiny_model.text(n, seed=n)) for n in (3, 5, 9)]
    sampling = [Sampling(), Sampling(temperature=1.0, seed=3), Sampling()]
    found = answerer.answers(prompts, max_tokens=[12, 6, 100], stops=[[], [], []], sampling=sampling)
    for prompt, answer, setting, budget in zip(prompts, found, sampling, (12, 6, 12), strict=True):
        alone = generate.complete(tiny, prompt, max_tokens=budget, sampling=setting)
        assert (answer.text, answer.tokens) == (alone.text, len(alone.tokens))
        assert answer.truncated == (alone.finish == "length")
    assert found[0].truncated
    # Random weights write few characters that are whole: take one that is, past the first.
    number, stop = next((i, c) for i, answer in enumerate(found) for c in answer.text[1:] if c.isascii())
    settings = {"max_tokens": [12, 6, 12][number : number + 1], "sampling": sampling[number : number + 1]}
    cut = answerer.answers([prompts[number]], stops=[[stop]], **settings)[0]
    assert cut.text == found[number].text[: found[number].text.find(stop)]
    assert not cut.truncated
    assert cut.tokens < found[number].tokens


def test_a_prompt_too_long_loses_its_beginning_and_says_so(tiny, answerer):
    prompt = ids(tiny, tiny_model.text(120))
    settings = {"max_tokens": [4], "stops": [[]], "sampling": [Sampling()]}
    whole, kept = (answerer.answers([each], **settings)[0] for each in (prompt, prompt[-316:]))
    assert (whole.prompt_cut, kept.prompt_cut) == (len(prompt) - 316, 0)
    assert whole.text == kept.text


def test_draws_differ_by_sequence_and_repeat_by_seed():
    assert seeds(0, 3) == seeds(0, 4)[:3]
    assert len({*seeds(0, 100), *seeds(1, 100)}) == 200


def test_requests_that_cannot_be_met_are_one_sentence(tiny, answerer):
    with pytest.raises(ValueError, match="max_length=769: expected 2 to 768"):
        Answerer(tiny, max_length=769, max_tokens=1)
    with pytest.raises(ValueError, match="max_tokens=64: expected 1 to 63"):
        Answerer(tiny, max_length=64, max_tokens=64)
    with pytest.raises(ValueError, match="a context of 0 and a continuation of 1 tokens"):
        answerer.log_likelihoods([([], [1])])


def test_without_the_harness_the_command_says_what_to_install(tiny_folder, monkeypatch, capsys):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert cli.main(["lm-eval", "--model", str(tiny_folder), "--tasks", "gpqa"]) == 2
    assert "pip install 'oscar-jax[lm-eval]'" in capsys.readouterr().err
