"""Random requests on a random model against themselves alone: `oscar-jax bench soak`."""

from __future__ import annotations

import json

import pytest

from oscar_jax import cli
from oscar_jax.engine.soak import COUNTS, passed, soak
from oscar_jax.sharding import make_mesh


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


@pytest.mark.slow
@pytest.mark.parametrize("drafts", [3, 0])
def test_requests_on_a_mesh_equal_themselves_alone_on_it(drafts):
    result = soak(60, rows=4, drafts=drafts, mesh=make_mesh(data=2, tensor=2))
    assert passed(result)
    assert result["compilations"] == 0
    assert result["preemptions"]
    assert result["prefix_hits"]
