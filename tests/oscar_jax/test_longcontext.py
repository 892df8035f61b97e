"""Long-context samples: what they say, where their facts stand, and that they repeat."""

import itertools
import re
from collections import Counter

import numpy as np
import pytest

from oscar_jax.longcontext import (
    COMMON_WORDS,
    FREQUENT_WORDS,
    HOPS,
    NEEDLES,
    QUOTE_ANSWER,
    QUOTE_CUE,
    TASKS,
    WITHOUT_DEPTH,
    Haystack,
    make_sample,
)
from pallas_kernels.tiers import Tiers
from tests import tiny_model

TIERS = Tiers(sink=8, recent=32, group=8, page=16)
LENGTH = 2000


def encode(text):
    return list(text.encode())


def decode(tokens):
    return bytes(np.asarray(tokens).astype(np.uint8)).decode()


@pytest.fixture(scope="module")
def haystack():
    words = tiny_model.text(6000, seed=3).split()
    return Haystack(". ".join(" ".join(words[i : i + 9]) for i in range(0, len(words), 9)) + ".", encode)


def sample(task, haystack, **changes):
    return make_sample(
        task, haystack, **{"length": LENGTH, "depth": 0.5, "tiers": TIERS, "seed": 0, "index": 0} | changes
    )


@pytest.mark.parametrize("task", TASKS)
def test_samples_have_the_length_repeat_and_differ_by_index_and_seed(task, haystack):
    first = sample(task, haystack)
    assert first.tokens.shape == (LENGTH,)
    assert first.tokens.dtype == np.int32
    assert first.tokens.tolist() == sample(task, haystack).tokens.tolist()
    assert first.tokens.tolist() != sample(task, haystack, index=1).tokens.tolist()
    assert first.tokens.tolist() != sample(task, haystack, seed=1).tokens.tolist()
    assert (first.depth is None) == (task in WITHOUT_DEPTH)
    assert first.in_history(TIERS) is (None if task in WITHOUT_DEPTH else True)
    assert task == "quote" or parts(first)[1] == " " + ", ".join(first.parts)


def parts(made):
    return decode(made.tokens[: -made.answer_tokens]), decode(made.tokens[-made.answer_tokens :])


@pytest.mark.parametrize(
    ("task", "keys", "asked", "answers"),
    [
        ("needle", 1, 1, 1),
        ("multi-key", NEEDLES, 1, 1),
        ("multi-value", 1, 1, NEEDLES),
        ("multi-query", NEEDLES, NEEDLES, NEEDLES),
    ],
)
@pytest.mark.parametrize("depth", [0.0, 0.6, 1.0])
def test_needles_answer_what_is_asked_in_the_order_of_the_text(haystack, task, keys, asked, answers, depth):
    made = sample(task, haystack, depth=depth)
    prompt, answer = parts(made)
    facts = re.findall(r"One of the special magic numbers for (\S+) is: (\d{7})\.", prompt)
    assert len({key for key, _ in facts}) == keys
    question = prompt[prompt.index("\n\nWhat") :]
    wanted = [value for key, value in facts if key in question]
    assert len({key for key, _ in facts if key in question}) == asked
    assert answer == " " + ", ".join(wanted)
    assert len(wanted) == answers
    for begin, end in made.facts:
        assert re.fullmatch(r" One of the .* is: \d{7}\.", decode(made.tokens[begin:end]))


def test_depth_moves_the_fact_through_the_haystack(haystack):
    places = [sample("needle", haystack, depth=depth).facts[0][0] / LENGTH for depth in (0, 0.25, 0.5, 0.75, 1)]
    assert places == sorted(places)
    assert places[0] < 0.06
    assert places[-1] > 0.8


def test_facts_stand_between_sentences_and_the_haystack_stays_whole(haystack):
    made = sample("needle", haystack)
    begin, end = made.facts[0]
    assert decode(made.tokens[:begin]).endswith(".")
    around = decode(made.tokens[:begin])[-100:] + decode(made.tokens[end:])[:100]
    assert around in decode(haystack.tokens)


def test_the_chain_of_variables_is_the_answer(haystack):
    prompt, answer = parts(sample("variables", haystack))
    assigned = dict(re.findall(r"VAR ([A-Z]{5}) = (?:VAR )?(\w+)\.", prompt))
    [(name, value)] = [(name, value) for name, value in assigned.items() if value.isdigit()]
    chain, following = [name], {source: target for target, source in assigned.items()}
    while chain[-1] in following:
        chain.append(following[chain[-1]])
    assert len(chain) == HOPS + 1
    assert f"assigned the value {value} " in prompt
    assert answer == " " + ", ".join(chain)


def counted(made):
    prompt, answer = parts(made)
    listed = prompt.split("count them.")[1].split("\n\nThe ")[0].split()
    return Counter(listed), answer.strip().split(", ")


def test_common_words_stand_out(haystack):
    counts, answer = counted(sample("common-words", haystack))
    assert len(answer) == COMMON_WORDS
    assert set(answer) == {word for word, _ in counts.most_common(COMMON_WORDS)}
    rest = [count for word, count in counts.items() if word not in answer]
    assert min(counts[word] for word in answer) > 2 * max(rest)


def test_frequent_words_come_by_frequency(haystack):
    counts, answer = counted(sample("frequent-words", haystack))
    ranked = counts.most_common(FREQUENT_WORDS + 1)
    assert answer == [word for word, _ in ranked[:FREQUENT_WORDS]]
    assert all(a > b for (_, a), (_, b) in itertools.pairwise(ranked))


@pytest.mark.parametrize("depth", [0.0, 0.5, 1.0])
def test_quotes_repeat_a_passage_that_is_history(haystack, depth):
    made = sample("quote", haystack, depth=depth)
    begin, end = made.facts[0]
    assert made.tokens[-(QUOTE_CUE + QUOTE_ANSWER) :].tolist() == made.tokens[begin:end].tolist()
    assert TIERS.sink <= begin
    assert end <= TIERS.history_end(LENGTH - QUOTE_ANSWER - 1)


def test_in_history_is_false_where_a_fact_is_plain(haystack):
    assert sample("needle", haystack).in_history(Tiers(sink=8, recent=1800, group=8, page=16)) is False
    assert sample("needle", haystack, depth=0).in_history(Tiers(sink=256, recent=32, group=8, page=16)) is False


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"task": "poem"}, "task 'poem' is unknown; expected one of needle"),
        ({"depth": 1.5}, r"depth=1.5: expected 0"),
        ({"length": 200}, "length=200: task 'multi-query' needs at least"),
        ({"length": 100_000}, "are needed; give a longer text"),
        ({"task": "quote", "length": 120}, "are history; use a longer one"),
        ({"task": "frequent-words", "length": 190}, "too short for task 'frequent-words'"),
    ],
)
def test_requests_that_cannot_be_met_are_one_sentence(haystack, changes, message):
    with pytest.raises(ValueError, match=message):
        sample(**{"task": "multi-query", "haystack": haystack} | changes)
