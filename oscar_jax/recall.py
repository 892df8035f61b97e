"""Verbatim recall past the demotion horizon: `python -m oscar_jax.recall --model smollm2-135m --artifact DIR`.

Every prompt quotes a number. The model writes on, for more tokens than the recent window holds, and is then asked for
the number, which by then is history. What it writes is chosen by the plain cache and fed, token by token, to both; so
they are asked the same question after the same text, and differ in what they remember alone.
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any, NamedTuple

import jax
import numpy as np

from calib import artifact
from oscar_jax import models
from oscar_jax.sampling import Sampling
from oscar_jax.session import Session
from oscar_jax.step import cache_config, make_step
from pallas_kernels.tiers import Tiers
from pallas_kernels.transform_code import TransformCodes

BEYOND = 65  # generated tokens past the recent window before the question
DIGITS = 5
ANSWER_TOKENS = 8
CHUNK = 16
OPENINGS = (
    "It had rained all day when the porter came down the stairs and opened the big ledger on the table.",
    "Nobody in the village knew who had built the tower, but the keeper knew what was written on its wall.",
    "The captain gathered the crew on deck in the morning and read to them from the letter of the owner.",
)
COLOURS = ("red", "blue", "green", "white", "black", "brown")
THINGS = ("door", "box", "boat", "room", "gate", "bridge", "garden", "train", "tower", "lamp")


class Probe(NamedTuple):
    """A prompt that quotes a number, the question for it, and the number."""

    prompt: str
    question: str
    number: str


def probes(count: int, *, seed: int) -> list[Probe]:
    """Different things and numbers; at most as many as there are things of all colours."""
    pairs = [(colour, thing) for thing in THINGS for colour in COLOURS]
    if not 1 <= count <= len(pairs):
        raise ValueError(f"prompts={count}: expected 1 to {len(pairs)}.")
    rng = np.random.default_rng(seed)
    found = []
    for n, place in enumerate(rng.permutation(len(pairs))[:count]):
        name = " ".join(pairs[place])
        number = "".join(map(str, rng.integers(0, 10, DIGITS)))
        opening = OPENINGS[n % len(OPENINGS)]
        prompt = f'{opening} There it said: "The number of the {name} is {number}." Then they all went back to work,'
        found.append(Probe(prompt, f'\n\nAnd there it said: "The number of the {name} is', number))
    return found


def recall(
    model: models.LoadedModel, codes: TransformCodes, probed: list[Probe], *, tiers: Tiers, plain_dtype: str
) -> dict[str, Any]:
    """Answers with a plain cache and with a 2-bit one.

    Args:
        model: with a tokenizer.
        tiers: of the 2-bit cache, whose window decides how much is written before the question.
        plain_dtype: of the plain cache and of the windows of the other.

    Returns:
        `prompts`, `generated` tokens before the question, `plain_right`, `both_right` (of those), `share`
        (of the plain cache's right answers, those that the 2-bit one gives too), and every answer.
    """
    generated = tiers.recent + BEYOND
    prompts, questions = (
        [model.tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
        for texts in ([probe.prompt for probe in probed], [probe.question for probe in probed])
    )
    length = max(map(len, prompts)) + generated + max(map(len, questions)) + ANSWER_TOKENS
    plain, answers = Tiers(sink=0, recent=length), []
    written = None
    for these_codes, these_tiers in ((None, plain), (codes, tiers)):
        config = cache_config(
            model.config, max_length=length, batch=len(probed), tiers=these_tiers, plain_dtype=plain_dtype
        )
        session = Session(make_step(model.decoder, config, these_codes), chunks=(CHUNK,))
        logits = session.prefill(prompts)
        if written is None:
            written = _greedy(session, logits, generated)
            session.feed(written[:, -1:])
        else:
            for tokens in written.T:
                session.feed(tokens[:, None])
        answers.append(_answers(model, session, questions))
    right = [[answer.startswith(probe.number) for answer, probe in zip(arm, probed, strict=True)] for arm in answers]
    both = sum(a and b for a, b in zip(*right, strict=True))
    return {
        "prompts": len(probed),
        "generated": generated,
        "plain_right": sum(right[0]),
        "int2_right": sum(right[1]),
        "both_right": both,
        "share": both / max(1, sum(right[0])),
        "numbers": [probe.number for probe in probed],
        "plain": answers[0],
        "int2": answers[1],
    }


def _greedy(session: Session, logits: jax.Array, count: int) -> np.ndarray:
    """The next tokens `[B, count]`, of which the last is not stored yet."""
    rows = len(session.lengths)
    return np.asarray(list(session.decode(logits, [Sampling()] * rows, max_tokens=[count] * rows))).T


def _answers(model: models.LoadedModel, session: Session, questions: list[list[int]]) -> list[str]:
    """What follows each question, without the space before it."""
    fed = np.zeros((len(questions), max(map(len, questions))), np.int32)
    for row, question in zip(fed, questions, strict=True):
        row[: len(question)] = question
    logits = session.feed(fed, [len(question) for question in questions])
    return [model.tokenizer.decode(row).strip() for row in _greedy(session, logits, ANSWER_TOKENS)]


def main() -> int:
    """The command; prints the counts, and writes everything to --out."""
    parser = argparse.ArgumentParser(prog="python -m oscar_jax.recall", description="Recall of a quoted number.")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--artifact", required=True)
    parser.add_argument("--prompts", type=int, default=60)
    parser.add_argument("--sink", type=int, default=16)
    parser.add_argument("--recent", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out")
    args = parser.parse_args()
    model = models.load(args.model)
    codes, manifest = artifact.load(args.artifact, model=model.identity)
    tiers = Tiers(sink=args.sink, recent=args.recent)
    found = recall(model, codes, probes(args.prompts, seed=args.seed), tiers=tiers, plain_dtype="bfloat16")
    counts = {name: value for name, value in found.items() if not isinstance(value, list)}
    if args.out:
        about = {
            "command": f"python -m oscar_jax.recall --model {args.model} --artifact DIR --prompts {args.prompts} "
            f"--sink {args.sink} --recent {args.recent} --seed {args.seed}",
            "model": args.model, "recipe": manifest.recipe, "calibration": manifest.text and manifest.text.description,
            "calibration_tokens": manifest.text and manifest.text.tokens,
            "jax": jax.__version__, "device": jax.devices()[0].device_kind,
        }  # fmt: skip
        with open(args.out, "w") as file:
            file.write(json.dumps(about | found, indent=1) + "\n")
    print(json.dumps(counts))
    return 0


if __name__ == "__main__":
    sys.exit(main())
