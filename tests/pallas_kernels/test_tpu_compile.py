"""The TPU kernels compiled by libtpu for chips that are not there."""

import pytest

from pallas_kernels import tpu_compile
from pallas_kernels.tpu_compile import TOPOLOGIES, Case, Outcome, outcomes
from tests.pallas_kernels import tpu_spec

needs_libtpu = pytest.mark.skipif(not tpu_compile.installed(), reason="needs libtpu")
pytestmark = pytest.mark.tpu_compile


@needs_libtpu
@pytest.mark.parametrize("chip", TOPOLOGIES)
def test_attention_and_writes_compile(chip):
    """Which also says that it fits the chip's VMEM: the compiler refuses what does not."""
    cases = tpu_spec.cases()[chip]
    for case, outcome in zip(cases, outcomes(chip, cases), strict=True):
        assert outcome.compiled, f"{case}: {outcome.refused or outcome.error}"
        assert outcome.padding < 2, f"{case}: an operand takes {outcome.padding} times its bytes"
        # Pools are written in place: a pool that an output did not take over would have to be copied.
        assert (outcome.aliased_bytes > 0) == (case.operation == "demote"), case


@needs_libtpu
def test_what_is_not_built_is_refused_and_not_compiled():
    small, after = Case(page=8), Case(head_dim=64, kv_heads=1)
    refused, compiled = outcomes("v5e", [small, after])
    assert "page=8: 16, 32, 64, 128 are built" in (refused.refused or "")
    assert compiled.compiled
    assert compiled.argument_bytes > 0


def test_every_pair_is_compiled_and_not_too_many_are():
    assert sum(len(cases) for cases in tpu_spec.cases().values()) <= 120


def test_a_worker_that_dies_is_started_anew_at_the_next_case():
    cases = [Case(q_len=n) for n in (1, 13, 2, 13, 3)]
    found = list(outcomes("v5e", cases, module=__name__))
    assert [outcome.error is None for outcome in found] == [True, False, True, False, True]
    assert [outcome.argument_bytes for outcome in found if outcome.error is None] == [1, 2, 3]
    assert tpu_compile.ABORTED in (found[1].error or "")


@pytest.mark.parametrize(
    ("argument", "ratio"),
    [
        ("u8[2,16,8,32,128]{4,3,2,1,0:T(8,128)(4,1)}", 1),
        ("u8[2,16,8,32,64]{4,3,2,1,0:T(8,128)(4,1)}", 2),
        ("u8[2,16,8,32,64]{3,4,2,1,0:T(8,128)(4,1)}", 4),
        ("u8[1000]{0:T(1024)}", 1.024),
        ("f32[3,3]{1,0:T(8,128)}", 1),
    ],
)
def test_padding_is_read_from_the_layout(argument, ratio):
    module = f"HloModule m, entry_computation_layout={{(s32[]{{:T(128)}}, {argument})->f32[8]{{0:T(128)}}}}, x=1"
    assert tpu_compile.padding(module) == pytest.approx(ratio)


def _die_at_thirteen(chip: str, case: Case) -> Outcome:
    import os

    if case.q_len == 13:
        os.abort()
    return Outcome(argument_bytes=case.q_len)


if __name__ == "__main__":
    tpu_compile._work("v5e", _die_at_thirteen)
