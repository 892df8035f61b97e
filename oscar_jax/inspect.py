"""`oscar-jax inspect`: what an artifact holds, as text or JSON."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

from calib import artifact
from calib.manifest import SIDES, Manifest
from calib.rounding import Heads
from oscar_jax import inspect_plots, report
from pallas_kernels.tiers import Tiers
from pallas_kernels.transform_code import TransformCode, TransformCodes, bits_per_element

CONTEXTS = (2048, 8192, 32768, 131072)
BIT_CLASSES = (6, 4, 2, 0)


def run(args: argparse.Namespace) -> int:
    """`oscar-jax inspect ARTIFACT`; always 0, errors are raised."""
    if args.plots:
        report.require_matplotlib("--plots")
        report.require_place("--plots", args.plots, folder=True)
    codes, manifest = artifact.load(args.artifact)
    found = summary(codes, manifest, tiers=Tiers())
    if args.plots:
        files = inspect_plots.write(Path(args.plots), codes, _layer_ids(codes, manifest), found)
        print(f"wrote {', '.join(map(str, files))}", file=sys.stderr)
    print(json.dumps(found) if args.json else as_text(found))
    return 0


def summary(codes: TransformCodes, manifest: Manifest, *, tiers: Tiers) -> dict[str, Any]:
    """A dict fit for JSON.

    Returns:
        `recipe`; `layers`, `kv_heads`, `head_dim`; `key` and `value`, each with `kind`, `clip`, `clip_ratio`, `slots`
        (N), `row_bits` (stored bits of one token and head) and `layers`, a list with, for each layer, `layer` (the
        model's number), `bits` (of "6", "4", "2", "dropped" the `median`, `least` and `most` coordinates over KV
        heads) and `mean_abs_mu`, `max_abs_mu` (units of K or V); and with the error of each head, `errors` `[L][K]`,
        `error_kind` ("rounding": `rounding.RoundingErrors`, "predicted": `inspect_plots.predicted_error`) and
        `worst_heads` (`inspect_plots.worst_heads`), all None where neither is there; `bits_per_element` by context,
        with the windows `sink` and `recent`; and `manifest`.
    """
    ids, recorded = _layer_ids(codes, manifest), manifest.rounding
    return {
        "recipe": manifest.recipe,
        "layers": codes.layers,
        "kv_heads": codes.kv_heads,
        "head_dim": codes.head_dim,
        "key": _side(codes.key, ids, recorded and recorded.key),
        "value": _side(codes.value, ids, recorded and recorded.value),
        "sink": tiers.sink,
        "recent": tiers.recent,
        "bits_per_element": {str(context): bits_per_element(codes, tiers, context) for context in CONTEXTS},
        "manifest": manifest.to_json(),
    }


def _layer_ids(codes: TransformCodes, manifest: Manifest) -> tuple[int, ...]:
    return tuple(manifest.layer_ids or range(codes.layers))


def _side(code: TransformCode, ids: tuple[int, ...], recorded: Heads | None) -> dict[str, Any]:
    bits, mu = np.asarray(code.bits), np.abs(np.asarray(code.mu, np.float64))
    errors = inspect_plots.predicted_error(code) if recorded is None else np.asarray(recorded)
    kind = "predicted" if recorded is None else "rounding"
    layers = []
    for index, layer in enumerate(ids):
        counts = {_class_name(width): (bits[index] == width).sum(-1) for width in BIT_CLASSES}
        layers.append(
            {
                "layer": layer,
                "bits": {
                    name: {"median": float(np.median(count)), "least": int(count.min()), "most": int(count.max())}
                    for name, count in counts.items()
                },
                "mean_abs_mu": float(mu[index].mean()),
                "max_abs_mu": float(mu[index].max()),
            }
        )
    return {
        "kind": code.kind,
        "clip": code.clip,
        "clip_ratio": code.clip_ratio,
        "slots": code.slots,
        "row_bits": code.row_bits,
        "layers": layers,
        "errors": None if errors is None else errors.tolist(),
        "error_kind": None if errors is None else kind,
        "worst_heads": None if errors is None else inspect_plots.worst_heads(errors, ids),
    }


def _class_name(width: int) -> str:
    return str(width) if width else "dropped"


def as_text(found: dict[str, Any]) -> str:
    """`summary` for people: provenance, then one line a layer and side."""
    manifest = found["manifest"]
    model, text, codes = manifest["model"], manifest["text"], manifest["codes"]
    lines = [
        f"recipe       {found['recipe']}",
        f"model        {model['model_id'] + ' (' + model['architecture'] + ')' if model else 'not recorded'}",
        f"text         {text['description'] + ', ' + format(text['tokens'], ',') + ' tokens' if text else 'none'}",
        f"shape        {found['layers']} layers, {found['kv_heads']} KV heads of size {found['head_dim']}",
        f"bucket       {codes['bucket'] or 'none'}, positions up to {manifest['max_position'] or 'any'}",
        f"written      {manifest['created']}, format {manifest['format_version']}, "
        + ", ".join(f"{name} {version}" for name, version in manifest["packages"].items()),
        f"bits an element, sink {found['sink']}, recent {found['recent']}: "
        + ", ".join(f"{bits:.3f} at {int(context):,}" for context, bits in found["bits_per_element"].items()),
    ]
    for side in SIDES:
        each = found[side]
        clip = "" if each["clip"] == "none" else f", clip {each['clip']} {each['clip_ratio']:g}"
        lines += ["", f"{side}: {each['kind']}{clip}, N = {each['slots']} slots, {each['row_bits']} bits a row"]
        names = [_class_name(width) for width in BIT_CLASSES]
        header = [f"{name if name == 'dropped' else name + ' bits':>14}" for name in names]
        lines += [f"{'layer':>5}" + "".join(header) + f"{'mean |mu|':>12}{'max |mu|':>12}"]
        for layer in each["layers"]:
            counts = "".join(f"{_count(layer['bits'][name]):>14}" for name in names)
            lines += [f"{layer['layer']:>5}{counts}{layer['mean_abs_mu']:>12.4g}{layer['max_abs_mu']:>12.4g}"]
        if each["worst_heads"]:
            worst = (f"{head['layer']}.{head['head']} ({head['error']:.4f})" for head in each["worst_heads"])
            lines.append(f"worst heads by {each['error_kind']} error, layer.head: {', '.join(worst)}")
    lines += ["", "Coordinates by bits: median over KV heads (least-most)."]
    if manifest["rounding"] is None:
        lines.append("No rounding errors are recorded: those of keys are predicted from their bits where these differ.")
    return "\n".join(lines)


def _count(count: dict[str, Any]) -> str:
    return f"{count['median']:g} ({count['least']}-{count['most']})"
