"""Calibration of a model on a text: run it, stream its queries, keys and values into moments, fit, and store."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from calib import artifact, artifact_folder, fit, moments, rounding
from calib.recipes import Recipe
from calib.recipes import get as get_recipe
from oscar_jax import corpus, layer_plan
from oscar_jax.models import Decoder, LoadedModel, load, plain_attention
from oscar_jax.step import cache_config
from pallas_kernels.rope import Rotary
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


def opening(model: LoadedModel) -> list[int]:
    """The token that the model's tokenizer puts in front of every text, as Gemma's and Llama 3's do; often none."""
    if model.tokenizer is None:
        return []
    start = model.tokenizer("")["input_ids"]
    return start if start == [model.tokenizer.bos_token_id] else []


def get_recipes(names: Sequence[str]) -> list[Recipe]:
    """The recipes of these names and files.

    Raises:
        FileNotFoundError: no such file.
        ValueError: as `calib.recipes.get`, or two of one name.
    """
    found: dict[str, str] = {}
    recipes = []
    for name in names:
        recipe = get_recipe(name)
        if recipe.name in found:
            raise ValueError(f"recipes {found[recipe.name]!r} and {name!r} are both named {recipe.name!r}; rename one.")
        found[recipe.name] = name
        recipes.append(recipe)
    return recipes


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
        text: cut into sequences, each with the tokenizer's first token (`opening`); the last one may be shorter.
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
    chosen = get_recipes(recipes)
    measured = measure(
        model, text, chosen, sequence=sequence, bucket=bucket, max_position=max_position, value_metric=value_metric,
        progress=progress,
    )  # fmt: skip
    results = {}
    for recipe in tqdm(chosen, desc="fitting", unit="recipe", disable=not progress, file=sys.stderr):
        codes = measured.fit(recipe, slots=slots)
        manifest = measured.manifest(model, text, recipe, value_metric)
        manifest = dataclasses.replace(manifest, rounding=measured.rounding_errors(recipe, codes))
        results[recipe.name] = Fitted(codes, manifest)
    return results


@dataclasses.dataclass(frozen=True)
class Part:
    """Layers alike in rotation and window: their numbers, rotation, and moments."""

    layers: list[int]
    rotary: Rotary
    moments: moments.Moments


@dataclasses.dataclass(frozen=True)
class Measured:
    """What a text, cut into pieces of `sequence` tokens, says about a model; `max_position` is the longest context to
    fit it for."""

    parts: list[Part]
    max_position: int
    sequence: int

    def fit(self, recipe: Recipe, *, slots: int | tuple[int, int] | None = None) -> TransformCodes:
        """Codes of all layers.

        Raises:
            NotImplementedError: keys relative to buckets in a model with two rotations.
            ValueError: as `fit.fit`.
        """
        if recipe.positions == "bucket" and len({part.rotary for part in self.parts}) > 1:
            raise NotImplementedError(
                f"recipe {recipe.name!r} turns the keys of all layers alike, and this model's sliding layers have a "
                "rotation of their own: use 'default-averaged'."
            )
        codes = [
            fit.fit(part.moments, recipe, rope=part.rotary, max_position=self.max_position, slots=slots)
            for part in self.parts
        ]
        if len(codes) == 1:
            return codes[0]
        order = np.argsort(np.concatenate([part.layers for part in self.parts]))
        return jax.tree.map(lambda *leaves: np.concatenate(leaves)[order], *codes)

    def rounding_errors(self, recipe: Recipe, codes: TransformCodes) -> rounding.RoundingErrors | None:
        """What rounding costs each head of the codes that `fit` made; None for data-free recipes."""
        sides = {name: np.zeros(codes.key.bits.shape[:2]) for name in recipe.sides}
        for part in self.parts:
            own = jax.tree.map(lambda leaf, layers=part.layers: np.asarray(leaf)[layers], codes)
            found = fit.rounding_errors(part.moments, recipe, own, rope=part.rotary, max_position=self.max_position)
            if not found:
                return None
            for name, errors in found.items():
                sides[name][part.layers] = errors
        return rounding.RoundingErrors.of(**sides)

    def manifest(
        self, model: LoadedModel, text: corpus.TokenText, recipe: Recipe, value_metric: str
    ) -> artifact.Manifest:
        """The caller's part of the manifest of codes that `fit` makes."""
        groups, positioned = self.parts[0].moments.settings.groups, recipe.positions != "absolute"
        weighted = "weighted" in groups
        metric = {"output": "output-projection"}.get(value_metric, value_metric)
        return artifact.Manifest(
            recipe=recipe.name,
            model=model.identity,
            text=text.identity if groups else None,
            value_metric=metric if weighted else "none",
            statistics_sink=STATISTICS_SINK if weighted else None,
            statistics_recent=STATISTICS_RECENT if weighted else None,
            max_position=self.max_position if positioned else None,
            covered_positions=min(fit.covered_positions(part.moments) for part in self.parts) if positioned else None,
            rotary=model.config.rotary if positioned else None,
            sequence=self.sequence if groups else None,
        )


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
) -> Measured:
    """The moments that `calibrate` fits; arguments and errors are its own."""
    config = model.config
    cache_config(config, max_length=config.max_position)  # refuses shapes that could never be served
    limit = config.max_position if max_position is None else max_position
    if limit <= STATISTICS_SINK:
        raise ValueError(
            f"max_position={limit}: expected more than the {STATISTICS_SINK} sinks of the statistics; the model's is "
            f"{config.max_position}."
        )
    sequence = _sequence(sequence, bucket, config.max_position, text)
    metric = model.decoder.value_metric() if value_metric == "output" else None
    sources = [source for recipe in recipes for source in rounding.sources(recipe).values()]
    alike: dict[tuple[Rotary, int | None], list[int]] = {}
    for layer, window in enumerate(config.windows):
        alike.setdefault((config.rotary_of(layer), window), []).append(layer)
    parts = []
    for (rotary, window), layers in alike.items():
        empty = moments.init(
            [*recipes, *sources],
            layers=len(layers),
            kv_heads=config.kv_heads,
            q_heads=config.q_heads,
            head_dim=config.head_dim,
            bucket=bucket,
            sink=STATISTICS_SINK,
            recent=STATISTICS_RECENT,
            value_metric=None if metric is None else metric[layers],
            softmax_scale=config.softmax_scale,
            window=window,
        )
        parts.append(Part(layers, rotary, empty))
    return Measured(_stream(model, text.tokens, parts, sequence=sequence, progress=progress), limit, sequence)


def _stream(model: LoadedModel, tokens: np.ndarray, parts: list[Part], *, sequence: int, progress: bool) -> list[Part]:
    """Streams the text through the model, once or twice, into the moments."""
    settings = parts[0].moments.settings
    if not settings.groups:
        return parts  # only recipes that need no data
    rows, lengths = _sequences(tokens, sequence, opening(model))
    twice = any(recipe.passes == 2 for recipe in settings.recipes)
    keep = twice and _kv_bytes(model, rows.size) <= KEPT_BYTES
    kept: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
    for i, (q, k, v) in enumerate(_captured(model, rows, "calibrating", progress)):
        parts = [_add(part, (q, k, v), lengths[i : i + 1]) for part in parts]
        if keep:
            # The second pass reads no queries: a view of one zero stands in for them.
            kept.append((np.broadcast_to(np.float32(0), q.shape), np.asarray(k), np.asarray(v)))
    if twice:
        first = [fit.first_fit(part.moments) for part in parts]
        source = kept if keep else _captured(model, rows, "second pass", progress)
        for i, captured in enumerate(source):
            parts = [_add(part, captured, lengths[i : i + 1], each) for part, each in zip(parts, first, strict=True)]
    return parts


def _add(part: Part, captured: Sequence[Any], lengths: np.ndarray, first: moments.FirstFit | None = None) -> Part:
    """A part with one more batch of q, k, v of all layers in its moments; the old moments are donated."""
    whole = len(part.layers) == len(captured[0])
    q, k, v = captured if whole else (x[np.asarray(part.layers)] for x in captured)
    positions = np.arange(k.shape[2])
    options = {"positions": positions, "lengths": lengths, "rope": part.rotary, "first_fit": first}
    return dataclasses.replace(part, moments=moments.accumulate(part.moments, q, k, v, **options))


def _sequence(sequence: int | None, bucket: int, context: int, text: corpus.TokenText) -> int:
    tokens, least = len(text.tokens), STATISTICS_SINK + STATISTICS_RECENT + 1
    if tokens < least:
        raise ValueError(
            f"text ({text.description}): has {tokens} of the {least} tokens that calibrating takes at least; give more."
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


def _sequences(tokens: np.ndarray, sequence: int, start: Sequence[int] = ()) -> tuple[np.ndarray, np.ndarray]:
    """Padded rows `[n, sequence]` that begin with `start`, and their lengths `[n]`; a rest too short for history is
    dropped."""
    sequence -= len(start)
    rest = len(tokens) % sequence
    if rest <= STATISTICS_SINK + STATISTICS_RECENT:
        tokens, rest = tokens[: len(tokens) - rest], 0
    count = -(-len(tokens) // sequence)
    rows = np.zeros(count * sequence, np.int32)
    rows[: len(tokens)] = tokens
    lengths = np.full(count, sequence, np.int32)
    lengths[-1] = rest or sequence
    rows = np.concatenate([np.tile(np.asarray(start, np.int32), (count, 1)), rows.reshape(count, sequence)], axis=1)
    return rows, lengths + len(start)


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


def run(args: argparse.Namespace) -> int:
    """`oscar-jax calibrate`."""
    begin = time.perf_counter()
    names = [recipe.name for recipe in get_recipes(args.recipe)]
    paths = {name: Path(args.out) if len(names) == 1 else Path(args.out) / name for name in names}
    _require_pages(args.bucket, Tiers().page)
    _require_writable(Path(args.out).absolute())
    if args.sizes is not None and args.average_bits is None:
        raise ValueError("sizes without average_bits: expected an average too, which they are chosen for.")
    if args.average_bits is not None and len(args.recipe) > 1:
        raise ValueError(f"average_bits with the recipes {', '.join(args.recipe)}: expected one recipe.")
    require_replaceable = (
        artifact_folder.require_replaceable if args.average_bits is None else layer_plan.require_replaceable
    )
    for path in paths.values():
        require_replaceable(path)
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
    """Finds out before anything has run, by a file that is gone again; the folder itself is not made."""
    place = next(path for path in (out, *out.parents) if path.exists())
    if not place.is_dir():
        raise ValueError(f"out={str(out)!r}: {place} is a file; expected a folder, or a name for a new one.")
    try:
        with tempfile.TemporaryFile(dir=place):
            pass
    except OSError as error:  # what access bits say is not all: a read-only file system, /proc, a full disk
        raise OSError(f"out={str(out)!r}: {place} is not writable ({error.strerror}); choose another place.") from None
