"""Long-context tasks from any text: RULER's retrieval, tracing and counting (arXiv 2404.06654), and verbatim quotes.

Every sample is a pure function of its haystack, task, length, depth and seed. Prompt and answer together have exactly
the asked number of tokens, so that samples of one length form batches. Differences from RULER: haystacks are whole
sentences of the given text, the answers of list tasks have an order (that of the text), so that they have a
probability, and nothing is written as an example beforehand.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Callable, Sequence

import numpy as np

from oscar_jax.corpus import Encode
from pallas_kernels.tiers import Tiers

NEEDLES = 4  # hidden sentences of the tasks with several
HOPS = 4  # assignments after the first one of a chain
QUOTE_CUE, QUOTE_ANSWER = 16, 16  # tokens
COMMON_WORDS, FREQUENT_WORDS = 5, 3
_LEXICON = 2000  # most words that a list of uncommon words is drawn from

_ADJECTIVES = "amber brisk calm dusty eager faded gentle hollow icy jolly keen lively mellow narrow odd pale".split()
_NOUNS = "anchor basket candle desert engine feather garden harbor island jacket kettle lantern meadow needle".split()
_LETTERS = "abcdefghijklmnopqrstuvwxyz"


@dataclasses.dataclass(frozen=True)
class Sample:
    """One prompt with its answer.

    Attributes:
        task: of `TASKS`.
        depth: where the (first) fact stands, 0 the start and 1 the end of the haystack; None where it is everywhere.
        tokens: int32 `[length]`, prompt then answer.
        answer_tokens: how many of them, at the end, are the answer.
        facts: ranges `[begin, end)` of tokens that must be recalled; empty where they are everywhere.
        parts: the answer's numbers, names or words, in its order; of a quote none, for it is one piece.
    """

    task: str
    depth: float | None
    tokens: np.ndarray
    answer_tokens: int
    facts: tuple[tuple[int, int], ...]
    parts: tuple[str, ...] = ()

    def in_history(self, tiers: Tiers) -> bool | None:
        """Whether every fact is wholly 2-bit when the answer begins; None without facts."""
        end = tiers.history_end(len(self.tokens) - self.answer_tokens - 1)
        return all(tiers.sink <= begin and stop <= end for begin, stop in self.facts) if self.facts else None


class Haystack:
    """A text as tokens, sentence by sentence.

    Attributes:
        encode: the tokenizer.
        tokens: int32 `[n]`.
        starts: where sentences begin in `tokens`, ascending, and n.
        words: its distinct words of at least four letters, sorted.
    """

    def __init__(self, text: str, encode: Encode):
        sentences = re.split(r"(?<=[.!?])(?=\s)", text)
        # Sentences are tokenized one by one: what stands between two of them then never depends on them.
        pieces = [np.asarray(encode(sentence), np.int32) for sentence in sentences if sentence.strip()]
        self.encode = encode
        self.tokens = np.concatenate([np.zeros(0, np.int32), *pieces])
        self.starts = np.cumsum([0, *map(len, pieces)])
        self.words = sorted(set(re.findall(r"\b[a-z]{4,}\b", text)))

    def piece(self, tokens: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """So many tokens from the start of a random sentence on, and the offsets at which sentences begin in them.

        Raises:
            ValueError: a text shorter than that.
        """
        first = self.starts[self.starts <= len(self.tokens) - tokens]
        if not first.size:
            raise ValueError(
                f"haystack: {len(self.tokens)} tokens, {tokens} are needed; give a longer text or a shorter length."
            )
        begin = int(rng.choice(first))
        inside = self.starts[(self.starts >= begin) & (self.starts <= begin + tokens)]
        return self.tokens[begin : begin + tokens], inside - begin


@dataclasses.dataclass(frozen=True)
class _Request:
    """What a task's builder is given; `rng` decides the rest."""

    task: str
    haystack: Haystack
    length: int
    depth: float
    tiers: Tiers
    rng: np.random.Generator

    def encode(self, text: str) -> np.ndarray:
        return np.asarray(self.haystack.encode(text), np.int32)

    def room(self, *parts: np.ndarray) -> int:
        """Tokens left beside these parts."""
        left = self.length - sum(map(len, parts))
        if left < 1:
            raise ValueError(
                f"length={self.length}: task {self.task!r} needs at least {self.length - left + 1} tokens; use a "
                "longer one."
            )
        return left


def make_sample(
    task: str, haystack: Haystack, *, length: int, depth: float, tiers: Tiers, seed: int, index: int
) -> Sample:
    """Sample number `index` of a task.

    Args:
        length: tokens of prompt and answer together.
        depth: 0 to 1; list tasks ignore it.
        tiers: `quote` takes its passage from what is history when it is asked for.

    Raises:
        ValueError: an unknown task, a depth out of range, a length too short for the task or too long for the haystack.
    """
    if task not in TASKS:
        raise ValueError(f"task {task!r} is unknown; expected one of {', '.join(TASKS)}.")
    if not 0 <= depth <= 1:
        raise ValueError(f"depth={depth}: expected 0 (start of the haystack) to 1 (its end).")
    rng = np.random.default_rng([seed, list(TASKS).index(task), length, index])
    return TASKS[task](_Request(task, haystack, length, depth, tiers, rng))


def _needles(request: _Request, *, keys: int, values: int, asked: int) -> Sample:
    """Sentences that give numbers to keys; the values of the first `asked` keys are asked for, in the text's order."""
    rng = request.rng
    pairs = [f"{a}-{b}" for a, b in itertools.product(_ADJECTIVES, _NOUNS)]
    names = [pairs[i] for i in rng.choice(len(pairs), keys, replace=False)]
    numbers = rng.choice(9_000_000, keys * values, replace=False) + 1_000_000
    facts = [
        (names[i // values], f" One of the special magic numbers for {names[i // values]} is: {number}.", str(number))
        for i, number in enumerate(numbers)
    ]
    wanted = _listed(names[:asked])
    many = asked * values > 1
    number, verb = ("numbers", "are") if many else ("number", "is")
    ask = (
        f"\n\nWhat {verb} the special magic {number} for {wanted} mentioned in the text above? The special magic "
        f"{number} for {wanted} mentioned in the text above {verb}"
    )
    # The first fact stands at the depth, the others at equal distances behind it and, past the end, from the start on.
    places = [(request.depth + i / len(facts)) % 1 if i else request.depth for i in range(len(facts))]
    order = sorted(range(len(facts)), key=lambda i: places[i])
    answer = [facts[i][2] for i in order if facts[i][0] in names[:asked]]
    texts = [(places[i], facts[i][1], facts[i][0] in names[:asked]) for i in order]
    head = "Special magic numbers are hidden within the following text. Memorize them.\n\n"
    return _woven(request, head, texts, ask, answer)


def _variables(request: _Request) -> Sample:
    """A number is assigned to a variable and handed on from one to the next; which variables have it?"""
    rng = request.rng
    names: list[str] = []
    while len(names) <= HOPS:
        name = "".join(rng.choice(list(_LETTERS.upper()), 5))
        names += [name] if name not in names else []
    value = rng.integers(10_000, 100_000)
    statements = [f" VAR {names[0]} = {value}.", *(f" VAR {b} = VAR {a}." for a, b in itertools.pairwise(names))]
    places = request.depth + (1 - request.depth) * np.arange(len(names)) / len(names)
    texts = [(float(place), text, True) for place, text in zip(places, statements, strict=True)]
    head = "Memorize the chain of variable assignments hidden in the following text.\n\n"
    ask = f"\n\nWhich variables are assigned the value {value} in the text above? In order of assignment, they are"
    return _woven(request, head, texts, ask, names)


def _woven(
    request: _Request, head: str, facts: Sequence[tuple[float, str, bool]], ask: str, answer: Sequence[str]
) -> Sample:
    """Facts (place 0 to 1 ascending, text, whether asked for) between sentences of the haystack, and the question."""
    before, question, target = (request.encode(text) for text in (head, ask, " " + _listed(answer)))
    inserts = [request.encode(text) for _, text, _ in facts]
    room = request.room(before, question, target, *inserts)
    filler, starts = request.haystack.piece(room, request.rng)
    parts, spans, done, at = [before], [], 0, len(before)
    for (place, _, wanted), insert in zip(facts, inserts, strict=True):
        cut = int(starts[np.abs(starts - place * room).argmin()])
        parts += [filler[done:cut], insert]
        at += cut - done
        spans += [(at, at + len(insert))] if wanted else []
        done, at = cut, at + len(insert)
    tokens = np.concatenate([*parts, filler[done:], question, target])
    return Sample(request.task, request.depth, tokens, len(target), tuple(spans), tuple(answer))


def _quote(request: _Request) -> Sample:
    """The beginning of a passage of the haystack, to be continued word for word.

    Depth runs over the history that the first answered query sees, so the passage is always 2-bit.
    """
    tiers, passage = request.tiers, QUOTE_CUE + QUOTE_ANSWER
    question = request.encode("\n\nThe text above says, word for word:")
    room = request.room(question, np.zeros(passage, np.int32))
    filler, starts = request.haystack.piece(room, request.rng)
    end = min(room, int(tiers.history_end(request.length - QUOTE_ANSWER - 1)))
    inside = starts[(starts >= tiers.sink) & (starts + passage <= end)]
    if not inside.size:
        raise ValueError(
            f"length={request.length}: with sink={tiers.sink} and recent={tiers.recent} no sentence's first {passage} "
            "tokens are history; use a longer one."
        )
    begin = int(inside[np.abs(inside - (tiers.sink + request.depth * (end - passage - tiers.sink))).argmin()])
    tokens = np.concatenate([filler, question, filler[begin : begin + passage]])
    return Sample(request.task, request.depth, tokens, QUOTE_ANSWER, ((begin, begin + passage),))


def _common_words(request: _Request) -> Sample:
    """A few words occur ten times as often as the many others; which?"""
    words = request.haystack.words
    if len(words) < COMMON_WORDS + 1:
        raise ValueError(f"haystack: {len(words)} different words, more than {COMMON_WORDS} are needed; give more.")
    words = [words[i] for i in request.rng.permutation(len(words))[:_LEXICON]]
    # Three parts of ten are common words, or more where there are few others: those are at most a tenth as frequent.
    common = 0.3 / COMMON_WORDS
    others = min(0.7 / (len(words) - COMMON_WORDS), common / 10)
    return _word_list(
        request,
        words,
        np.asarray([common] * COMMON_WORDS + [others] * (len(words) - COMMON_WORDS)),
        wanted=COMMON_WORDS,
        ask=f"\n\nThe {COMMON_WORDS} most common words of the list above, in the order of their first appearance, are",
        by_appearance=True,
    )


def _frequent_words(request: _Request) -> Sample:
    """Invented words with frequencies that fall with the square of their rank; which are the most frequent?"""
    words: dict[str, None] = {}
    while len(words) < 64:
        words["".join(request.rng.choice(list(_LETTERS), 5))] = None
    frequencies = 1 / np.arange(1, len(words) + 1) ** 2.0
    ask = f"\n\nThe {FREQUENT_WORDS} most frequent words of the list above, the most frequent one first, are"
    return _word_list(request, list(words), frequencies, wanted=FREQUENT_WORDS, ask=ask, by_appearance=False)


def _word_list(
    request: _Request, words: list[str], frequencies: np.ndarray, *, wanted: int, ask: str, by_appearance: bool
) -> Sample:
    """A shuffled list of words; the first `wanted` are the answer and are made to stand out whatever the length."""
    head, question = request.encode("Read the following list of words and count them.\n\n"), request.encode(ask)
    pieces = [request.encode(f" {word}") for word in words]
    sizes = np.asarray([len(piece) for piece in pieces])
    room = request.room(head, question, *(request.encode(f" {word},") for word in words[:wanted]))
    shares = frequencies / frequencies.sum()
    counts = np.floor(shares * room / (shares @ sizes)).astype(int)
    ahead = counts[:wanted] if by_appearance else counts[:wanted] - np.append(counts[1:wanted], counts[wanted:].max())
    if counts[:wanted].min() < 2 or ahead.min() < 1:
        raise ValueError(f"length={request.length}: too short for task {request.task!r}; use a longer one.")
    # Words too rare for one occurrence share what is left, one each.
    for i in range(wanted, len(words)):
        counts[i] += int(counts[i] == 0 and (counts @ sizes) + sizes[i] <= room)
    shuffled = request.rng.permutation(np.repeat(np.arange(len(words)), counts))
    order = [int(i) for i in dict.fromkeys(shuffled.tolist()) if i < wanted] if by_appearance else range(wanted)
    answer = [words[i] for i in order]
    target = request.encode(" " + _listed(answer))
    body = np.concatenate([pieces[i] for i in shuffled])
    left = request.length - len(head) - len(body) - len(question) - len(target)
    padding = np.resize(request.encode("\n"), max(left, 0))
    tokens = np.concatenate([head, padding, body, question, target])
    return Sample(request.task, None, tokens[-request.length :], len(target), (), tuple(answer))


def _listed(words: Sequence[str]) -> str:
    return ", ".join(words)


TASKS: dict[str, Callable[[_Request], Sample]] = {
    "needle": lambda request: _needles(request, keys=1, values=1, asked=1),
    "multi-key": lambda request: _needles(request, keys=NEEDLES, values=1, asked=1),
    "multi-value": lambda request: _needles(request, keys=1, values=NEEDLES, asked=1),
    "multi-query": lambda request: _needles(request, keys=NEEDLES, values=1, asked=NEEDLES),
    "variables": _variables,
    "common-words": _common_words,
    "frequent-words": _frequent_words,
    "quote": _quote,
}
"""Builders by name."""

WITHOUT_DEPTH = ("common-words", "frequent-words")
