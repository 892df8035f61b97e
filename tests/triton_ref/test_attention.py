"""Three-tier attention: eager float64 equals the numpy definition, Triton's kernels equal eager within 2e-6."""

from typing import Any

import numpy as np
import pytest

from pallas_kernels.tiers import Tiers as JaxTiers
from tests.pallas_kernels.states import Case, build, codes_of, expected

torch = pytest.importorskip("torch", reason="the reference is PyTorch")
pytest.importorskip("triton", reason="the kernels are Triton")

from tests.triton_ref.adapters import tensor, torch_code  # noqa: E402
from triton_ref import cases, states  # noqa: E402
from triton_ref.cache import Call, LayerCache, Pages, attend  # noqa: E402
from triton_ref.code import TransformCodes  # noqa: E402
from triton_ref.kernels import decode  # noqa: E402
from triton_ref.rope import Rotary  # noqa: E402
from triton_ref.tiers import Tiers  # noqa: E402

SMALL = JaxTiers(4, 8, 4, 16)
CASES = {
    "buckets": Case((0, 5, 70), tiers=SMALL, bucket=32),
    "stored offsets": Case((37,), tiers=SMALL, key="naive", value="rotation-rank"),
    "everything at once": Case(
        (0, 5, 70), tokens=2, counts=(0, 1, 2), tiers=SMALL, bucket=32, head_dim=96, q_heads=3, kv_heads=1,
        key="naive", value="rotation-rank", softcap=2.0, sinks=True, window=40,
    ),
    "no sinks, one head a group": Case((30, 8), tiers=JaxTiers(0, 8, 8, 16), q_heads=2),
}  # fmt: skip


def arguments(case):
    """The same call for PyTorch, and the definition's outputs."""
    codes = codes_of(case)
    state = build(case, codes)
    sides = [
        Pages(tensor(side.slots[1]), tensor(side.scale[1]), None if side.offset is None else tensor(side.offset[1]))
        for side in (state.history.key, state.history.value)
    ]
    plain = state.plain
    cache = LayerCache(
        tensor(plain.sink_k[1]), tensor(plain.sink_v[1]), tensor(plain.recent_k[1]), tensor(plain.recent_v[1]),
        sides[0], sides[1], tensor(state.arguments["page_indices"]),
    )  # fmt: skip
    sinks = state.arguments["sink_logits"]
    call = Call(
        tensor(state.arguments["starts"]), tensor(state.arguments["counts"]), case.spec.scale, case.softcap,
        case.window, None if sinks is None else tensor(sinks),
    )  # fmt: skip
    rotary = None
    if codes.rotary is not None:
        rotary = Rotary(codes.rotary.inverse_frequencies, codes.rotary.rotary_dim, codes.rotary.pairing)
    both = TransformCodes(torch_code(codes.key, 1), torch_code(codes.value, 1), rotary, codes.bucket)
    tiers = Tiers(case.tiers.sink, case.tiers.recent, case.tiers.group, case.tiers.page)
    rows: list[Any] = [tensor(x) for x in (state.q, state.k, state.v)]
    return [*rows, cache, both, call], tiers, expected(case, state)


def errors(case, out, wanted):
    """Largest error relative to the largest output."""
    largest = max(np.abs(want).max(initial=0) for want in wanted)
    return max(np.abs(out[b, :n].numpy() - want).max(initial=0) for b, (n, want) in enumerate(zip(case.new, wanted, strict=True))) / largest  # fmt: skip  # noqa: E501


@pytest.mark.parametrize("name", CASES)
def test_eager_equals_the_definition_and_kernels_equal_eager(name):
    case = CASES[name]
    (q, *rest), tiers, wanted = arguments(case)
    assert errors(case, attend(q.double(), *rest, tiers=tiers), wanted) < 1e-13
    assert errors(case, attend(q, *rest, tiers=tiers), wanted) < 2e-6
    assert errors(case, decode.attend(q, *rest, tiers=tiers), wanted) < 2e-6


def test_splits_change_nothing_but_rounding():
    case = Case((200,), tiers=SMALL, bucket=64)
    (q, *rest), tiers, wanted = arguments(case)
    for span in (64, 128, 512):
        assert errors(case, decode.attend(q, *rest, tiers=tiers, span=span), wanted) < 2e-6


def test_a_sequence_without_tokens_gives_zeros():
    case = Case((0, 20), tokens=1, counts=(0, 1), tiers=SMALL)
    (q, *rest), tiers, _ = arguments(case)
    for run in (attend, decode.attend):
        out = run(q, *rest, tiers=tiers)
        assert not out[0].any()
        assert torch.isfinite(out).all()


def test_bfloat16_is_refused_in_the_interpreter():
    if torch.cuda.is_available():
        pytest.skip("not the interpreter")
    both = cases.codes("default", head_dim=64, kv_heads=1, bucket=32, seed=0).layer(0)
    shape = states.Shape((20,), dtype=torch.bfloat16, q_heads=2)
    rows = cases.activations(64, 1, seed=0, length=21)
    state = states.build(shape, both, lambda b, length: tuple(x[0, 0, :length] for x in rows), seed=0)
    with pytest.raises(NotImplementedError, match="bf16 in Triton's CPU interpreter"):
        decode.attend(state.q, state.k, state.v, state.cache, both, state.call, tiers=shape.tiers)
