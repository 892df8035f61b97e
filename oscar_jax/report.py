"""Evaluation reports as files: CSV, plots, and one HTML page that opens without a network.

matplotlib is the optional `plot` extra; it is imported only by what draws.
"""

from __future__ import annotations

import contextlib
import csv
import html
import importlib.util
import io
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Arms = Mapping[str, Mapping[str, Any]]

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60em; margin: 2em auto; padding: 0 1em; color: #222 }
table { border-collapse: collapse; margin: 1em 0 }
th, td { padding: .2em .8em; border-bottom: 1px solid #ddd; text-align: right; vertical-align: top }
th:first-child, td:first-child { text-align: left }
svg { max-width: 100%; height: auto }
"""


def require_matplotlib(option: str) -> None:
    """Raises ValueError, naming the option that needs it, where matplotlib is absent."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError(f"{option} draws plots, and matplotlib is not installed; run pip install 'oscar-jax[plot]'.")


def require_place(option: str, path: str | os.PathLike[str], *, folder: bool) -> None:
    """Finds out whether a file or folder can be written before anything has run, and makes nothing.

    Raises:
        ValueError: a folder where a file is to be, a file where a folder is to be.
        PermissionError: nothing can be written there.
    """
    wanted = Path(path).absolute()
    place = next(each for each in (wanted, *wanted.parents) if each.exists())
    if place == wanted and not folder:
        if place.is_dir():
            raise ValueError(f"{option} {path}: that is a folder; expected the name of a file.")
        place = place.parent
    if not place.is_dir():
        raise ValueError(f"{option} {path}: {place} is a file; expected a folder, or a name for a new one.")
    if not os.access(place, os.W_OK | os.X_OK):
        raise PermissionError(f"{option} {path}: {place} is not writable; choose another place.")


def kl_by_position(arms: Arms, *, title: str = "") -> Figure:
    """A line an arm: mean KL from the baseline over bins of positions, logarithmic."""
    figure, axes = new_figure()
    for name, arm in _measured(arms).items():
        by_position = arm["kl_by_position"]
        label = f"{name}: {arm['kl_mean']:.4f} nats, {arm['bits_per_element']:.2f} bits/element"
        axes.plot(by_position["position"], by_position["kl"], label=label)
    axes.set(xlabel="position (tokens)", ylabel="KL to the bf16 cache (nats)", yscale="log", title=title)
    axes.grid(alpha=0.3)
    figure.legend(loc="outside lower center", ncols=2, fontsize="small")
    return figure


def kl_by_bits(arms: Arms, *, title: str = "") -> Figure:
    """A point an arm: mean KL, with its interval, against bits per element of the history alone."""
    figure, axes = new_figure()
    for name, arm in _measured(arms).items():
        bits, kl = arm["history_bits_per_element"], arm["kl_mean"]
        low, high = arm["kl_interval"] or (kl, kl)
        axes.errorbar([bits], [kl], yerr=[[max(kl - low, 0)], [max(high - kl, 0)]], fmt="o", capsize=3)
        axes.annotate(name, (bits, kl), xytext=(6, 4), textcoords="offset points")
    axes.set(xlabel="bits per element of the history", ylabel="KL to the bf16 cache (nats)", yscale="log", title=title)
    axes.margins(x=0.2)
    axes.grid(alpha=0.3)
    return figure


def errors_by_layer(arms: Arms, *, title: str = "") -> Figure:
    """A line an arm that has `layer_errors`: relative error of each layer's attention output."""
    figure, axes = new_figure()
    for name, errors in _layer_errors(arms).items():
        axes.plot(range(len(errors)), errors, marker=".", label=name)
    axes.set(xlabel="layer", ylabel="relative error of the attention output", yscale="log", title=title)
    axes.grid(alpha=0.3)
    axes.legend()
    return figure


def retrieval_maps(cells: Sequence[Mapping[str, Any]], task: str) -> Figure:
    """A map an arm: share of the answers' parts found, by length and depth, above the mean log-probability."""
    from matplotlib.figure import Figure

    of_task = [cell for cell in cells if cell["task"] == task]
    arms, lengths, depths = (list(dict.fromkeys(cell[key] for cell in of_task)) for key in ("arm", "length", "depth"))
    figure = Figure(figsize=(1.5 + 2.6 * len(arms), 1.5 + 0.6 * len(depths)), layout="constrained")
    for axes, arm in zip(figure.subplots(1, len(arms), squeeze=False, sharey=True)[0], arms, strict=True):
        shares = [[0.0] * len(lengths) for _ in depths]
        for cell in of_task:
            if cell["arm"] == arm:
                x, y = lengths.index(cell["length"]), depths.index(cell["depth"])
                shares[y][x] = cell["found"]
                label = f"{100 * cell['found']:.0f} %\n{cell['log_probability']:.1f}"
                axes.text(x, y, label, ha="center", va="center", color="black" if cell["found"] > 0.5 else "white")
        axes.imshow(shares, vmin=0, vmax=1, cmap="viridis", aspect="auto")
        axes.set_xticks(range(len(lengths)), map(str, lengths))
        axes.set_yticks(range(len(depths)), ["all" if depth is None else f"{depth:g}" for depth in depths])
        axes.set(title=arm, xlabel="tokens")
    figure.supylabel("depth")
    return figure


def new_figure(width: float = 8, height: float = 4.5) -> tuple[Figure, Any]:
    """A figure that belongs to no window system, and its axes."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots()


def svg(figure: Figure) -> str:
    """The figure as an `<svg>` element; equal figures give equal text."""
    import matplotlib

    buffer = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "oscar-jax"}):
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    return text[text.index("<svg") :]


def arms_csv(arms: Arms) -> str:
    """One row an arm, its scalar results; an interval becomes the columns `_low` and `_high`."""
    rows: list[dict[str, Any]] = []
    for name, arm in arms.items():
        row: dict[str, Any] = {"arm": name}
        for key, value in arm.items():
            if key.endswith("_interval"):
                row[f"{key}_low"], row[f"{key}_high"] = value or (None, None)
            elif value is None or isinstance(value, int | float | str):
                row[key] = value
        rows.append(row)
    return _csv(list(dict.fromkeys(key for row in rows for key in row)), rows)


def positions_csv(arms: Arms) -> str:
    """One row a bin of positions: its first position, and the mean KL of each arm."""
    columns = {name: arm["kl_by_position"] for name, arm in _measured(arms).items()}
    if not columns:
        return _csv(["position"], [])
    positions = next(iter(columns.values()))["position"]
    return _columns("position", positions, {name: column["kl"] for name, column in columns.items()})


def layers_csv(arms: Arms) -> str:
    """One row a layer: its number, and the relative error of its attention output in each arm that measured it."""
    columns = _layer_errors(arms)
    return _columns("layer", range(len(next(iter(columns.values()), ()))), columns)


def page(title: str, *, tables: Mapping[str, Sequence[Sequence[str]]], figures: Mapping[str, str], report: Any) -> str:
    """One HTML page with everything inside: no script, no font and no picture from elsewhere.

    Args:
        tables: rows of cells by heading, the first row the header.
        figures: SVG elements by heading.
        report: shown whole as JSON at the end.
    """
    parts = [
        f'<!DOCTYPE html>\n<html lang="en">\n<meta charset="utf-8">\n<title>{html.escape(title)}</title>',
        f"<style>{_STYLE}</style>\n<h1>{html.escape(title)}</h1>",
    ]
    for heading, rows in tables.items():
        body = ["".join(f"<td>{html.escape(cell)}</td>" for cell in row) for row in rows[1:]]
        head = "".join(f"<th>{html.escape(cell)}</th>" for cell in rows[0])
        lines = "\n".join(f"<tr>{cells}</tr>" for cells in (head, *body))
        parts.append(f"<h2>{html.escape(heading)}</h2>\n<table>\n{lines}\n</table>")
    parts += [f"<h2>{html.escape(heading)}</h2>\n{element}" for heading, element in figures.items()]
    text = html.escape(json.dumps(report, indent=1))
    parts.append(f"<details><summary>The whole report</summary><pre>{text}</pre></details>\n</html>")
    return "\n".join(parts) + "\n"


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """A table as text, the first row its header: first column to the left, the others to the right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = [
        "  ".join(
            cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])


def write_text(path: Path, text: str) -> None:
    """Writes a file whole or not at all, in a folder that need not exist."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.tmp")
    try:
        temporary.write_text(text, encoding="utf-8", newline="")
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):  # the first error is the one to tell of
            temporary.unlink()
        raise


def write_evaluation(folder: Path, report: Mapping[str, Any], *, table: Sequence[Sequence[str]]) -> list[Path]:
    """`report.json`, CSV of arms, positions and layers, the plots as SVG, and `report.html` of an evaluation.

    Args:
        report: of `evaluate.evaluate`.
        table: its arms for people, the header first.

    Returns:
        The files.
    """
    arms, title = report["arms"], f"{report['model']}, {report['text']}"
    figures = {"KL by position": kl_by_position(arms), "KL against bits": kl_by_bits(arms)}
    layered = bool(_layer_errors(arms))
    if layered:
        figures["Error by layer"] = errors_by_layer(arms)
    drawn = {heading: svg(figure) for heading, figure in figures.items()}
    files = {
        "report.json": json.dumps(report, indent=1) + "\n",
        "arms.csv": arms_csv(arms),
        "positions.csv": positions_csv(arms),
        "kl_by_position.svg": drawn["KL by position"],
        "kl_by_bits.svg": drawn["KL against bits"],
        "report.html": page(title, tables={"Arms": table}, figures=drawn, report=report),
    }
    if layered:
        files |= {"layers.csv": layers_csv(arms), "layer_errors.svg": drawn["Error by layer"]}
    for name, text in files.items():
        write_text(folder / name, text)
    return [folder / name for name in files]


def write_retrieval(folder: Path, report: Mapping[str, Any], *, table: Sequence[Sequence[str]]) -> list[Path]:
    """`report.json`, CSV of cells and pairs, a map a task as SVG, and `report.html` of a retrieval report.

    Args:
        report: of `retrieve`.
        table: its pairs for people, the header first.

    Returns:
        The files.
    """
    cells, pairs = report["cells"], report["pairs"]
    tasks = dict.fromkeys(cell["task"] for cell in cells)
    drawn = {task: svg(retrieval_maps(cells, task)) for task in tasks}
    title = f"{report['model']}, retrieval from {report['haystack']}"
    files = {
        "report.json": json.dumps(report, indent=1) + "\n",
        "cells.csv": _csv(list(cells[0]), cells),
        "pairs.csv": _csv([key for key in pairs[0] if not key.endswith("_interval")], pairs),
        **{f"{task}.svg": element for task, element in drawn.items()},
        "report.html": page(title, tables={"Beside the plain cache": table}, figures=drawn, report=report),
    }
    for name, text in files.items():
        write_text(folder / name, text)
    return [folder / name for name in files]


def _measured(arms: Arms) -> dict[str, Mapping[str, Any]]:
    """The arms that differ from the baseline, whose KL is zero and has no place on a logarithmic axis."""
    return {name: arm for name, arm in arms.items() if arm["kl_mean"] > 0}


def _layer_errors(arms: Arms) -> dict[str, Sequence[float]]:
    return {name: arm["layer_errors"] for name, arm in _measured(arms).items() if "layer_errors" in arm}


def _columns(index: str, labels: Sequence[int], columns: Mapping[str, Sequence[float]]) -> str:
    rows = [{index: label} | {name: column[i] for name, column in columns.items()} for i, label in enumerate(labels)]
    return _csv([index, *columns], rows)


def _csv(columns: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> str:
    buffer = io.StringIO(newline="")
    writer = csv.DictWriter(buffer, columns, lineterminator="\n", extrasaction="ignore")
    writer.writeheader()
    writer.writerows(rows)
    return buffer.getvalue()
