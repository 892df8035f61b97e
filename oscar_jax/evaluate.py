"""What a 2-bit cache costs: every arm decodes the same text through its real cache and is compared with the plain one.

The text is prefilled in chunks. What a query reads depends on its position only (`pallas_kernels.tiers`), so the logits
are those of decoding token by token, at the speed of a prefill.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from calib.manifest import package_versions
from oscar_jax import cache as kv_cache
from oscar_jax import calibrate, corpus, layer_errors, layer_plan, one_pass, paired
from oscar_jax import report as reports
from oscar_jax.layer_codes import LayerCodes, history_bits
from oscar_jax.limits import warn_beyond
from oscar_jax.models import LoadedModel, load
from oscar_jax.step import cache_config, make_step
from pallas_kernels.tiers import Tiers
from pallas_kernels.transform_code import TransformCodes

BASELINE = "bf16"
PLAIN_DTYPE = "bfloat16"  # of the baseline, and of every arm's windows
CHUNK = 256
SETTLED = 64  # tokens past the windows after which positions are measured: every query then reads some history
BIN = 64  # positions averaged together in `kl_by_position`


@dataclasses.dataclass(frozen=True)
class Scores:
    """Per-position results of one arm, all float64 `[windows, positions]`.

    Attributes:
        kl: divergence of the arm's next-token distribution from the baseline's, KL(baseline || arm), nats.
        nll: negative log-likelihood of the text's next token, nats.
        agrees: 1 where both arms' most likely token is the same.
        cache_bytes: bytes of the arm's cache arrays on the device, all windows together; None without a cache.
        bits_per_element: by the formula, at the window's length.
        history_bits_per_element: of a token past the windows.
        one_pass: the arm ran without a cache (`oscar_jax.one_pass`).
    """

    kl: np.ndarray
    nll: np.ndarray
    agrees: np.ndarray
    cache_bytes: int | None
    bits_per_element: float
    history_bits_per_element: float
    one_pass: bool = False


def score(
    model: LoadedModel,
    arms: Mapping[str, TransformCodes | LayerCodes],
    windows: np.ndarray,
    *,
    tiers: Tiers,
    implementation: str | None = None,
    chunk: int = CHUNK,
    progress: bool = True,
) -> dict[str, Scores]:
    """Runs the baseline and every arm over the same windows, chunk by chunk side by side.

    Args:
        arms: transform codes by arm.
        windows: int `[windows, tokens]`; each is one sequence from position 0.
        implementation: of the arms' attention and writes; None is the best one here.
        chunk: tokens of a call; up to 16 are a decode step of several tokens to the GPU kernels.

    Returns:
        Scores by arm, the baseline first; positions `sink + recent + SETTLED` to the last but one.

    Raises:
        ValueError: windows too short to measure anything, or longer than the model's context.
    """
    batch, length = windows.shape
    first = _first_measured(model, windows.shape[1], tiers)
    codes: dict[str, TransformCodes | LayerCodes | None] = {BASELINE: None, **arms}
    plain = dataclasses.replace(tiers, recent=max(tiers.recent, length - tiers.sink))
    steps = {}
    for name, code in codes.items():
        windows_of = plain if code is None else tiers
        config = cache_config(
            model.config, max_length=length, tiers=windows_of, plain_dtype=PLAIN_DTYPE, batch=batch,
            implementation=None if code is None else implementation,
        )  # fmt: skip
        steps[name] = make_step(model.decoder, config, code)
    caches = {name: step.init() for name, step in steps.items()}
    targets = _next_tokens(windows)
    found: dict[str, list[tuple[np.ndarray, ...]]] = {name: [] for name in codes}
    for start in tqdm(range(0, length, chunk), desc="evaluating", unit="chunk", disable=not progress, file=sys.stderr):
        tokens, counts = _padded(windows[:, start : start + chunk], chunk)
        reference = None
        for name in codes:
            hidden, caches[name] = steps[name](caches[name], tokens, counts, output="hidden")
            begin, end = max(first, start) - start, min(length - 1, start + chunk) - start
            if begin >= end:
                continue
            kept = jnp.asarray(targets[:, start + begin : start + end])
            log_p, *results = _compare(model.decoder, hidden[:, begin:end], kept, reference)
            reference = log_p if reference is None else reference
            found[name].append(tuple(np.asarray(x, np.float64) for x in results))
    scores = {}
    for name, code in codes.items():
        kl, nll, agrees = (np.concatenate(parts, axis=1) for parts in zip(*found[name], strict=True))
        total = kv_cache.cache_bytes(caches[name])["total"]
        bits = kv_cache.expected_bits(steps[name].config, code, length)
        scores[name] = Scores(kl, nll, agrees, total, bits, history_bits(code))
    return scores


def score_one_pass(
    model: LoadedModel,
    arms: Mapping[str, one_pass.OnePassArm],
    windows: np.ndarray,
    *,
    tiers: Tiers,
    chunk: int = CHUNK,
    progress: bool = True,
) -> dict[str, Scores]:
    """As `score`, without a cache: each arm is one forward pass, compared with the plain one's.

    Args:
        chunk: positions whose logits exist at once.
    """
    length = windows.shape[1]
    first = _first_measured(model, windows.shape[1], tiers)
    targets, tokens = _next_tokens(windows), jnp.asarray(windows, jnp.int32)
    history = tiers.history_tokens(length)
    base = one_pass.hidden_states(model.decoder, tokens, one_pass.PLAIN, tiers=tiers)
    scores = {}
    for name, arm in tqdm(
        {BASELINE: one_pass.PLAIN, **arms}.items(), desc="evaluating", unit="arm", disable=not progress, file=sys.stderr
    ):
        hidden = base if name == BASELINE else one_pass.hidden_states(model.decoder, tokens, arm, tiers=tiers)
        parts = []
        for start in range(first, length - 1, chunk):
            kept = slice(start, min(start + chunk, length - 1))
            reference = _compare(model.decoder, base[:, kept], jnp.asarray(targets[:, kept]), None)[0]
            results = _compare(model.decoder, hidden[:, kept], jnp.asarray(targets[:, kept]), reference)[1:]
            parts.append([np.asarray(x, np.float64) for x in results])
        kl, nll, agrees = (np.concatenate(each, axis=1) for each in zip(*parts, strict=True))
        bits = one_pass.PLAIN.history_bits_per_element * (length - history) + arm.history_bits_per_element * history
        scores[name] = Scores(kl, nll, agrees, None, bits / length, arm.history_bits_per_element, one_pass=True)
    return scores


def _first_measured(model: LoadedModel, length: int, tiers: Tiers) -> int:
    first = tiers.sink + tiers.recent + SETTLED
    if length < first + 2:
        raise ValueError(
            f"windows of {length} tokens: with sink={tiers.sink} and recent={tiers.recent} expected at least "
            f"{first + 2}."
        )
    if length > model.config.max_position:
        raise ValueError(
            f"windows of {length} tokens: the model's context is {model.config.max_position}; use a shorter window."
        )
    return first


def _next_tokens(windows: np.ndarray) -> np.ndarray:
    return np.concatenate([windows[:, 1:], np.zeros((len(windows), 1), windows.dtype)], axis=1)


def _padded(tokens: np.ndarray, chunk: int) -> tuple[np.ndarray, np.ndarray]:
    batch, count = tokens.shape
    return np.pad(tokens, ((0, 0), (0, chunk - count))), np.full(batch, count, np.int32)


@jax.jit
def _compare(decoder, hidden, targets, reference):
    log_p = jax.nn.log_softmax(decoder.logits(hidden), axis=-1)
    base = log_p if reference is None else reference
    kl = (jnp.exp(base) * (base - log_p)).sum(-1)
    nll = -jnp.take_along_axis(log_p, targets[..., None], axis=-1)[..., 0]
    return log_p if reference is None else None, kl, nll, log_p.argmax(-1) == base.argmax(-1)


def summarize(scores: Mapping[str, Scores], *, first: int) -> dict[str, dict[str, Any]]:
    """The report's `arms`.

    Args:
        first: position of the first measured query.

    Returns:
        By arm `kl_mean`, `kl_median`, `kl_p99` (nats), `kl_standard_error` (of blocks of `BIN` positions),
        `ppl`, `dppl_percent` (change of perplexity), `top1` (share), `cache_bytes`, `bits_per_element`,
        `history_bits_per_element`, `one_pass` and `kl_by_position` (means over `BIN` positions from each `position`
        on).
        `kl_interval` and `dppl_percent_interval` are paired bootstrap intervals over those blocks (`paired.bootstrap`,
        seed 0), None for a single block.
    """
    base = scores[BASELINE].nll
    arms = {}
    for name, arm in scores.items():
        starts = range(0, arm.kl.shape[1], BIN)
        blocks = np.array([arm.kl[:, i : i + BIN].mean(1) for i in starts])
        change = paired.bootstrap(*paired.blocks(arm.nll - base, BIN))
        arms[name] = {
            "kl_mean": float(arm.kl.mean()),
            "kl_standard_error": float(blocks.std(ddof=1) / np.sqrt(blocks.size)) if blocks.size > 1 else None,
            "kl_interval": paired.bootstrap(*paired.blocks(arm.kl, BIN)),
            "kl_median": float(np.median(arm.kl)),
            "kl_p99": float(np.quantile(arm.kl, 0.99)),
            "ppl": float(np.exp(arm.nll.mean())),
            "dppl_percent": float(100 * np.expm1(arm.nll.mean() - base.mean())),
            "dppl_percent_interval": None if change is None else tuple(float(100 * np.expm1(x)) for x in change),
            "top1": float(arm.agrees.mean()),
            "one_pass": arm.one_pass,
            "cache_bytes": arm.cache_bytes,
            "bits_per_element": arm.bits_per_element,
            "history_bits_per_element": arm.history_bits_per_element,
            "kl_by_position": {"position": [first + i for i in starts], "kl": [float(x) for x in blocks.mean(1)]},
        }
    return arms


def evaluate(
    model: LoadedModel,
    arms: Mapping[str, TransformCodes | LayerCodes | one_pass.OnePassArm],
    text: corpus.TokenText,
    *,
    sequence: int,
    tiers: Tiers,
    implementation: str | None = None,
    chunk: int = CHUNK,
    errors_by_layer: bool = False,
    progress: bool = True,
) -> dict[str, Any]:
    """Scores whole windows of a text and reports them, with what is needed to repeat the measurement.

    Args:
        arms: codes run through the cache, `OnePassArm`s without one; if all are of the latter kind, so is the baseline.
        sequence: tokens a window, of which the first is the tokenizer's own if it puts one in front of every text
            (`calibrate.opening`); a rest shorter than a window is left out.
        implementation, chunk: as for `score`.
        errors_by_layer: also measure each layer's attention output, in one more run of each arm with codes; adds
            `layer_errors.LayerErrors.summary` to it.

    Raises:
        ValueError: a text shorter than one window.
    """
    start = calibrate.opening(model)
    body = sequence - len(start)
    count = len(text.tokens) // body
    if not count:
        raise ValueError(
            f"text: {text.description} is shorter than one window of {sequence} tokens; give a longer text."
        )
    windows = text.tokens[: count * body].reshape(count, body)
    windows = np.concatenate([np.tile(np.asarray(start, np.int32), (count, 1)), windows], axis=1)
    begin, chunk = time.perf_counter(), min(chunk, sequence)
    coded = {name: arm for name, arm in arms.items() if not isinstance(arm, one_pass.OnePassArm)}
    single = {name: arm for name, arm in arms.items() if isinstance(arm, one_pass.OnePassArm)}
    options: dict[str, Any] = {"tiers": tiers, "chunk": chunk, "progress": progress}
    scores = score_one_pass(model, single, windows, **options) if single else {}
    if coded or not single:
        scores |= score(model, coded, windows, implementation=implementation, **options)
    first = tiers.sink + tiers.recent + SETTLED
    summaries = summarize({name: scores[name] for name in (BASELINE, *arms)}, first=first)
    if errors_by_layer:
        for name, codes in coded.items():
            found = layer_errors.measure(
                model, codes, windows, tiers=tiers, first=first, chunk=chunk, implementation=implementation
            )
            summaries[name] |= found.summary()
    return {
        "arms": summaries,
        "seconds": time.perf_counter() - begin,
        "model": model.identity.model_id,
        "text": text.description,
        "text_sha256": text.sha256,
        "windows": count,
        "tokens": count * sequence,
        "sequence": sequence,
        "implementation": implementation,
        "chunk": chunk,
        "positions": [first, sequence - 2],
        **dataclasses.asdict(tiers),
        "versions": package_versions(),
    }


def rows(arms: Mapping[str, Mapping[str, Any]]) -> list[tuple[str, ...]]:
    """The report's arms for people, the header first; an arm of an artifact is followed by its path."""
    header = ("arm", "KL (nats)", "KL p99", "ppl", "change", "95 % interval", "top-1", "cache MB", "bits/element")
    cells: list[tuple[str, ...]] = [(*header, "of history")]
    for name, arm in arms.items():
        interval = arm["dppl_percent_interval"]
        cells.append(
            (
                label(name, arm.get("artifact")) + " (one pass)" * arm["one_pass"],
                f"{arm['kl_mean']:.4f}",
                f"{arm['kl_p99']:.3f}",
                f"{arm['ppl']:.2f}",
                f"{arm['dppl_percent']:+.1f} %",
                "-" if interval is None else f"{interval[0]:+.1f} .. {interval[1]:+.1f}",
                f"{100 * arm['top1']:.1f} %",
                "-" if arm["cache_bytes"] is None else f"{arm['cache_bytes'] / 1e6:.2f}",
                f"{arm['bits_per_element']:.2f}",
                f"{arm['history_bits_per_element']:.3f}",
            )
        )
    return cells


def table(arms: Mapping[str, Mapping[str, Any]]) -> str:
    """`rows` in aligned columns, and the worst layers where they were measured."""
    lines = [reports.aligned(rows(arms))]
    for name, arm in arms.items():
        if "worst_layers" in arm:
            worst = ", ".join(f"{each['layer']} ({each['error']:.3f})" for each in arm["worst_layers"])
            lines.append(f"{name}: relative error of attention outputs, worst layers {worst}")
    return "\n".join(lines)


def run(args: argparse.Namespace) -> int:
    """`oscar-jax evaluate`."""
    if args.one_pass and (args.layer_errors or args.implementation):
        option = "--layer-errors" if args.layer_errors else "--implementation"
        raise ValueError(f"{option} is about the cache, and --one-pass has none: leave one of them out.")
    check_request(args, others=one_pass.BASELINES)
    baselines = [name for name in args.recipes if name in one_pass.BASELINES]
    if baselines and not args.one_pass:
        print(f"note: without a cache of their own, in one pass: {', '.join(baselines)}.", file=sys.stderr)
    if args.out:
        reports.require_matplotlib("--out")
        reports.require_place("--out", args.out, folder=True)
    if args.csv:
        reports.require_place("--csv", args.csv, folder=False)
    model = load(args.model)
    encode = calibrate.encoder(model)
    tiers = Tiers(sink=args.sink, recent=args.recent)
    _first_measured(model, args.sequence, tiers)
    cache_config(model.config, max_length=args.sequence, tiers=tiers, implementation=args.implementation)
    text = corpus.heldout_text(encode, args.tokens, file=args.text, offset=args.offset, minimum=args.sequence)
    args.recipes = [name for name in args.recipes if name not in baselines]
    codes, calibration = requested_arms(args, model, length=args.sequence)
    arms: dict[str, TransformCodes | LayerCodes | one_pass.OnePassArm] = {
        name: one_pass.from_codes(code) if args.one_pass else code for name, code in codes.items()
    }
    arms |= {name: one_pass.baselines(model.config.head_dim)[name] for name in baselines}
    found = evaluate(
        model,
        arms,
        text,
        sequence=args.sequence,
        tiers=tiers,
        implementation=args.implementation,
        chunk=args.chunk,
        errors_by_layer=args.layer_errors,
    )
    found["calibration"] = calibration
    for name, path in artifacts(args, codes).items():
        found["arms"][name]["artifact"] = path
    print(table(found["arms"]), file=sys.stderr if args.json else sys.stdout)
    if args.json:  # before files: a full disk must not cost the run
        print(json.dumps(found))
    if args.csv:
        reports.write_text(Path(args.csv), reports.arms_csv(found["arms"]))
    if args.out:
        files = reports.write_evaluation(Path(args.out), found, table=rows(found["arms"]))
        print(f"wrote {', '.join(map(str, files))}", file=sys.stderr)
    return 0


def check_request(args: argparse.Namespace, *, others: Sequence[str] = ()) -> None:
    """Finds out before a model is loaded whether `--recipes` and `--artifact` name anything to run.

    Args:
        others: names that are no recipes and may be asked for too.

    Raises:
        FileNotFoundError: no such recipe file.
        ValueError: neither was given, an unknown recipe, or two of one name.
    """
    names = [name for name in args.recipes if name != BASELINE]
    if not names and not args.artifact:
        raise ValueError("nothing to evaluate: give --recipes, such as oscar-reference,default, or --artifact.")
    calibrate.get_recipes([name for name in names if name not in others])


def requested_arms(
    args: argparse.Namespace, model: LoadedModel, *, length: int
) -> tuple[dict[str, TransformCodes | LayerCodes], dict[str, Any] | None]:
    """Codes by arm, from `--artifact` and, calibrated here, `--recipes`; and what was calibrated on.

    Args:
        length: tokens of the longest sequence that will be run.

    Raises:
        ValueError: as `load_arms` or `calibrate.calibrate`.

    Warns:
        BeyondCalibrationWarning: a code is for shorter sequences (`limits.warn_beyond`).
    """
    arms = load_arms(args.artifact, model, length=length)
    recipes = [name for name in args.recipes if name != BASELINE]
    if not recipes:
        return arms, None
    files = [args.calibrate_on] if args.calibrate_on else []
    source = corpus.calibration_text(calibrate.encoder(model), args.calibration_tokens, files=files)
    fitted = calibrate.calibrate(
        model, source, recipes, sequence=args.calibration_sequence, max_position=args.max_position
    )
    for name, (codes, manifest) in fitted.items():
        warn_beyond(manifest, length, what=f"recipe {name!r}: sequences of {length} tokens are")
        arms[_unused(name, arms)] = codes
    return arms, {"text": source.description, "text_sha256": source.sha256, "tokens": len(source.tokens)}


def artifacts(args: argparse.Namespace, arms: Iterable[str]) -> dict[str, str]:
    """The path of each arm that `requested_arms` or `load_arms` made of `--artifact`."""
    return dict(zip(arms, args.artifact, strict=False))  # artifacts come before recipes


def label(name: str, path: str | None) -> str:
    """An arm in a table, followed by its artifact's path if it has one."""
    return name if path is None else f"{name} ({path})"


def load_arms(paths: Sequence[str], model: LoadedModel, *, length: int) -> dict[str, TransformCodes | LayerCodes]:
    """Codes of artifacts by recipe, a number added where a name repeats or is a baseline's.

    Args:
        length: tokens of the longest sequence that will be run.

    Raises:
        ValueError: as `layer_plan.load`.

    Warns:
        BeyondCalibrationWarning: an artifact is for shorter ones (`limits.warn_beyond`).
    """
    arms: dict[str, TransformCodes | LayerCodes] = {}
    for path in paths:
        codes, manifest = layer_plan.load(path, model=model.identity)
        warn_beyond(manifest, length, what=f"artifact {path}: sequences of {length} tokens are")
        arms[_unused(manifest.recipe, arms)] = codes
    return arms


def _unused(name: str, taken: Mapping[str, Any] | Sequence[str]) -> str:
    if name not in taken and name not in (BASELINE, *one_pass.BASELINES):
        return name
    number = next(i for i in range(2, len(taken) + 3) if f"{name}-{i}" not in taken)
    return f"{name}-{number}"
