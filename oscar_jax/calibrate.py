"""Calibration of a model on a text: run it, stream its queries, keys and values into moments, fit, and store."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from calib import artifact, fit, moments
from calib.recipes import Recipe
from calib.recipes import get as get_recipe
from oscar_jax import corpus
from oscar_jax.models import Decoder, LoadedModel, load, plain_attention
from oscar_jax.step import cache_config
from pallas_kernels.tiers import Tiers
from pallas_kernels.transform_code import TransformCodes, bits_per_element

STATISTICS_SINK, STATISTICS_RECENT = 16, 64  # windows of the history statistics, whatever windows will be served
BUCKET = 2048
CONTEXTS = (2048, 8192, 32768)  # tokens, at which the command tells the bits an element
# Keys and values of the first pass up to this size are kept in host memory for the second; else the model runs again.
KEPT_BYTES = 1 << 30


class Fitted(NamedTuple):
    """One recipe's result: the codes, and the caller's part of the artifact's manifest."""

    codes: TransformCodes
    manifest: artifact.Manifest


def encoder(model: LoadedModel) -> corpus.Encode:
    """The model's tokenizer as a function of text, without special tokens.

    Raises:
        ValueError: a model without a tokenizer.
    """
    if model.tokenizer is None:
        raise ValueError(
            f"model {model.identity.model_id!r} has no tokenizer; expected one in its folder or GGUF file."
        )
    tokenizer = model.tokenizer

    def encode(text: str) -> list[int]:
        # verbose=False: texts longer than the model's context are cut into sequences later, no reason to warn.
        return tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]

    return encode


def calibrate(
    model: LoadedModel,
    text: corpus.TokenText,
    recipes: Sequence[str],
    *,
    sequence: int | None = None,
    bucket: int = BUCKET,
    max_position: int | None = None,
    value_metric: str = "output",
    slots: int | tuple[int, int] | None = None,
    progress: bool = True,
) -> dict[str, Fitted]:
    """Fits recipes to a model on a text, all from one or two passes over it.

    Args:
        text: cut into sequences; the last one may be shorter.
        recipes: names.
        sequence: tokens a sequence; by default a whole bucket with the windows of the statistics, as far as the model's
            context and the text allow.
        bucket: tokens a bucket of history.
        max_position: longest context that will be served; the model's by default.
        value_metric: "output" weighs errors of values by the output projection, "identity" all alike.
        slots: see `fit.fit`.

    Raises:
        ValueError: a model whose shape no cache takes, a text too short for one history pair, a sequence that does not
            fit the text or the context, a `max_position` within the sinks, an unknown recipe, NaN in the model's
            activations.
    """
    chosen = [get_recipe(name) for name in recipes]
    measured, limit = measure(
        model, text, chosen, sequence=sequence, bucket=bucket, max_position=max_position, value_metric=value_metric,
        progress=progress,
    )  # fmt: skip
    results = {}
    for recipe in chosen:
        codes = fit.fit(measured, recipe, rope=model.config.rotary, max_position=limit, slots=slots)
        results[recipe.name] = Fitted(codes, manifest(model, text, recipe, measured, limit, value_metric))
    return results


def measure(
    model: LoadedModel,
    text: corpus.TokenText,
    recipes: Sequence[Recipe],
    *,
    sequence: int | None,
    bucket: int,
    max_position: int | None,
    value_metric: str,
    progress: bool,
) -> tuple[moments.Moments, int]:
    """The moments that `calibrate` fits, and the `max_position` to fit them for; arguments and errors are its own."""
    config = model.config
    cache_config(config, max_length=config.max_position)  # refuses shapes that could never be served
    limit = config.max_position if max_position is None else max_position
    if limit <= STATISTICS_SINK:
        raise ValueError(
            f"max_position={limit}: expected more than the {STATISTICS_SINK} sinks of the statistics; the model's is "
            f"{config.max_position}."
        )
    sequence = _sequence(sequence, bucket, config.max_position, text)
    measured = moments.init(
        recipes,
        layers=config.layers,
        kv_heads=config.kv_heads,
        q_heads=config.q_heads,
        head_dim=config.head_dim,
        bucket=bucket,
        sink=STATISTICS_SINK,
        recent=STATISTICS_RECENT,
        value_metric=model.decoder.value_metric() if value_metric == "output" else None,
        softmax_scale=config.softmax_scale,
    )
    return _stream(model, text.tokens, measured, sequence=sequence, progress=progress), limit


def _stream(
    model: LoadedModel, tokens: np.ndarray, measured: moments.Moments, *, sequence: int, progress: bool
) -> moments.Moments:
    """Streams the text through the model, once or twice, into the moments."""
    recipes = measured.settings.recipes
    if not measured.settings.groups:
        return measured  # only recipes that need no data
    rows, lengths = _sequences(tokens, sequence)
    add = partial(moments.accumulate, positions=np.arange(sequence), rope=model.config.rotary)
    twice = any(recipe.passes == 2 for recipe in recipes)
    keep = twice and _kv_bytes(model, rows.size) <= KEPT_BYTES
    kept: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
    for i, (q, k, v) in enumerate(_captured(model, rows, "calibrating", progress)):
        measured = add(measured, q, k, v, lengths=lengths[i : i + 1])
        if keep:
            # The second pass reads no queries: a view of one zero stands in for them.
            kept.append((np.broadcast_to(np.float32(0), q.shape), np.asarray(k), np.asarray(v)))
    if twice:
        first = fit.first_fit(measured)
        source = kept if keep else _captured(model, rows, "second pass", progress)
        for i, (q, k, v) in enumerate(source):
            measured = add(measured, q, k, v, lengths=lengths[i : i + 1], first_fit=first)
    return measured


def _sequence(sequence: int | None, bucket: int, context: int, text: corpus.TokenText) -> int:
    tokens, least = len(text.tokens), STATISTICS_SINK + STATISTICS_RECENT + 1
    if tokens < least:
        raise ValueError(
            f"text: {text.description} holds {tokens} tokens, {least} are the fewest to calibrate on; give more."
        )
    if sequence is None:
        return min(bucket + STATISTICS_SINK + STATISTICS_RECENT, context, tokens)
    if sequence > context:
        raise ValueError(f"sequence={sequence}: the model's context is {context} tokens; use a shorter sequence.")
    if sequence > tokens:
        raise ValueError(
            f"text: {tokens} tokens are shorter than one sequence of {sequence}; give more text or a shorter sequence."
        )
    if sequence < least:
        raise ValueError(f"sequence={sequence}: expected at least {least} tokens, so that a query has history.")
    return sequence


def _sequences(tokens: np.ndarray, sequence: int) -> tuple[np.ndarray, np.ndarray]:
    """Padded rows `[n, sequence]` and their lengths `[n]`; a rest too short for history is dropped."""
    rest = len(tokens) % sequence
    if rest <= STATISTICS_SINK + STATISTICS_RECENT:
        tokens, rest = tokens[: len(tokens) - rest], 0
    count = -(-len(tokens) // sequence)
    rows = np.zeros(count * sequence, np.int32)
    rows[: len(tokens)] = tokens
    lengths = np.full(count, sequence, np.int32)
    lengths[-1] = rest or sequence
    return rows.reshape(count, sequence), lengths


def _captured(
    model: LoadedModel, rows: np.ndarray, description: str, progress: bool
) -> Iterator[tuple[jax.Array, jax.Array, jax.Array]]:
    """q `[L, 1, T, N, D]` and k, v `[L, 1, T, K, D]` of each row."""
    for row in tqdm(rows, desc=description, unit="sequence", disable=not progress, file=sys.stderr):
        yield _capture(model.decoder, jnp.asarray(row[None]))


@jax.jit
def _capture(decoder: Decoder, tokens: jax.Array):
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    return decoder(tokens, positions, plain_attention(decoder.config, capture=True), None)[2]


def _kv_bytes(model: LoadedModel, tokens: int) -> int:
    config = model.config
    return 2 * tokens * config.layers * config.kv_heads * config.head_dim * model.decoder.dtype.itemsize


def manifest(
    model: LoadedModel,
    text: corpus.TokenText,
    recipe: Recipe,
    measured: moments.Moments,
    max_position: int,
    value_metric: str,
) -> artifact.Manifest:
    """The caller's part of the manifest of codes fitted to moments."""
    groups, positioned = measured.settings.groups, recipe.positions != "absolute"
    return artifact.Manifest(
        recipe=recipe.name,
        model=model.identity,
        text=text.identity if groups else None,
        value_metric={"output": "output-projection"}.get(value_metric, value_metric)
        if "weighted" in groups
        else "none",
        statistics_sink=STATISTICS_SINK if "weighted" in groups else None,
        statistics_recent=STATISTICS_RECENT if "weighted" in groups else None,
        max_position=max_position if positioned else None,
        covered_positions=fit.covered_positions(measured) if positioned else None,
        rotary=model.config.rotary if positioned else None,
    )


def run(args: argparse.Namespace) -> int:
    """`oscar-jax calibrate`."""
    begin = time.perf_counter()
    for recipe in args.recipe:
        get_recipe(recipe)
    _require_pages(args.bucket, Tiers().page)
    _require_writable(Path(args.out).absolute())
    if args.average_bits is not None and len(args.recipe) > 1:
        raise ValueError(f"average_bits with the recipes {', '.join(args.recipe)}: expected one recipe.")
    model = load(args.model)
    text = corpus.calibration_text(encoder(model), args.tokens, files=args.text)
    if args.average_bits is not None:
        from oscar_jax import sensitivity  # builds on this module

        return sensitivity.run(args, model, text)
    results = calibrate(
        model,
        text,
        args.recipe,
        sequence=args.sequence,
        bucket=args.bucket,
        max_position=args.max_position,
        value_metric=args.value_metric,
    )
    paths = {name: Path(args.out) if len(results) == 1 else Path(args.out) / name for name in results}
    for name, (codes, manifest) in results.items():
        artifact.save(paths[name], codes, manifest)
    report: dict[str, Any] = {
        "artifacts": {name: str(path) for name, path in paths.items()},
        "model": model.identity.model_id,
        "text": text.description,
        "text_sha256": text.sha256,
        "tokens": len(text.tokens),
        "bits_per_element": {
            name: {str(context): bits_per_element(codes, Tiers(), context) for context in CONTEXTS}
            for name, (codes, _) in results.items()
        },
        "seconds": time.perf_counter() - begin,
    }
    if args.json:
        print(json.dumps(report))
    else:
        print(f"calibrated {report['model']} on {text.description} in {report['seconds']:.0f} s")
        for name, path in paths.items():
            bits = report["bits_per_element"][name].items()
            sizes = ", ".join(f"{each:.3f} at {int(context):,}" for context, each in bits)
            print(f"  {name}: {path}; bits an element: {sizes}")
    return 0


def _require_pages(bucket: int, page: int) -> None:
    if bucket % page:
        nearest = max(1, round(bucket / page)) * page
        raise ValueError(
            f"bucket={bucket}: expected a multiple of the cache's page, {page} tokens; the nearest is {nearest}."
        )


def _require_writable(out: Path) -> None:
    """Finds out before anything has run, without making the folder."""
    place = next(path for path in (out, *out.parents) if path.exists())
    if not place.is_dir():
        raise ValueError(f"out={str(out)!r}: {place} is a file; expected a folder, or a name for a new one.")
    if not os.access(place, os.W_OK | os.X_OK):
        raise PermissionError(f"out={str(out)!r}: {place} is not writable; choose another place.")
