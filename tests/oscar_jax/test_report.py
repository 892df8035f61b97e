"""Evaluation reports as files."""

import csv
import io
import json
from html.parser import HTMLParser

import pytest

from oscar_jax import cli, evaluate, report

ARMS = {
    name: {
        "kl_mean": kl,
        "kl_interval": (kl * 0.9, kl * 1.2) if kl else None,
        "kl_p99": kl,
        "ppl": 12.5,
        "dppl_percent": kl,
        "dppl_percent_interval": (-kl, kl) if kl else None,
        "top1": 0.5,
        "one_pass": False,
        "layer_errors": [kl, 2 * kl],
        "cache_bytes": 1000,
        "bits_per_element": 3.0,
        "history_bits_per_element": bits,
        "kl_by_position": {"position": [104, 168], "kl": [kl, 2 * kl]},
    }
    for name, kl, bits in [("bf16", 0.0, 16.0), ("<a & b>", 0.25, 2.5), ("default", 0.02, 2.25)]
}
REPORT = {"arms": ARMS, "model": "tiny <model>", "text": "a & b"}


class _Page(HTMLParser):
    """Collects tags, everything a browser would fetch, and whether elements are closed in order."""

    def __init__(self):
        super().__init__()
        self.tags, self.fetched, self.open = [], [], []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        if tag not in ("meta", "br", "link"):
            self.open.append(tag)
        self.fetched += [
            value for name, value in attrs if name in ("src", "href", "xlink:href") and not str(value).startswith("#")
        ]

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        self.open.pop()

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_csv_has_a_row_an_arm_and_both_ends_of_intervals():
    rows = list(csv.DictReader(io.StringIO(report.arms_csv(ARMS))))
    assert [row["arm"] for row in rows] == list(ARMS)
    assert float(rows[1]["dppl_percent_interval_low"]) == -0.25
    assert rows[0]["kl_interval_high"] == ""
    assert "kl_by_position" not in rows[0]
    positions = list(csv.DictReader(io.StringIO(report.positions_csv(ARMS))))
    assert [(row["position"], row["default"]) for row in positions] == [("104", "0.02"), ("168", "0.04")]
    assert "bf16" not in positions[0]
    layers = list(csv.DictReader(io.StringIO(report.layers_csv(ARMS))))
    assert [(row["layer"], row["default"]) for row in layers] == [("0", "0.02"), ("1", "0.04")]


def test_layers_are_drawn_only_where_they_were_measured(tmp_path):
    arms = {name: {key: value for key, value in arm.items() if key != "layer_errors"} for name, arm in ARMS.items()}
    files = report.write_evaluation(tmp_path, REPORT | {"arms": arms}, table=evaluate.rows(arms))
    assert {"layers.csv", "layer_errors.svg"}.isdisjoint(path.name for path in files)
    assert "Error by layer" not in (tmp_path / "report.html").read_text()


def test_the_folder_holds_a_page_that_needs_nothing_else(tmp_path):
    files = report.write_evaluation(tmp_path / "out", REPORT, table=evaluate.rows(ARMS))
    assert sorted(path.name for path in files) == sorted(path.name for path in (tmp_path / "out").iterdir())
    text = (tmp_path / "out" / "report.html").read_text()
    page = _Page()
    page.feed(text)
    assert not page.open
    assert page.tags.count("svg") == 3
    assert not page.fetched
    assert not {"script", "link", "img", "iframe"} & set(page.tags)
    assert "@import" not in text
    assert "url(http" not in text
    assert "&lt;a &amp; b&gt;" in text
    assert json.loads((tmp_path / "out" / "report.json").read_text())["arms"].keys() == ARMS.keys()


def test_a_drawing_repeats_and_names_its_arms():
    first, second = (report.svg(report.kl_by_bits(ARMS)) for _ in range(2))
    assert first == second
    assert "default" in first
    assert first.startswith("<svg")


def test_without_matplotlib_the_command_says_so_before_it_runs(monkeypatch, capsys):
    monkeypatch.setattr(report.importlib.util, "find_spec", lambda name: None)
    assert cli.main(["evaluate", "--model", "no-such", "--recipes", "naive", "--out", "x"]) == 2
    assert "pip install 'oscar-jax[plot]'" in capsys.readouterr().err


def test_rows_without_an_interval_show_a_dash():
    header, baseline, *_ = evaluate.rows(ARMS)
    assert dict(zip(header, baseline, strict=True))["95 % interval"] == "-"


@pytest.mark.parametrize("name", ["report.json", "arms.csv"])
def test_files_are_replaced_whole(tmp_path, name):
    (tmp_path / name).write_text("old")
    report.write_text(tmp_path / name, "new\n")
    assert [path.name for path in tmp_path.iterdir()] == [name]
    assert (tmp_path / name).read_text() == "new\n"


@pytest.mark.parametrize("text", ["new\n", "\ud800"])  # replacing a folder fails, so does writing a lone surrogate
def test_a_failed_write_leaves_nothing_behind(tmp_path, text):
    path = tmp_path / "report.json"
    path.mkdir()
    with pytest.raises((OSError, UnicodeEncodeError)):
        report.write_text(path, text)
    assert list(tmp_path.iterdir()) == [path]


def test_retrieval_is_drawn_by_length_and_depth(tmp_path):
    cells = [
        {"arm": arm, "task": task, "length": length, "depth": depth, "found": 0.25, "log_probability": -1.5}
        for arm in ("bf16", "default")
        for task, depths in (("needle", [0.1, 0.9]), ("common-words", [None]))
        for length in (512, 1024)
        for depth in depths
    ]
    pairs = [{"arm": "default", "task": "needle", "exact": 0.25, "log_probability_change_interval": (0, 1)}]
    found = {"cells": cells, "pairs": pairs, "model": "m", "haystack": "h"}
    report.write_retrieval(tmp_path, found, table=[("task",), ("needle",)])
    drawing = report.retrieval_maps(cells, "needle")
    assert [axes.get_title() for axes in drawing.axes] == ["bf16", "default"]
    labels = [text.get_text() for text in drawing.axes[0].texts]
    assert labels == ["25 %\n-1.5"] * 4
    assert [tick.get_text() for tick in drawing.axes[0].get_yticklabels()] == ["0.1", "0.9"]
    rows = list(csv.DictReader(io.StringIO((tmp_path / "cells.csv").read_text())))
    assert len(rows) == len(cells)
    assert (tmp_path / "pairs.csv").read_text().splitlines()[0] == "arm,task,exact"
    assert {"needle.svg", "common-words.svg", "report.html"} <= {path.name for path in tmp_path.iterdir()}
