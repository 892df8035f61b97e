"""Sessions: greedy and sampled decoding of a batch, stop tokens, limits, drafted tokens, what does not fit."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from oscar_jax.models import plain_attention, random_decoder
from oscar_jax.sampling import Sampling
from oscar_jax.session import Session
from oscar_jax.step import Step
from tests.oscar_jax.tiny import BATCH, CHUNK, CONFIG, LENGTH, tiny_step, tokens

GREEDY = [Sampling()] * BATCH


@pytest.fixture(scope="module")
def decoder():
    return random_decoder(CONFIG)


@pytest.fixture(scope="module")
def step(decoder) -> Step:
    return tiny_step(decoder)


def new(step: Step) -> Session:
    return Session(step, chunks=(CHUNK,))


def generated(step: Step, prompts, sampling=GREEDY, **options) -> list[list[int]]:
    """The tokens of each sequence, without the Nones after its end."""
    session = new(step)
    options = {"max_tokens": [10] * BATCH, **options}
    columns = list(session.decode(session.prefill(prompts), sampling, **options))
    rows = [list(row) for row in zip(*columns, strict=True)]
    for row, prompt, length in zip(rows, prompts, session.lengths, strict=True):
        ended = row.index(None) if None in row else len(row)
        assert set(row[ended:]) <= {None}
        assert length == len(prompt) + ended - 1
    np.testing.assert_array_equal(session.cache.lengths, session.lengths)
    return [[token for token in row if token is not None] for row in rows]


def test_greedy_tokens_are_the_argmax_of_a_forward_pass_without_a_cache(decoder, step):
    prompts = tokens(3, 1, 2)  # short enough that nothing is in 2 bits
    rows = generated(step, prompts, max_tokens=[8, 9, 7])
    assert [len(row) for row in rows] == [8, 9, 7]
    for prompt, row in zip(prompts, rows, strict=True):
        whole = jnp.asarray([[*prompt, *row]])
        hidden, _, _ = decoder(whole, jnp.arange(whole.shape[1])[None], plain_attention(CONFIG), None)
        logits = np.asarray(decoder.logits(hidden)[0, len(prompt) - 1 : -1])
        chosen = logits[np.arange(len(row)), row]
        assert (logits.max(1) - chosen < 1e-4).all()  # up to ties


def test_a_sequence_that_ended_does_not_disturb_the_others(step):
    prompts = tokens(5, 20, 33)
    free = generated(step, prompts, max_tokens=[12] * BATCH)
    stops = {free[0][2], free[2][5]}
    stopped = generated(step, prompts, max_tokens=[12, 12, 12], stop_tokens=stops)
    for row, whole in zip(stopped, free, strict=True):
        end = next((i + 1 for i, token in enumerate(whole) if token in stops), len(whole))
        assert row == whole[:end]
    assert len(stopped[0]) <= 3
    assert len({len(row) for row in stopped}) > 1
    limited = generated(step, prompts, max_tokens=[1, 12, 4])
    assert limited == [free[0][:1], free[1], free[2][:4]]


def test_a_sequence_is_the_same_whatever_its_neighbours(step):
    prompts = tokens(5, 20, 33)
    sampling = [Sampling(9.0, seed=1), Sampling(9.0, top_k=20, seed=2), Sampling(9.0, top_p=0.9, seed=3)]
    together = generated(step, prompts, sampling)
    others = tokens(40, 20, 2)
    others[1] = prompts[1]
    beside = generated(step, others, [Sampling(), sampling[1], Sampling(2.0)])
    assert beside[1] == together[1]
    assert together == generated(step, prompts, sampling)
    reseeded = generated(step, prompts, [Sampling(9.0, seed=seed) for seed in (4, 5, 6)])
    assert all(a != b for a, b in zip(reseeded, together, strict=True))


def test_verified_drafts_give_the_tokens_of_plain_decoding(step):
    """Drafts of four tokens, each with one wrong guess that is taken back, over prompts that reach the history."""
    prompts = tokens(30, 20, 6)
    expected = generated(step, prompts, max_tokens=[16] * BATCH)
    session = new(step)
    first = np.asarray(session.prefill(prompts)).argmax(-1)
    rows = [[int(token)] for token in first]
    while len(rows[0]) < 12:
        done = len(rows[0])
        draft = np.asarray([row[done - 1 : done + 3] for row in expected])
        wrong = 1 + done % 3  # the draft's first wrong token, after that many right ones
        draft[:, wrong] = (draft[:, wrong] + 1) % CONFIG.vocab_size
        choices = np.asarray(session.feed(draft, output="all")).argmax(-1)
        for row, choice in zip(rows, choices, strict=True):
            row.extend(int(token) for token in choice[:wrong])
        session.take_back([4 - wrong] * BATCH)
    assert rows == [row[: len(rows[0])] for row in expected]
    np.testing.assert_array_equal(session.lengths, [len(prompt) + len(rows[0]) - 1 for prompt in prompts])


def test_a_second_prompt_continues_the_first(step):
    prompts = tokens(40, 12, 25)
    whole = new(step).prefill(prompts)
    session = new(step)
    session.prefill([prompt[: len(prompt) // 2] for prompt in prompts])
    parts = session.prefill([prompt[len(prompt) // 2 :] for prompt in prompts])
    np.testing.assert_allclose(parts, whole, rtol=1e-4, atol=1e-4)


def test_wrong_requests_are_named(step):
    session = new(step)
    with pytest.raises(ValueError, match=r"prompt 1 is empty: expected at least one token"):
        session.prefill([[1], [], [2]])
    with pytest.raises(ValueError, match=r"prompts of \[1\] tokens: expected 3 prompts"):
        session.prefill([[1]])
    with pytest.raises(ValueError, match=rf"sequence 2: 0 stored and 73 new tokens, .* max_length={LENGTH}"):
        session.prefill(tokens(3, 4, LENGTH + 1))
    with pytest.raises(ValueError, match=r"counts=\[2, 1, 1\]: expected 0 to 1"):
        session.feed([[1], [1], [1]], [2, 1, 1])
    logits = session.prefill(tokens(3, 70, 4))
    with pytest.raises(ValueError, match=r"sequence 1: 70 stored and 3 new tokens"):
        next(session.decode(logits, GREEDY, max_tokens=[2, 4, 2]))
    with pytest.raises(ValueError, match=r"max_tokens=\[1, 0, 1\]: expected at least 1 for each of 3"):
        next(session.decode(logits, GREEDY, max_tokens=[1, 0, 1]))
    with pytest.raises(ValueError, match=r"counts=\[4, 0, 0\]: expected 0 to 3 tokens behind the longest"):
        session.take_back([4, 0, 0])
    session.take_back([0, 2, 0])
    with pytest.raises(ValueError, match=r"counts=\[0, 2, 0\]"):
        session.take_back([0, 2, 0])
    np.testing.assert_array_equal(session.lengths, [3, 68, 4])
