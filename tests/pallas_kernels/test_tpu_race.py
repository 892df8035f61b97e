"""The TPU kernels in the TPU's interpreter with its race detector, and that it sees planted faults."""

import dataclasses

import jax
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.attention import tpu
from pallas_kernels.tiers import Tiers
from tests.pallas_kernels import tpu_races
from tests.pallas_kernels.states import Case, State
from tests.pallas_kernels.test_tpu_attention import QUICK, assert_by_the_attention_rule, kernel_state

pytestmark = pytest.mark.tpu_race
# From jax 0.11 or 0.12 on the detector raises unless told to warn; `found` asks it in either case.
WARN = {"on_race": "warn"} if hasattr(pltpu.InterpretParams, "on_race") else {}
# Five steps of a page through three buffers; a sequence without history; one that ends inside a page.
ATTENTION = Case(
    (640, 0, 200), tiers=Tiers(4, 8, 4, 128), head_dim=64, kv_heads=2, q_heads=2, bucket=128, dtype="bfloat16"
)  # fmt: skip
# Pages that are read two and eight to a step.
SHORT = {
    64: dataclasses.replace(ATTENTION, tiers=Tiers(4, 8, 4, 64), kv_heads=1, q_heads=1),
    16: dataclasses.replace(ATTENTION, tiers=Tiers(4, 8, 4, 16), starts=(400, 0)),
}


@pytest.fixture(autouse=True)
def fresh_interpreter():
    yield
    pltpu.reset_tpu_interpret_mode_state()


def attend(case: Case, **options) -> tuple[np.ndarray, State]:
    """Output of the simulated kernel, and its input."""
    codes, state = kernel_state(case)
    parameters = pltpu.InterpretParams(detect_races=True, **WARN, **options)

    @jax.jit
    def run(q, k, v, plain, history, codes, arguments):
        return tpu.attend(
            q, k, v, plain, history, codes=codes, tiers=case.tiers, spec=case.spec, interpret=parameters, **arguments
        )

    arguments = state.q, state.k, state.v, state.plain, state.history, codes, state.arguments
    program = run.lower(*arguments).compile(compiler_options=QUICK)
    return np.asarray(program(*arguments), np.float64), state


@pytest.mark.parametrize("case", [ATTENTION, *SHORT.values()], ids=lambda case: f"page {case.tiers.page}")
def test_attention_has_no_race_and_leaves_no_semaphore(case, capfd):
    out, state = attend(case)
    assert not tpu_races.found()
    assert "non-zero count" not in "".join(capfd.readouterr())
    assert_by_the_attention_rule(case, out, state)


@pytest.mark.parametrize("case", [ATTENTION, SHORT[16]], ids=lambda case: f"page {case.tiers.page}")
def test_a_missing_wait_is_caught(case, monkeypatch, capfd):
    copy = pltpu.make_async_copy

    class Unawaited:
        def __init__(self, *arguments):
            self.arguments = arguments

        def start(self):
            copy(*self.arguments).start()

        def wait(self):
            pass

    monkeypatch.setattr(pltpu, "make_async_copy", Unawaited)
    # By default a simulated copy happens when it is waited for, so one that is not would never write.
    attend(dataclasses.replace(case, starts=(200,)), dma_execution_mode="eager")
    assert tpu_races.found()
    assert "non-zero count" in "".join(capfd.readouterr())


@pytest.mark.parametrize("case", [ATTENTION, SHORT[16]], ids=lambda case: f"page {case.tiers.page}")
def test_a_page_out_of_range_is_caught(case, monkeypatch):
    monkeypatch.setattr(tpu, "_in_range", lambda pages, pool: pages + pool)
    with pytest.raises(Exception, match="Out-of-bounds"):
        attend(dataclasses.replace(case, starts=(200,)))


def test_a_copy_that_never_starts_is_named_and_ended():
    """In as much time as the same test takes whose copies start."""
    test = "tests/pallas_kernels/tpu_hang.py::test_copies"
    assert tpu_races.failure(f"{test}[True]", seconds=45) is None
    waiting = tpu_races.failure(f"{test}[False]", seconds=45)
    assert waiting == f"{test}[False] has not ended after 45 s: does it wait for a copy that never starts?"
