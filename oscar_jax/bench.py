"""`oscar-jax bench`: the GPU's kernels beside the strongest plain attention of the same machine; a plot; the soak.

Device times come from the benchmark modules of `pallas_kernels`; here are the choice of shapes and the report. Anywhere
but on a GPU only `--implementation xla` runs, and its rows hold ratios to plain attention in XLA, no times.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import dispatch
from pallas_kernels.attention import benchmark, benchmark_prefill, xla
from pallas_kernels.write import benchmark as benchmark_write

SWEEP: dict[str, Any] = {
    "batch": [1, 8, 32, 64],
    "context": [4096, 8192, 16384, 32768, 65536, 131072],
    "heads": [(8, 8), (32, 8), (40, 8), (28, 4), (64, 8), (64, 4)],
    "head_dim": [64, 128, 256],
}
MEMORY_SHARE = 0.8  # of the device's memory that a shape's two caches may take
REPEATS = 5
MOST_LABELS = 40
Row = dict[str, Any]


def run(args: argparse.Namespace) -> int:
    """`oscar-jax bench decode|prefill|write|plot|soak`."""
    if args.action == "plot":
        plot(json.loads(Path(args.results).read_text()), Path(args.out))
        print(args.out)
        return 0
    if args.action == "soak":
        return _soak(args)
    # PyTorch's caches lie on the same GPU, so jax must not take most of its memory beforehand.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    _check_device(args)
    with contextlib.redirect_stdout(sys.stderr) if args.json else contextlib.nullcontext():
        found = report(args)
    if args.out:
        Path(args.out).write_text(json.dumps(found, indent=1) + "\n")
    if args.json:
        print(json.dumps(found))
    return 0


def _soak(args: argparse.Namespace) -> int:
    from oscar_jax.engine.soak import COUNTS, passed, soak  # brings the whole engine

    found = soak(args.requests, seed=args.seed, rows=args.rows, drafts=args.drafts, pages=args.pages)
    if args.out:
        options = {"requests": args.requests, "rows": args.rows, "drafts": args.drafts, "seed": args.seed}
        options |= {"pages": args.pages} if args.pages else {}
        command = " ".join(["oscar-jax bench soak", *(f"--{name} {value}" for name, value in options.items())])
        device = {"device": jax.devices()[0].device_kind, "jax": jax.__version__}
        Path(args.out).write_text(json.dumps({"command": command, **found, **device}, indent=1) + "\n")
    counts = {name: found[name] for name in COUNTS}
    print(json.dumps(counts) if args.json else ", ".join(f"{name} {count}" for name, count in counts.items()))
    return 0 if passed(found) else 1


def report(args: argparse.Namespace) -> Row:
    """Times every shape, prints a line for each, and returns what `benchmarks/results/h200-decode.json` holds."""
    rows, skipped = [], []
    bandwidth = benchmark.read_bandwidth() if (args.action, args.implementation) == ("decode", "triton") else None
    for shape in shapes(args):
        reason = _too_large(shape)
        if reason:
            skipped.append({**dataclasses.asdict(shape), "reason": reason})
            print(f"skipped {shape}: {reason}", flush=True)
            continue
        for row in _rows(args, shape, bandwidth):
            rows.append(row)
            print(as_text(row), flush=True)
    device = jax.devices()[0]
    found: Row = {
        "command": f"oscar-jax bench {args.action}",
        "device": device.device_kind,
        "versions": {"jax": jax.__version__, "python": sys.version.split()[0]},
    }
    if "torch" in sys.modules:
        found["versions"]["torch"] = sys.modules["torch"].__version__
    if bandwidth is not None:
        found["read_bandwidth"] = round(bandwidth)
    return {**found, "rows": rows, **({"skipped": skipped} if skipped else {})}


def shapes(args: argparse.Namespace) -> list[Any]:
    """Every combination of the lists that were given; without any, the shapes whose speed is promised."""
    if args.action == "write":
        return _product(
            benchmark_write.Shape, _given(args, "batch", "tokens", "layers", "kv_heads", "head_dim", "recipe")
        )
    given = _given(args, "batch", "context", "heads", "head_dim", "q_len", "recipe", "page")
    if args.sweep:
        given = SWEEP | given
    if not given:
        return list({"decode": benchmark.SHAPES, "prefill": benchmark_prefill.SHAPES}[args.action])
    lists: dict[str, Any] = {"batch": [1], "context": [65536], **given}
    if "heads" in lists:
        lists["heads"] = [{"q_heads": q, "kv_heads": kv} for q, kv in lists["heads"]]
    found = _product(benchmark.Shape, lists)
    for shape in found:
        if shape.q_len > shape.context:
            raise ValueError(f"--q-len {shape.q_len}: expected at most the context, {shape.context} tokens.")
    return found


def _given(args: argparse.Namespace, *names: str) -> dict[str, Any]:
    found = {name: getattr(args, name) for name in names}
    return {name: values for name, values in found.items() if values}


def _product(kind: Callable[..., Any], given: dict[str, list]) -> list[Any]:
    found = []
    for values in itertools.product(*given.values()):
        fields: Row = {}
        for name, value in zip(given, values, strict=True):
            fields |= value if isinstance(value, dict) else {name: value}
        found.append(kind(**fields))
    return found


def _rows(args: argparse.Namespace, shape: Any, bandwidth: Any) -> Iterator[Row]:
    if args.action == "write":
        if shape.tokens > 1:
            yield benchmark_write.prefill_row(shape)
        else:
            for staggered in (False, True):
                yield benchmark_write.decode_row(shape, staggered=staggered)
    elif args.implementation == "xla":
        yield ratio_row(shape)
    elif args.action == "decode":
        yield benchmark.row(shape, bandwidth)
    else:
        yield benchmark_prefill.row(shape)


def ratio_row(shape: benchmark.Shape) -> Row:
    """How many times faster than plain bfloat16 attention in XLA the XLA implementation reads a 2-bit cache."""
    work = benchmark_prefill.prefill_workload(shape)
    ours = statistics.median(benchmark_prefill.ours(work, xla.attend, repeats=1))

    def tokens(count: int, heads: int, seed: int) -> jax.Array:
        dims = (shape.batch, count, heads, shape.head_dim)
        return jax.random.normal(jax.random.key(seed), dims, jnp.bfloat16)

    q, k, v = tokens(shape.q_len, shape.q_heads, 0), *(tokens(shape.context, shape.kv_heads, i) for i in (1, 2))
    seen = jnp.arange(shape.context) <= (shape.context - shape.q_len + jnp.arange(shape.q_len))[:, None]
    attend = jax.jit(lambda q, k, v: jax.nn.dot_product_attention(q, k, v, mask=seen[None, None]))
    plain = _seconds(lambda: attend(q, k, v))
    ratio = round(plain / ours, 3)
    kind = {"tiers": 3, "implementation": "xla", "baseline": "plain bfloat16 attention in XLA"}
    return dataclasses.asdict(shape) | kind | {"ratio": ratio}


def _seconds(call: Callable[[], jax.Array]) -> float:
    jax.block_until_ready(call())
    samples = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        jax.block_until_ready(call())
        samples.append(time.perf_counter() - start)
    return statistics.median(samples)


def as_text(row: Row) -> str:
    """One row as a line."""
    size = f"{row['batch']:3} x {row.get('context', row.get('tokens')):6}"
    if "operation" in row:
        parts = [f"{row['us']:.1f} us"]
        parts += [f"{name} {row[f'{name}_us']:.1f}" for name in ("xla", "copy") if f"{name}_us" in row]
        parts += ["sequences demote in different steps"] if row.get("staggered") else []
        what = f"{row['operation']:6} {size}  {row['layers']} layers, {row['kv_heads']} heads D{row['head_dim']}"
    else:
        parts = [f"{row['packed_bytes'] / 2**20:.0f} MiB packed"] if "packed_bytes" in row else []
        parts += [f"{row['us']:.1f} us", f"baseline {row['baseline_us']:.1f}"] if "us" in row else []
        parts.append(f"{row['ratio']:.2f} times as fast as {row['baseline']}")
        if "bandwidth_share" in row:
            parts.append(f"{row['bandwidth_share']:.0%} of the read bandwidth")
        what = f"{size}  {row['q_heads']}/{row['kv_heads']} D{row['head_dim']} T{row['q_len']}"
    return f"{what} {row['recipe']}: {', '.join(parts)}"


def _check_device(args: argparse.Namespace) -> None:
    """Refuses what cannot be timed here, before anything is allocated."""
    if args.implementation == "xla":
        if args.action == "write":
            raise NotImplementedError(
                "bench write --implementation xla: expected triton, whose rows hold XLA's time too."
            )
        if jax.default_backend() != "gpu" and not (args.batch or args.context):
            raise ValueError(
                "bench --implementation xla without a GPU: expected --batch and --context of a size that fits here, "
                "for example --batch 1 --context 4096."
            )
        return
    reason = dispatch.availability()["triton"]
    if reason is not None:
        raise NotImplementedError(
            f"bench {args.action}: {reason}; --implementation xla prints ratios to plain attention on any device."
        )
    if args.action != "write":
        _check_torch()


def _check_torch() -> None:
    try:
        import torch
    except ImportError:
        torch = None
    if torch is None or not torch.cuda.is_available():
        raise NotImplementedError(
            "bench: the baseline is PyTorch's cuDNN attention on the same GPU; install a torch built with CUDA."
        )


def _too_large(shape: Any) -> str | None:
    stats = jax.devices()[0].memory_stats() or {}
    limit = stats.get("bytes_limit")
    if limit is None or not isinstance(shape, benchmark.Shape):
        return None
    plain = 4 * shape.batch * shape.context * shape.kv_heads * shape.head_dim  # bytes of K and V in bfloat16
    if 1.3 * plain <= MEMORY_SHARE * limit:
        return None
    return f"{1.3 * plain / 2**30:.0f} GiB for both caches, {limit / 2**30:.0f} GiB on the device"


def plot(found: Row, path: Path) -> None:
    """Draws the share of the read bandwidth over the packed bytes of a call, a line for each form of attention.

    Args:
      found: a report of `bench decode`.
      path: an .svg or .png file.
    """
    rows = [row for row in found["rows"] if "bandwidth_share" in row]
    if not rows:
        raise ValueError("the report has no row with bandwidth_share; expected one of `oscar-jax bench decode`.")
    try:
        import matplotlib
    except ImportError as error:
        raise NotImplementedError("bench plot needs matplotlib; install oscar-jax[plot].") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "oscar-jax"}):
        figure, axes = pyplot.subplots(figsize=(9, 4.5))
        for i, (form, group) in enumerate(_grouped(rows)):
            group.sort(key=lambda row: row["packed_bytes"])
            x, y = [row["packed_bytes"] / 2**20 for row in group], [100 * row["bandwidth_share"] for row in group]
            axes.plot(x, y, marker="o", linewidth=1, label=form, color=f"C{i % 10}")
            for row, at in zip(group, zip(x, y, strict=True), strict=True):
                label = f"{row['batch']} x {row['context'] // 1024}K" * (len(rows) <= MOST_LABELS)
                offset = (4, -10 if i % 2 else 4)
                axes.annotate(label, at, offset, textcoords="offset points", size=7, color=f"C{i % 10}")
        axes.margins(x=0.1)
        axes.axhline(100, color="black", linewidth=1)
        axes.set(
            xscale="log", ylim=(0, 105), xlabel="packed history, MiB a call (points: batch x context)",
            ylabel=f"% of {found['read_bandwidth'] / 1e12:.2f} TB/s read bandwidth", title=f"Decode, {found['device']}",
        )  # fmt: skip
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5), title="heads, size, query tokens, recipe")
        figure.tight_layout()
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
        pyplot.close(figure)


def _grouped(rows: Iterable[Row]) -> list[tuple[str, list[Row]]]:
    groups: dict[str, list[Row]] = {}
    for row in rows:
        form = f"{row['q_heads']}/{row['kv_heads']}, D = {row['head_dim']}, T = {row['q_len']}, {row['recipe']}"
        groups.setdefault(form, []).append(row)
    return list(groups.items())
