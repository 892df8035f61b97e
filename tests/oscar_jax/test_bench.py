"""`oscar-jax bench`: which shapes, refusals without a GPU, ratios on any device, the report and its plot."""

from __future__ import annotations

import json
from pathlib import Path

import jax
import pytest

from oscar_jax import bench, cli
from pallas_kernels.attention import benchmark
from pallas_kernels.write import benchmark as benchmark_write

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "h200-decode.json"


def parsed(*arguments):
    return cli.parser().parse_args(["bench", *arguments])


@pytest.fixture
def timed(monkeypatch):
    """A GPU by word of mouth: rows of 100 us, times that nobody measured."""

    def row(shape, bandwidth):
        return {
            "batch": shape.batch, "context": shape.context, "q_heads": shape.q_heads, "kv_heads": shape.kv_heads,
            "head_dim": shape.head_dim, "q_len": shape.q_len, "recipe": shape.recipe, "us": 100.0, "baseline": "plain",
            "baseline_us": 450.0, "ratio": 4.5, "packed_bytes": 2**30, "bandwidth_share": 0.75,
        }  # fmt: skip

    monkeypatch.setattr(bench, "_check_device", lambda args: None)
    monkeypatch.setattr(benchmark, "row", row)
    monkeypatch.setattr(benchmark, "read_bandwidth", lambda: 4e12)


def test_without_lists_the_promised_shapes_are_timed():
    assert bench.shapes(parsed("decode")) == list(benchmark.SHAPES)
    assert bench.shapes(parsed("write")) == [benchmark_write.Shape()]


def test_lists_are_combined():
    found = bench.shapes(
        parsed("decode", "--batch", "1,16", "--heads", "28/4,64/8", "--q-len", "4", "--context", "8192")
    )
    assert [(shape.batch, shape.q_heads, shape.kv_heads) for shape in found] == [
        (1, 28, 4), (1, 64, 8), (16, 28, 4), (16, 64, 8)
    ]  # fmt: skip
    assert {(shape.context, shape.q_len) for shape in found} == {(8192, 4)}
    write = bench.shapes(parsed("write", "--tokens", "1,4096", "--recipe", "default,oscar-reference"))
    assert [(shape.tokens, shape.recipe) for shape in write] == [
        (1, "default"), (1, "oscar-reference"), (4096, "default"), (4096, "oscar-reference")
    ]  # fmt: skip


def test_the_sweep_has_every_combination_once_and_lists_narrow_it():
    assert len(set(bench.shapes(parsed("decode", "--sweep")))) == 4 * 6 * 6 * 3
    assert len(bench.shapes(parsed("decode", "--sweep", "--head-dim", "128", "--context", "65536"))) == 4 * 6


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("decode", "--heads", "32"), "expected query heads/KV heads"),
        (("decode", "--heads", "32/5"), "expected query heads/KV heads"),
        (("prefill", "--batch", "1,x"), "whole number of at least 1, got 'x'"),
    ],
)
def test_wrong_lists_are_wrong_usage(arguments, reason, capsys):
    with pytest.raises(SystemExit, match="2"):
        parsed(*arguments)
    assert reason in capsys.readouterr().err


def test_more_query_tokens_than_context_are_refused():
    with pytest.raises(ValueError, match="--q-len 16: expected at most the context, 8 tokens"):
        bench.shapes(parsed("decode", "--context", "8", "--q-len", "16"))


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="there is a GPU")
@pytest.mark.parametrize("action", ("decode", "prefill", "write"))
def test_without_a_gpu_the_reason_is_one_sentence(action, capsys):
    assert cli.main(["bench", action]) == 2
    assert f"error: bench {action}: needs an NVIDIA GPU, the default backend is cpu" in capsys.readouterr().err


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="there is a GPU")
def test_ratios_on_a_cpu_want_a_size(capsys):
    assert cli.main(["bench", "decode", "--implementation", "xla"]) == 2
    assert "--batch 1 --context 4096" in capsys.readouterr().err


@pytest.mark.parametrize(("action", "tokens"), [("decode", "1"), ("prefill", "128")])
def test_ratios_of_xla_on_any_device(action, tokens, capsys):
    arguments = ["--batch", "1", "--context", "512", "--heads", "2/1", "--head-dim", "64", "--q-len", tokens]
    assert cli.main(["bench", action, "--implementation", "xla", *arguments, "--json"]) == 0
    [row] = json.loads(capsys.readouterr().out)["rows"]
    assert row["ratio"] > 0
    assert row["implementation"] == "xla"
    assert not any("us" in name.split("_") for name in row)


def test_the_report_is_printed_and_written(timed, capsys, tmp_path):
    out = tmp_path / "rows.json"
    assert cli.main(["bench", "decode", "--batch", "16", "--json", "--out", str(out)]) == 0
    printed = capsys.readouterr()
    found = json.loads(printed.out)
    assert json.loads(out.read_text()) == found
    assert (found["command"], found["read_bandwidth"]) == ("oscar-jax bench decode", 4e12)
    assert [row["batch"] for row in found["rows"]] == [16]
    times = "1024 MiB packed, 100.0 us, baseline 450.0, 4.50 times as fast as plain, 75% of the read bandwidth"
    assert f"16 x  65536  32/8 D128 T1 default: {times}" in printed.err


def test_shapes_that_do_not_fit_are_skipped_by_name(timed, monkeypatch, capsys):
    class Device:
        device_kind = "small"
        memory_stats = staticmethod(lambda: {"bytes_limit": 2**30})

    monkeypatch.setattr(jax, "devices", lambda: [Device])
    assert cli.main(["bench", "decode", "--batch", "1", "--context", "4096,1048576", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [row["context"] for row in found["rows"]] == [4096]
    [skipped] = found["skipped"]
    assert skipped["context"] == 1048576
    assert skipped["reason"] == "5 GiB for both caches, 1 GiB on the device"


def test_rows_of_writes_as_text():
    row = {
        "operation": "write", "batch": 16, "tokens": 4096, "layers": 2, "kv_heads": 8, "head_dim": 128, "us": 400.0,
        "recipe": "default", "xla_us": 9000.0, "copy_us": 130.0,
    }  # fmt: skip
    assert bench.as_text(row) == "write   16 x   4096  2 layers, 8 heads D128 default: 400.0 us, xla 9000.0, copy 130.0"


def test_the_committed_results_are_plotted_alike_every_time(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    paths = [tmp_path / name for name in ("a.svg", "b.svg")]
    for path in paths:
        assert cli.main(["bench", "plot", str(RESULTS), "--out", str(path)]) == 0
    text = paths[0].read_text()
    assert text == paths[1].read_text()
    found = json.loads(RESULTS.read_text())
    assert all(f"{row['batch']} x {row['context'] // 1024}K" in text for row in found["rows"])
    assert found["device"] in text


def test_a_report_without_shares_is_refused(tmp_path, capsys):
    path = tmp_path / "other.json"
    path.write_text('{"rows": [{"us": 1.0}]}')
    assert cli.main(["bench", "plot", str(path)]) == 2
    assert "no row with bandwidth_share" in capsys.readouterr().err


@pytest.mark.gpu
@pytest.mark.parametrize("action", ("decode", "prefill", "write"))
def test_on_the_device(action, capsys):
    if action != "write":
        pytest.importorskip("torch")
    size = {"decode": ["--context", "4096"], "prefill": ["--context", "4096", "--q-len", "512"], "write": []}[action]
    assert cli.main(["bench", action, "--batch", "2", *size, "--json"]) == 0
    assert all(row["us"] > 0 for row in json.loads(capsys.readouterr().out)["rows"])
