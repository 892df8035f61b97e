"""`oscar-jax retrieve`: what a 2-bit cache still finds in a long prompt, beside the plain cache on the same samples.

A sample's answer is scored by its log-probability, fed token by token after the prompt, and by whether greedy decoding
writes it, at once or after a few other tokens (a colon, a new line); of a list also by how many of its parts it writes,
in any order, much as RULER scores what a model writes (which ignores case, and lets it write longer).
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from calib.manifest import package_versions
from oscar_jax import calibrate, corpus, paired
from oscar_jax import report as reports
from oscar_jax.evaluate import BASELINE, CHUNK, PLAIN_DTYPE, artifacts, check_request, label, requested_arms
from oscar_jax.generate import stop_tokens
from oscar_jax.layer_codes import LayerCodes
from oscar_jax.longcontext import WITHOUT_DEPTH, Haystack, Sample, make_sample
from oscar_jax.models import LoadedModel, load
from oscar_jax.step import Step, cache_config, make_step, prefill
from pallas_kernels.tiers import Tiers
from pallas_kernels.transform_code import TransformCodes

BATCH = 4
HAYSTACK_CHARACTERS = 4_000_000  # more would only take longer to tokenize
LEAD = 8  # tokens that greedy decoding may write beside the answer's own


class Score(NamedTuple):
    """Of one sample in one arm.

    Attributes:
        exact: greedy decoding writes the answer, whole, in as many tokens as it has and `LEAD` more; fewer where the
            context or, by a stop token, the text ends.
        found: share of the answer's parts that are in what it writes; of an answer without parts, whether it is exact.
        log_probability: of the whole answer, nats.
    """

    exact: bool
    found: float
    log_probability: float


def make_samples(
    haystack: Haystack,
    tasks: Sequence[str],
    lengths: Sequence[int],
    depths: Sequence[float],
    *,
    samples: int,
    tiers: Tiers,
    seed: int = 0,
) -> list[Sample]:
    """`samples` of each task, length and depth; of list tasks of each length. Numbers differ between depths."""
    made = []
    for task in tasks:
        for length in lengths:
            places = [0.0] if task in WITHOUT_DEPTH else depths
            made += [
                make_sample(task, haystack, length=length, depth=depth, tiers=tiers, seed=seed, index=number)
                for number, depth in enumerate(depth for depth in places for _ in range(samples))
            ]
    return made


def score(
    model: LoadedModel,
    codes: TransformCodes | LayerCodes | None,
    samples: Sequence[Sample],
    *,
    tiers: Tiers,
    batch: int = BATCH,
    chunk: int = CHUNK,
    implementation: str | None = None,
    progress: bool = True,
    description: str = "retrieving",
) -> list[Score]:
    """Scores of the samples through one arm's cache.

    Args:
        codes: None is the plain cache.
        batch: most sequences at once, all of one length. chunk: tokens of a call.

    Raises:
        ValueError: a sample longer than the model's context.
    """
    longest = max(len(sample.tokens) for sample in samples)
    if longest > model.config.max_position:
        raise ValueError(f"length={longest}: the model's context is {model.config.max_position}; use a shorter one.")
    if codes is None:
        tiers, implementation = dataclasses.replace(tiers, recent=max(tiers.recent, longest + LEAD - tiers.sink)), None
    batch = min(batch, len(samples))
    config = cache_config(
        model.config, max_length=longest + LEAD, tiers=tiers, plain_dtype=PLAIN_DTYPE, batch=batch,
        implementation=implementation,
    )  # fmt: skip
    step = make_step(model.decoder, config, codes)
    by_length: dict[int, list[int]] = {}
    for i, sample in enumerate(samples):
        by_length.setdefault(len(sample.tokens), []).append(i)
    groups = [indices[i : i + batch] for indices in by_length.values() for i in range(0, len(indices), batch)]
    scores: dict[int, Score] = {}
    for group in tqdm(groups, desc=description, unit="batch", disable=not progress, file=sys.stderr):
        rows = [samples[i] for i in [*group, *group[-1:] * (batch - len(group))]]
        scores |= zip(group, _answers(step, rows, model.tokenizer, chunk), strict=False)
    return [scores[i] for i in range(len(samples))]


def _answers(step: Step, samples: Sequence[Sample], tokenizer: Any, chunk: int) -> list[Score]:
    """Of one batch, all of one length."""
    own = np.asarray([sample.answer_tokens for sample in samples], np.int32)
    targets = np.zeros((len(samples), own.max()), np.int32)
    for row, sample in zip(targets, samples, strict=True):
        row[: sample.answer_tokens] = sample.tokens[-sample.answer_tokens :]
    prompts = [sample.tokens[: -sample.answer_tokens].tolist() for sample in samples]
    first, cache = prefill(step, step.init(), prompts, chunks=(chunk,))
    asked, logits = jax.tree.map(jnp.copy, cache), first[:, None]  # a step donates the cache it gets
    if targets.shape[1] > 1:
        later, _ = step(cache, targets[:, :-1], own - 1, output="all")
        logits = jnp.concatenate([logits, later], axis=1)
    right, log_p = map(np.asarray, _judge(logits, targets))
    at_once = [bool(right[row, :count].all()) for row, count in enumerate(own)]
    scores = [
        Score(exact, float(exact), float(log_p[row, :count].sum(dtype=np.float64)))
        for row, (exact, count) in enumerate(zip(at_once, own, strict=True))
    ]
    if all(at_once):
        return scores
    lead = min(LEAD, step.decoder.config.max_position - len(samples[0].tokens))
    written, room = [np.asarray(first.argmax(-1))], own + lead
    while len(written) < room.max():
        first, asked = step(asked, written[-1][:, None], (len(written) < room).astype(np.int32))
        written.append(np.asarray(first.argmax(-1)))
    stops, found = list(stop_tokens(tokenizer)), []
    for sample, score, target, row in zip(samples, scores, targets, np.stack(written, axis=1), strict=True):
        if score.exact:
            found.append(score)
            continue
        row = row[: sample.answer_tokens + lead]
        ended = np.flatnonzero(np.isin(row, stops))
        answer, text = map(tokenizer.decode, (target[: sample.answer_tokens], row[: ended[0]] if ended.size else row))
        exact = answer.strip() in text
        share = float(np.mean([part in text for part in sample.parts])) if sample.parts else float(exact)
        found.append(score._replace(exact=exact, found=share))
    return found


@jax.jit
def _judge(logits, targets):
    log_p = jax.nn.log_softmax(logits, axis=-1)
    return log_p.argmax(-1) == targets, jnp.take_along_axis(log_p, targets[..., None], axis=-1)[..., 0]


def summarize(
    samples: Sequence[Sample], scores: Mapping[str, Sequence[Score]], *, tiers: Tiers
) -> dict[str, list[dict[str, Any]]]:
    """The report's `cells` and `pairs`.

    Returns:
        `cells`: for each arm, task, length and depth `samples`, `exact` and `found` (shares), `log_probability` (mean
        of a whole answer, nats) and `in_history` (share of samples whose facts are all 2-bit in the arms that have
        codes; None for lists of words). `pairs`: for each arm but the baseline, task and length `samples`,
        `in_history`, `exact` and `baseline_exact`, `difference_points`, `mcnemar_p`, `found` and `baseline_found`, and
        with paired bootstrap intervals `found_points` and `log_probability_change`.
    """
    cells, pairs = [], []
    history = [sample.in_history(tiers) for sample in samples]
    base = scores[BASELINE]

    def share_in_history(indices: Sequence[int]) -> float | None:
        inside = [each for i in indices if (each := history[i]) is not None]
        return float(np.mean(inside)) if inside else None

    for arm, found in scores.items():
        for key, indices in _grouped(samples, lambda sample: (sample.task, len(sample.tokens), sample.depth)).items():
            task, length, depth = key
            cells.append(
                {
                    "arm": arm,
                    "task": task,
                    "length": length,
                    "depth": depth,
                    "samples": len(indices),
                    "exact": float(np.mean([found[i].exact for i in indices])),
                    "found": float(np.mean([found[i].found for i in indices])),
                    "log_probability": float(np.mean([found[i].log_probability for i in indices])),
                    "in_history": share_in_history(indices),
                }
            )
        if arm == BASELINE:
            continue
        for (task, length), indices in _grouped(samples, lambda sample: (sample.task, len(sample.tokens))).items():
            ours, theirs = (np.asarray([each[i].exact for i in indices]) for each in (found, base))
            shares, before = (np.asarray([each[i].found for i in indices]) for each in (found, base))
            points = 100 * (shares - before)
            change = np.asarray([found[i].log_probability - base[i].log_probability for i in indices])
            pairs.append(
                {
                    "arm": arm,
                    "task": task,
                    "length": length,
                    "samples": len(indices),
                    "in_history": share_in_history(indices),
                    "exact": float(ours.mean()),
                    "baseline_exact": float(theirs.mean()),
                    "difference_points": float(100 * (ours.mean() - theirs.mean())),
                    "mcnemar_p": paired.mcnemar(ours, theirs),
                    "found": float(shares.mean()),
                    "baseline_found": float(before.mean()),
                    "found_points": float(points.mean()),
                    "found_points_interval": paired.bootstrap(points, np.ones(len(points))),
                    "log_probability_change": float(change.mean()),
                    "log_probability_change_interval": paired.bootstrap(change, np.ones(len(change))),
                }
            )
    return {"cells": cells, "pairs": pairs}


def _grouped(samples: Sequence[Sample], key) -> dict[Any, list[int]]:
    groups: dict[Any, list[int]] = {}
    for i, sample in enumerate(samples):
        groups.setdefault(key(sample), []).append(i)
    return groups


def rows(pairs: Sequence[Mapping[str, Any]], artifacts: Mapping[str, str]) -> list[tuple[str, ...]]:
    """The report's pairs for people, the header first; an arm of an artifact is followed by its path.

    "in 2 bits" is the share of samples whose facts are: where it is small, arms are compared on what both keep plain.
    """
    exact, change = ("exact", "bf16 exact", "points", "McNemar p"), ("log-prob. change", "95 % interval")
    cells: list[tuple[str, ...]] = [("task", "tokens", "in 2 bits", "arm", *exact, "found", "bf16 found", *change)]
    for pair in pairs:
        interval = pair["log_probability_change_interval"]
        cells.append(
            (
                pair["task"],
                str(pair["length"]),
                "-" if pair["in_history"] is None else f"{100 * pair['in_history']:.0f} %",
                label(pair["arm"], artifacts.get(pair["arm"])),
                f"{100 * pair['exact']:.1f} %",
                f"{100 * pair['baseline_exact']:.1f} %",
                f"{pair['difference_points']:+.1f}",
                f"{pair['mcnemar_p']:.3f}",
                f"{100 * pair['found']:.1f} %",
                f"{100 * pair['baseline_found']:.1f} %",
                f"{pair['log_probability_change']:+.3f}",
                "-" if interval is None else f"{interval[0]:+.3f} .. {interval[1]:+.3f}",
            )
        )
    return cells


def run(args: argparse.Namespace) -> int:
    """`oscar-jax retrieve`."""
    begin = time.perf_counter()
    check_request(args)
    if args.out:
        reports.require_matplotlib("--out")
        reports.require_place("--out", args.out, folder=True)
    model = load(args.model)
    if max(args.length) > model.config.max_position:
        raise ValueError(
            f"length={max(args.length)}: the model's context is {model.config.max_position}; use a shorter one."
        )
    tiers = Tiers(sink=args.sink, recent=args.recent)
    cache_config(model.config, max_length=max(args.length), tiers=tiers, implementation=args.implementation)
    encode = calibrate.encoder(model)
    if args.haystack:
        text, source = corpus.read_text(args.haystack), str(args.haystack)
    else:
        text, source = "\n\n".join(corpus.wiki_summaries("heldout")), "held-out Wikipedia summaries"
    haystack = Haystack(text[:HAYSTACK_CHARACTERS], encode)
    samples = make_samples(
        haystack, args.tasks, args.length, args.depths, samples=args.samples, tiers=tiers, seed=args.seed
    )
    arms, calibration = requested_arms(args, model, length=max(args.length))
    scores = {
        name: score(
            model, codes, samples, tiers=tiers, batch=args.batch, implementation=args.implementation, description=name
        )
        for name, codes in {BASELINE: None, **arms}.items()
    }
    found = {
        **summarize(samples, scores, tiers=tiers),
        "model": model.identity.model_id,
        "haystack": source,
        "seed": args.seed,
        "artifacts": artifacts(args, arms),
        "calibration": calibration,
        "batch": args.batch,
        "implementation": args.implementation,
        **dataclasses.asdict(tiers),
        "seconds": time.perf_counter() - begin,
        "versions": package_versions(),
    }
    table = rows(found["pairs"], found["artifacts"])
    print(reports.aligned(table), file=sys.stderr if args.json else sys.stdout)
    if args.json:  # before files: a full disk must not cost the run
        print(json.dumps(found))
    if args.out:
        files = reports.write_retrieval(Path(args.out), found, table=table)
        print(f"wrote {', '.join(map(str, files))}", file=sys.stderr)
    return 0
