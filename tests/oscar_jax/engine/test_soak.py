"""Random requests on a random model against themselves alone: `oscar-jax bench soak`."""

from __future__ import annotations

import json

from oscar_jax import cli
from oscar_jax.engine.soak import COUNTS


def test_two_hundred_random_requests_equal_themselves_alone(capsys, tmp_path):
    report = tmp_path / "soak.json"
    assert cli.main(["bench", "soak", "--requests", "200", "--rows", "8", "--json", "--out", str(report)]) == 0
    counts = json.loads(capsys.readouterr().out)
    assert tuple(counts) == COUNTS
    assert (counts["requests"], counts["mismatches"], counts["leaked_pages"]) == (200, 0, 0)
    assert counts["ties"] == 0
    assert counts["preemptions"]
    assert counts["cancelled"]
    assert counts["prefix_hits"]
    assert json.loads(report.read_text())["compilations"] == 0
