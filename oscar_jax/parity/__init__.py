"""`oscar-jax parity`: every implementation that runs here, on the test vectors and on random inputs, one verdict a row.

Rules of equality: `oscar_jax.parity.rules`. What cannot run here is listed with its reason and fails nothing.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax

from oscar_jax.parity import cases, rules

VECTORS = Path(__file__).parents[2] / "tests" / "vectors"
REFERENCE = "PyTorch cannot be imported"


@dataclasses.dataclass(frozen=True)
class Implementation:
    """A name, what makes its operations (raising NotImplementedError or ImportError with the reason), and the precision
    that its attention is judged by where the plain tiers are fp32."""

    name: str
    operations: Callable[[], dict[str, Callable[[cases.Case], rules.Outputs]]]
    fp32: str = "float32"


@dataclasses.dataclass(frozen=True)
class Row:
    """One verdict."""

    implementation: str
    operation: str
    case: str
    max_error: float
    relative_error: float
    slots_equal: bool | None
    passed: bool


@dataclasses.dataclass(frozen=True)
class Skip:
    """What did not run: one case, or with `operation` and `case` None everything of an implementation."""

    implementation: str
    operation: str | None
    case: str | None
    reason: str


def run(args: argparse.Namespace) -> int:
    """`oscar-jax parity`; 0 if every row passed, else 1."""
    start = time.perf_counter()
    rows, skips = compare(
        cases.read_all(Path(args.vectors or VECTORS)), seeds=args.seeds, only=args.implementations or None
    )
    passed = bool(rows) and all(row.passed for row in rows)
    if args.json:
        report = {
            "passed": passed,
            "rows": [dataclasses.asdict(row) for row in rows],
            "skipped": [dataclasses.asdict(skip) for skip in skips],
        }
        print(json.dumps(_finite(report)))
    else:
        print(as_text(rows, skips))
        print(f"{sum(row.passed for row in rows)} of {len(rows)} passed in {time.perf_counter() - start:.0f} s")
    return 0 if passed else 1


def compare(
    vectors: Sequence[cases.Case], *, seeds: int = 1, only: Sequence[str] | None = None
) -> tuple[list[Row], list[Skip]]:
    """Runs implementations on the vectors and on `seeds` sets of random inputs.

    Args:
        only: names of implementations; None is all.

    Raises:
        ValueError: an unknown name.
    """
    _interpret_triton_without_a_gpu()
    known = implementations()
    names = [each.name for each in known]
    if unknown := [name for name in only or () if name not in names]:
        raise ValueError(f"implementations={unknown[0]!r}: expected some of {', '.join(names)}.")
    inputs = list(vectors)
    rows, skips = [], []
    try:
        inputs += [case for seed in range(1, seeds + 1) for case in cases.random_cases(seed)]
    except ImportError as error:
        skips.append(Skip("all", None, "random inputs", f"{REFERENCE} ({error})"))
    for each in known:
        if only is None or each.name in only:
            found, left_out = _run_all(each, inputs)
            rows += found
            skips += left_out
    return rows, skips


def implementations() -> list[Implementation]:
    """All of them, whether they run here or not."""

    def jax_side(function: str, *args: str):
        def operations():
            from oscar_jax.parity import jax_side as module

            return getattr(module, function)(*args)

        return operations

    def torch_side(function: str):
        def operations():
            from oscar_jax.parity import torch_side as module

            return getattr(module, function)()

        return operations

    return [
        Implementation("xla", jax_side("xla_operations")),
        # Transforms queries in fp16 and reads slots with 16-bit fixed point, whatever the windows' dtype.
        Implementation("pallas-triton", jax_side("pallas_operations", "triton"), fp32="float16"),
        Implementation("pallas-tpu", jax_side("pallas_operations", "tpu")),
        Implementation("torch", torch_side("eager_operations")),
        Implementation("triton", torch_side("triton_operations")),
    ]


def _run_all(implementation: Implementation, inputs: Sequence[cases.Case]) -> tuple[list[Row], list[Skip]]:
    try:
        operations = implementation.operations()
    except (ImportError, NotImplementedError) as error:
        return [], [Skip(implementation.name, None, None, str(error))]
    rows, skips = [], []
    for case in inputs:
        place = (implementation.name, case.operation, case.name)
        if case.operation not in operations:
            continue
        precision = implementation.fp32 if case.meta.get("plain_dtype") == "float32" else None
        try:
            with warnings.catch_warnings():
                # Thin statistics and a deprecation of Pallas: known, and no news of parity.
                warnings.simplefilter("ignore")
                verdict = rules.judge(case, operations[case.operation](case), precision=precision)
        except NotImplementedError as error:
            skips.append(Skip(*place, str(error)))
            continue
        except Exception as error:  # a crash fails its row, and the other rows still count
            print(f"oscar-jax: {' '.join(place)}: {error!r}", file=sys.stderr)
            verdict = rules.Verdict(math.inf, math.inf, None, False)
        rows.append(Row(*place, **dataclasses.asdict(verdict)))
    absent = [name for name in cases.OPERATIONS if name not in operations]
    skips += [Skip(implementation.name, name, None, "not an operation of this implementation") for name in absent]
    return rows, skips


def _interpret_triton_without_a_gpu() -> None:
    """Triton reads the variable when it is imported, so this must come before."""
    if jax.default_backend() != "gpu" and "triton" not in sys.modules:
        os.environ["TRITON_INTERPRET"] = "1"


def as_text(rows: Sequence[Row], skips: Sequence[Skip]) -> str:
    """A matrix of implementations by operations, then every row, then what did not run."""
    lines = [*_matrix(rows, skips), ""]
    width = max((len(row.case) for row in rows), default=4)
    lines.append(f"{'implementation':14} {'operation':11} {'case':{width}} max error  relative  slots    verdict")
    for row in rows:
        slots = {None: "-", True: "equal", False: "differ"}[row.slots_equal]
        lines.append(
            f"{row.implementation:14} {row.operation:11} {row.case:{width}} {row.max_error:9.1e} "
            f"{row.relative_error:9.1e}  {slots:7}  {'pass' if row.passed else 'FAIL'}"
        )
    if skips:
        lines += ["", "not run:"]
        lines += [
            f"{skip.implementation}{''.join(f' {part}' for part in (skip.operation, skip.case) if part)}: {skip.reason}"
            for skip in skips
            if skip.case is not None or skip.operation is None
        ]
    return "\n".join(lines)


def _matrix(rows: Sequence[Row], skips: Sequence[Skip]) -> Iterator[str]:
    names = list(dict.fromkeys([each.implementation for each in (*rows, *skips) if each.implementation != "all"]))
    yield " " * 14 + "".join(f"{operation:>12}" for operation in cases.OPERATIONS)
    for name in names:
        cells = []
        for operation in cases.OPERATIONS:
            verdicts = [row.passed for row in rows if (row.implementation, row.operation) == (name, operation)]
            cells.append(f"{sum(verdicts)}/{len(verdicts)}" if verdicts else "-")
        yield f"{name:14}" + "".join(f"{cell:>12}" for cell in cells)


def _finite(value: Any) -> Any:
    """JSON has no infinity: an error without bound becomes null."""
    if isinstance(value, dict):
        return {name: _finite(x) for name, x in value.items()}
    if isinstance(value, list):
        return [_finite(x) for x in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
