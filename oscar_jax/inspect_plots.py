"""Pictures of an artifact: bit classes, spectra, and what rounding costs, by layer and head."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from calib.recipes import ERRORS
from oscar_jax import report
from pallas_kernels.transform_code import TransformCode, TransformCodes

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WORST = 5


def predicted_error(code: TransformCode) -> np.ndarray | None:
    """Relative squared error of each head, float64 `[L, K]`, that rounding its kept coordinates should cause.

    For artifacts without `calib.rounding.RoundingErrors`, from the code alone.
    `sum(g d_b) / sum(g)`: coordinates are scaled to unit variance, an error in one of them weighs g, and b bits leave
    d_b of it (`calib.recipes.ERRORS`). What dropped coordinates lose is not in an artifact and not counted. None where
    the code does not tell coordinates apart (min/max recipes, values).
    """
    bits, weight = np.asarray(code.bits), np.asarray(code.weight, np.float64)
    kept = bits > 0
    lowest = np.where(kept, weight, np.inf).min(-1)
    if code.kind != "levels" or (lowest == weight.max(-1)).all():
        return None
    left = np.zeros(bits.shape)
    for width, share in ERRORS.items():
        left[bits == width] = share
    return (weight * left).sum(-1) / weight.sum(-1)


def worst_heads(errors: np.ndarray, layer_ids: Sequence[int]) -> list[dict[str, Any]]:
    """Up to `WORST` of `{layer, head, error}`, largest of errors `[L, K]` first."""
    order = np.argsort(-errors, axis=None)[:WORST]
    places = (np.unravel_index(i, errors.shape) for i in order)
    return [
        {"layer": layer_ids[int(layer)], "head": int(head), "error": float(errors[layer, head])}
        for layer, head in places
    ]


def spectrum(code: TransformCode) -> np.ndarray:
    """Norm of each kept coordinate's decode row, float64 `[L, K, D]`, units of K or V; NaN where dropped.

    In "levels" codes coordinates have unit variance, so this is the spread of K or V along each.
    """
    delta, bits = np.asarray(code.delta, np.float64), np.asarray(code.bits)
    owner, shift = np.asarray(code.slot_owner), np.asarray(code.slot_shift)
    norms = np.linalg.norm(np.asarray(code.decode, np.float64), axis=-1)
    found = np.full(bits.shape, np.nan)
    layer, head, slot = np.nonzero(shift == 0)  # the lowest slot of each kept coordinate
    coordinate = owner[layer, head, slot]
    found[layer, head, coordinate] = norms[layer, head, slot] / delta[layer, head, coordinate]
    return found


def bit_classes(code: TransformCode, layer_ids: Sequence[int]) -> Figure:
    """Stacked bars: coordinates of 6, 4, 2 and 0 bits in each layer, mean over heads."""
    figure, axes = report.new_figure()
    bits, base = np.asarray(code.bits), np.zeros(len(layer_ids))
    for width in (6, 4, 2, 0):
        counts = (bits == width).sum(-1).mean(-1)
        axes.bar(range(len(layer_ids)), counts, bottom=base, label=f"{width} bits" if width else "dropped")
        base += counts
    axes.set_xticks(range(len(layer_ids)), map(str, layer_ids))
    axes.set(xlabel="layer", ylabel="coordinates (mean over heads)")
    axes.legend(ncols=4, loc="upper center", bbox_to_anchor=(0.5, 1.12))
    return figure


def spectra(code: TransformCode, layer_ids: Sequence[int]) -> Figure:
    """A line a layer, median over heads: spread along each coordinate, in the code's order."""
    figure, axes = report.new_figure()
    lines = np.ma.median(np.ma.masked_invalid(spectrum(code)), axis=1)
    for index, layer in enumerate(layer_ids):
        axes.plot(lines[index], label=f"layer {layer}", linewidth=1, color=f"C{index % 10}")
    axes.set(xlabel="coordinate (most bits first)", ylabel="spread (median over heads)", yscale="log")
    axes.grid(alpha=0.3)
    if len(layer_ids) <= 12:
        axes.legend(fontsize="small")
    return figure


def error_map(errors: np.ndarray, layer_ids: Sequence[int]) -> Figure:
    """Relative squared error by layer and head, `[L, K]`."""
    figure, axes = report.new_figure()
    drawn = axes.pcolormesh(errors.T, cmap="viridis")
    axes.set_xticks(np.arange(len(layer_ids)) + 0.5, map(str, layer_ids))
    axes.set_yticks(np.arange(errors.shape[1]) + 0.5, map(str, range(errors.shape[1])))
    axes.set(xlabel="layer", ylabel="KV head")
    figure.colorbar(drawn, label="relative squared error")
    return figure


def write(folder: Path, codes: TransformCodes, layer_ids: Sequence[int], found: Mapping[str, Any]) -> list[Path]:
    """Each plot as SVG, and `inspect.html` with all of them.

    Args:
        found: `inspect.summary`.

    Returns:
        The files.
    """
    figures, tables = {}, {}
    for side, code in (("key", codes.key), ("value", codes.value)):
        figures[f"{side}: bit classes"] = bit_classes(code, layer_ids)
        figures[f"{side}: spectra"] = spectra(code, layer_ids)
        if (kind := found[side]["error_kind"]) is not None:
            figures[f"{side}: {kind} error"] = error_map(np.asarray(found[side]["errors"]), layer_ids)
            worst = found[side]["worst_heads"]
            rows = [(str(each["layer"]), str(each["head"]), f"{each['error']:.4f}") for each in worst]
            tables[f"{side}: worst heads by {kind} error"] = [("layer", "KV head", "error"), *rows]
    drawn = {heading: report.svg(figure) for heading, figure in figures.items()}
    files = {f"{heading.replace(': ', '-').replace(' ', '-')}.svg": element for heading, element in drawn.items()}
    files["inspect.html"] = report.page(f"Recipe {found['recipe']}", tables=tables, figures=drawn, report=found)
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        report.write_text(folder / name, text)
    return [folder / name for name in files]
