"""The TPU kernels compiled by libtpu for chips that are not there."""

import dataclasses
import json

import pytest

from pallas_kernels import tpu_compile
from pallas_kernels.history import LANES
from pallas_kernels.tpu_compile import TOPOLOGIES, Case, Outcome, outcomes
from tests.pallas_kernels import tpu_spec
from tests.pallas_kernels.gpu_spec import all_pairs, pairs

needs_libtpu = pytest.mark.skipif(not tpu_compile.installed(), reason="needs libtpu")
pytestmark = pytest.mark.tpu_compile
KILLED, ABORTED = 13, 14  # query tokens of planted faults


@needs_libtpu
@pytest.mark.parametrize("chip", TOPOLOGIES)
def test_fault_k17_attention_and_writes_compile(chip):
    """Which also says that it fits the chip's VMEM: the compiler refuses what does not."""
    cases = tpu_spec.cases()[chip]
    for case, outcome in zip(cases, outcomes(chip, cases), strict=True):
        assert outcome.compiled, f"{case}: {outcome.refused or outcome.error}"
        # One head of 64 numbers has no other beside it on the lanes.
        most = 2 if case.kv_heads * case.head_dim < LANES else 1.99
        assert outcome.padding <= most, f"{case}: an operand takes {outcome.padding} times its bytes"
        # Pools are written in place: one that an output did not take over would have to be copied.
        pools = 2 * tpu_compile.POOL_BYTES if case.operation == "demote" else 0
        assert outcome.aliased_bytes >= pools, case
        # Nor is one copied to be read; a layer of the scales may be, where they are gathered.
        assert outcome.temporary_bytes < tpu_compile.POOL_BYTES // 2, f"{case}: {outcome.temporary_bytes} bytes more"


@needs_libtpu
def test_what_is_not_built_is_refused_and_not_compiled():
    small, after = Case(page=8), Case(head_dim=64, kv_heads=1)
    refused, compiled = outcomes("v5e", [small, after])
    assert "page=8: 16, 32, 64, 128 are built" in (refused.refused or "")
    assert compiled.compiled
    assert compiled.argument_bytes > 0
    assert compiled.padding == 2  # sinks of a single head, which fill half of the lanes


@needs_libtpu
def test_a_window_compiles_for_the_smallest_chip_or_is_refused_by_name():
    """The widest windows and twice those, of 16 and 32 bits."""
    sizes = [dict(recent=13300), dict(recent=6000, dtype="float32", q_len=4)]
    cases = [Case(**size) for size in sizes] + [Case(**size | dict(recent=2 * size["recent"])) for size in sizes]
    *fitting, wide, wider = outcomes("v4", cases)
    assert all(outcome.compiled for outcome in fitting), fitting
    for outcome in (wide, wider):
        assert "MiB of VMEM: at most 16 are built; a smaller" in (outcome.refused or ""), outcome


@needs_libtpu
def test_what_is_traced_with_64_bit_numbers_compiles():
    """As calls inside `jax.enable_x64` are: indices and Python's numbers are 64-bit there, which Mosaic has not."""
    cases = [Case(x64=True, page=16), Case("demote", x64=True)]
    assert [outcome.error for outcome in outcomes("v5e", cases)] == [None, None]


@needs_libtpu
def test_queries_of_many_heads_compile():
    case = Case(head_dim=256, heads_per_group=9, q_len=3, kv_heads=32, dtype="float32", recent=1000)
    [outcome] = outcomes("tpu7x", [case])
    assert outcome.compiled, outcome


def test_every_pair_is_compiled_and_not_too_many_are():
    found = tpu_spec.cases()
    assert sum(map(len, found.values())) <= 120
    rows = [{"chip": chip} | dataclasses.asdict(case) for chip, cases in found.items() for case in cases]
    axes = {"chip": list(TOPOLOGIES)} | tpu_spec.AXES
    compiled = set().union(*(pairs({axis: row[axis] for axis in axes}) for row in rows))
    assert not all_pairs(axes) - compiled


def test_the_grid_has_been_compiled():
    """Every case of it is in the result that is committed, and compiled without an array padded to twice its bytes."""
    lines = [json.loads(line) for line in tpu_spec.RESULTS.read_text().splitlines()[1:]]
    wanted = [{"chip": chip} | dataclasses.asdict(case) for chip in TOPOLOGIES for case in tpu_spec.grid()]
    assert sorted(map(tpu_spec.key, lines)) == sorted(map(tpu_spec.key, wanted))
    for line in lines:
        assert line["error"] is None, line
        assert line["refused"] is None, line
        assert line["padding"] < 2, line


@needs_libtpu
def test_fault_k17_a_worker_that_dies_is_started_anew_at_the_next_case():
    """One worker until one is killed, the next until a check of libtpu ends it; every other case is compiled."""
    cases = [Case(q_len=n) for n in (1, KILLED, 2, ABORTED, 3, 4)]
    first, killed, second, aborted, *third = outcomes("v4", cases, module=__name__)
    assert [outcome.error is None for outcome in (first, second, *third)] == [True] * 4
    # What a worker reports in place of bytes is its process.
    assert len({outcome.argument_bytes for outcome in (first, second, *third)}) == 3
    assert third[0].argument_bytes == third[1].argument_bytes
    assert tpu_compile.ABORTED in (killed.error or "")
    assert "Unsupported B2 packed type" in (aborted.error or "")


@pytest.mark.parametrize(
    ("argument", "ratio"),
    [
        ("u8[2,16,8,32,128]{4,3,2,1,0:T(8,128)(4,1)}", 1),
        ("u8[2,16,8,32,64]{4,3,2,1,0:T(8,128)(4,1)}", 2),
        ("u8[2,16,8,32,64]{3,4,2,1,0:T(8,128)(4,1)}", 4),
        ("u8[1000]{0:T(1024)}", 1.024),
        ("s32[2,16,8,1,128]{4,3,2,1,0:T(1,128)}", 1),
        ("s16[2,16,8,16]{3,2,1,0:T(8,128)(2,1)}", 8),
        ("s16[2,1024,8,16]{1,3,2,0:T(8,128)(2,1)}", 1),
        ("f32[3,3]{1,0:T(8,128)}", 1),  # too small to matter
    ],
)
def test_padding_is_read_from_the_layout(argument, ratio):
    module = f"HloModule m, entry_computation_layout={{(s32[]{{:T(128)}}, {argument})->f32[8]{{0:T(128)}}}}, x=1"
    assert tpu_compile.padding(module, least=1000) == pytest.approx(ratio)


def _work_or_die(chip: str, case: Case) -> Outcome:
    """Compiles the least, or what libtpu has a failing check for on v4."""
    import os
    import signal

    import jax
    import jax.numpy as jnp
    from jax.experimental import pallas as pl

    if case.q_len == KILLED:
        os.kill(os.getpid(), signal.SIGKILL)

    def widen(x, out) -> None:
        out[...] = x[...].astype(jnp.int32)

    def call(x):
        return pl.pallas_call(widen, out_shape=jax.ShapeDtypeStruct(x.shape, jnp.int32))(x)

    dtype = jnp.uint2 if case.q_len == ABORTED else jnp.uint8
    tpu_compile.compile_for(chip, call, jax.ShapeDtypeStruct((64, 128), dtype))
    return Outcome(argument_bytes=os.getpid())


if __name__ == "__main__":
    tpu_compile._work("v4", _work_or_die)
