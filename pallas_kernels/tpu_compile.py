"""Compiles the TPU kernels with libtpu for chips that are not there, and says what the compiled modules need.

libtpu ends the whole process where a check of its own fails, so cases are compiled in one worker process a chip, which
is started anew at the next case after an abort. `python -m pallas_kernels.tpu_compile --chip v5e --head-dim 128 ..`
compiles what it is given and prints a line of JSON for each chip.

Compiling proves that Mosaic takes the kernel and that it fits the chip; it does not prove that a TPU has run it.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import math
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

# libtpu must neither ask the network what machine this is nor refuse a second process.
ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}
TOPOLOGIES = {"v4": "v4:2x2x1", "v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2", "tpu7x": "tpu7x:2x2x1"}
OPTIONS = ("softcap", "window", "sink-logits")
LAYERS, BATCH, CONTEXT = 32, 4, 4096
POOL_BYTES = 2**28  # of slots a side: XLA moves small pools to VMEM whole, and then copies no pages from HBM
ABORTED = "the worker ended"  # as it does where a check of libtpu fails
MODULE = "pallas_kernels.tpu_compile"


@dataclasses.dataclass(frozen=True)
class Case:
    """One call of a kernel; `options` of `OPTIONS` joined by "+", or "none"."""

    operation: str = "attention"  # or "demote", of many tokens what prefill writes
    head_dim: int = 128
    heads_per_group: int = 4
    q_len: int = 1
    page: int = 128
    kv_heads: int = 8
    recipe: str = "default"  # or "one-bucket", "oscar-reference"
    dtype: str = "bfloat16"
    options: str = "none"
    recent: int = 256
    x64: bool = False


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What became of a case: refused by name, failed, or compiled, and then its bytes."""

    refused: str | None = None
    error: str | None = None
    argument_bytes: int = 0
    aliased_bytes: int = 0  # of arguments that outputs overwrite
    temporary_bytes: int = 0
    padding: float = 1.0  # largest ratio of bytes that an argument takes to those it has
    seconds: float = 0.0

    @property
    def compiled(self) -> bool:
        return self.refused is None and self.error is None


def installed() -> bool:
    """Whether libtpu is here."""
    import importlib.util

    return importlib.util.find_spec("libtpu") is not None


def outcomes(chip: str, cases: Sequence[Case], *, module: str = MODULE, seconds: float = 600) -> Iterator[Outcome]:
    """The outcome of every case, in order, from worker processes.

    Args:
        module: what the worker runs; it reads a case a line and answers a line.
        seconds: how long a worker may take to end.
    """
    left = list(cases)
    while left:
        log = tempfile.TemporaryFile("w+")  # noqa: SIM115, closed below, when the worker has ended
        worker = subprocess.Popen(
            [sys.executable, "-m", module, "--worker", "--chip", chip], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=log, text=True, env=os.environ | ENVIRONMENT,
        )  # fmt: skip
        assert worker.stdin is not None
        assert worker.stdout is not None
        try:
            while left:
                case = left.pop(0)
                try:
                    worker.stdin.write(json.dumps(dataclasses.asdict(case)) + "\n")
                    worker.stdin.flush()
                    line = worker.stdout.readline()
                except BrokenPipeError:
                    line = ""
                if not line:
                    worker.wait(seconds)
                    log.seek(0)
                    yield Outcome(error=f"{ABORTED}: {log.read()[-1000:]}")
                    break
                yield Outcome(**json.loads(line))
        finally:
            worker.stdout.close()
            with contextlib.suppress(BrokenPipeError):
                worker.stdin.close()
            worker.wait(seconds)
            log.close()


def compile_for(chip: str, function: Callable, *arguments: Any, donate: Sequence[int] = (), **options):
    """`function` compiled for an absent chip; array arguments may be shapes. In this process: an abort ends it.

    Args:
        donate: positions of arguments that the outputs may overwrite.
    """
    import jax
    from jax.sharding import SingleDeviceSharding

    sharding = SingleDeviceSharding(described(chip)[0])
    arguments, options = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), (arguments, options)
    )
    with absent(chip):
        traced = jax.jit(function, donate_argnums=tuple(donate)).trace(*arguments, **options)
        return traced.lower(lowering_platforms=("tpu",)).compile()


def absent(chip: str) -> contextlib.AbstractContextManager:
    """Within it Pallas lowers for a chip that is not there, and dispatch takes its kernels to be available."""
    from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

    kind = AbstractDevice(device_kind=described(chip)[0].device_kind, num_cores=1, platform="tpu")
    return use_abstract_mesh(AbstractMesh((1,), ("chip",), abstract_device=kind))


def described(chip: str) -> Sequence[Any]:
    """Devices of a chip's smallest topology."""
    from jax.experimental import topologies

    return topologies.get_topology_desc(platform="tpu", topology_name=TOPOLOGIES[chip]).devices


_ARRAY = re.compile(r"(\w+)\[([\d,]*)\]\{([\d,]*)(?::T\((\d+)(?:,(\d+))?\))?")
_BITS = {"u8": 8, "s8": 8, "f16": 16, "bf16": 16, "u16": 16, "s16": 16, "f32": 32, "s32": 32}


def padding(module: str, least: int = 2**20) -> float:
    """Largest ratio of bytes taken to bytes held among a compiled module's arguments of at least so many bytes."""
    layout = module.partition("entry_computation_layout={(")[2].partition(")->")[0]
    ratios = [1.0]
    for dtype, sizes, order, rows, lanes in _ARRAY.findall(layout):
        if not sizes or not rows:
            continue
        shape, minor_first = [int(n) for n in sizes.split(",")], [int(n) for n in order.split(",")]
        if math.prod(shape) * _BITS[dtype] < 8 * least:
            continue
        tile = [int(n) for n in (lanes, rows) if n]
        held = [shape[axis] for axis in minor_first[: len(tile)]]
        ratios.append(math.prod(-(-n // t) * t for n, t in zip(held, tile, strict=True)) / math.prod(held))
    return max(ratios)


def code_shapes(kind: str, *, kv_heads: int, head_dim: int, layers: int = LAYERS):
    """One side's transform code as shapes: a case needs no calibration to be compiled."""
    import jax

    from pallas_kernels.transform_code import TransformCode

    def array(*shape: int, dtype: str = "float32") -> Any:
        return jax.ShapeDtypeStruct((layers, kv_heads, *shape), dtype)

    d = head_dim
    return TransformCode(
        mu=array(d), encode=array(d, d), bits=array(d, dtype="int8"), delta=array(d), weight=array(d), gain=array(),
        slot_order=array(d, dtype="int32"), decode=array(d, d), clip_threshold=None, metric=None,
        slot_owner=array(d, dtype="int32"), slot_shift=array(d, dtype="int32"), feedback=None,
        kind="minmax" if kind == "minmax" else "levels", clip="rank" if kind == "minmax" else "none",
        clip_ratio=0.96 if kind == "minmax" else 1.0,
    )  # fmt: skip


def compile_case(chip: str, case: Case) -> Outcome:
    """Compiles a case in this process."""
    import jax

    begin = time.perf_counter()
    try:
        function, donate, arguments = _call(case)
        with jax.enable_x64(case.x64):
            compiled = compile_for(chip, function, *arguments, donate=donate)
    except NotImplementedError as error:
        return Outcome(refused=str(error), seconds=time.perf_counter() - begin)
    except (jax.errors.JaxRuntimeError, ValueError, TypeError) as error:
        return Outcome(error=f"{type(error).__name__}: {error}"[:2000], seconds=time.perf_counter() - begin)
    memory, text = compiled.memory_analysis(), compiled.as_text()
    assert memory is not None  # as it is for every compiled TPU program
    assert text is not None
    return Outcome(
        argument_bytes=memory.argument_size_in_bytes, aliased_bytes=memory.alias_size_in_bytes,
        temporary_bytes=memory.temp_size_in_bytes,
        padding=padding(text), seconds=time.perf_counter() - begin,
    )  # fmt: skip


def _call(case: Case) -> tuple[Callable, tuple[int, ...], tuple[Any, ...]]:
    """The function of a case, which arguments it may overwrite, and its arguments as shapes."""
    import jax
    import jax.numpy as jnp

    from pallas_kernels.attention import AttentionSpec, PlainTiers
    from pallas_kernels.attention import tpu as attention
    from pallas_kernels.attention.api import lane_heads
    from pallas_kernels.history import init_history
    from pallas_kernels.rope import Rotary
    from pallas_kernels.storage import storage_dtype
    from pallas_kernels.tiers import Tiers
    from pallas_kernels.transform_code import TransformCodes, flat
    from pallas_kernels.write import tpu as write

    tiers, dim, heads = Tiers(recent=case.recent, page=case.page), case.head_dim, case.kv_heads
    side = code_shapes("minmax" if case.recipe == "oscar-reference" else "levels", kv_heads=heads, head_dim=dim)
    buckets = case.recipe == "default"
    codes = TransformCodes(side, side, Rotary.standard(dim) if buckets else None, 2048 if buckets else None, "float16")
    codes = jax.eval_shape(flat, codes)
    pages = CONTEXT // case.page
    pool = POOL_BYTES // (LAYERS * case.page * heads * dim // 4)
    history = jax.eval_shape(lambda: init_history(codes, pages=pool, page=case.page, tpu_heads=heads))

    def array(*shape: int, dtype: Any = "int32") -> Any:
        return jax.ShapeDtypeStruct(shape, dtype)

    ring, row = tiers.ring(case.q_len), lane_heads(dim, heads)
    rows = heads // row, row * dim
    plain = PlainTiers(*(array(LAYERS, BATCH, n, *rows, dtype=storage_dtype(case.dtype)) for n in (64, 64, ring, ring)))
    k = array(BATCH, case.q_len, heads, dim, dtype=case.dtype)
    table = array(BATCH, pages)
    if case.operation == "demote":

        def demote(history, plain, k, v, codes, layer, starts, counts, table):
            return write.demote(
                history, plain, k, v, layer=layer, starts=starts, counts=counts, page_indices=table, codes=codes,
                tiers=tiers,
            )  # fmt: skip

        return demote, (0,), (history, plain, k, k, codes, array(), array(BATCH), array(BATCH), table)
    options = case.options.split("+")
    spec = AttentionSpec(dim**-0.5, softcap=30.0 if "softcap" in options else None)

    def attend(q, k, v, plain, history, codes, layer, starts, counts, table, window, sinks):
        return attention.attend(
            q, k, v, plain, history, layer=layer, starts=starts, counts=counts, page_indices=table, codes=codes,
            tiers=tiers, spec=spec, window=window, sink_logits=sinks,
        )  # fmt: skip

    q = array(BATCH, case.q_len, heads * case.heads_per_group, dim, dtype=case.dtype)
    window = array() if "window" in options else None
    sinks = array(heads * case.heads_per_group, dtype=jnp.float32) if "sink-logits" in options else None
    arguments = (q, k, k, plain, history, codes, array(), array(BATCH), array(BATCH), table, window, sinks)
    return attend, (), arguments


def _work(chip: str, compile_one: Callable[[str, Case], Outcome] = compile_case) -> None:
    for line in sys.stdin:
        outcome = compile_one(chip, Case(**json.loads(line)))
        print(json.dumps(dataclasses.asdict(outcome)), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chip", choices=[*TOPOLOGIES, "all"], default="all")
    parser.add_argument("--worker", action="store_true", help="read cases from standard input, a line of JSON each")
    for field in dataclasses.fields(Case):
        kind = int if isinstance(field.default, int) else str
        parser.add_argument("--" + field.name.replace("_", "-"), type=kind, default=field.default)
    arguments = parser.parse_args()
    if arguments.worker:
        _work(arguments.chip)
        return
    case = Case(**{field.name: getattr(arguments, field.name) for field in dataclasses.fields(Case)})
    for chip in TOPOLOGIES if arguments.chip == "all" else (arguments.chip,):
        [outcome] = outcomes(chip, [case])
        print(json.dumps({"chip": chip} | dataclasses.asdict(outcome)), flush=True)


if __name__ == "__main__":
    main()
