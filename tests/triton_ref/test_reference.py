"""The OSCAR reference's semantics, each against its own description, one at a time."""

import dataclasses
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch", reason="the reference is PyTorch")

from triton_ref import clip, codec, linalg, reference  # noqa: E402
from triton_ref.reference import REFERENCE, Semantics  # noqa: E402
from triton_ref.tiers import Tiers  # noqa: E402


def gaussian(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@settings(max_examples=40, deadline=None)
@given(st.sampled_from((64, 128, 256)), st.sampled_from((0.85, 0.92, 0.96, 1.0)), st.integers(0, 10**6))
def test_bisection_ends_one_rank_lower_and_less_than_a_step_above(dim, ratio, seed):
    y = gaussian(5, dim, seed=seed)
    magnitude = y.abs().sort(-1).values
    rank = clip.rank(ratio, dim)
    found = clip.bisected_threshold(y, ratio)[:, 0]
    step = magnitude[:, -1] / 2 ** int(math.log2(dim))
    assert (found >= magnitude[:, rank - 1]).all()
    assert (found <= magnitude[:, rank - 1] + step * 1.0001).all()
    # Strictly exceeding magnitudes: sorting leaves D - 1 - rank of them, bisection at most one more.
    assert ((y.abs() > found[:, None]).sum(-1) <= dim - rank).all()
    torch.testing.assert_close(clip.sorted_threshold(y, ratio)[:, 0], magnitude[:, rank])


def test_zero_points_give_the_rows_of_offsets_but_for_rounding():
    y = gaussian(200, 128)
    wide = dataclasses.replace(REFERENCE, parameter_dtype=torch.float32)
    offsets = Semantics(parameter_dtype=torch.float32)
    rows = [reference.encode(y, 0.96, semantics) for semantics in (wide, offsets)]
    assert (codec.unpack(rows[0].slots) != codec.unpack(rows[1].slots)).float().mean() < 1e-4
    decoded = [reference.decode(row, semantics) for row, semantics in zip(rows, (wide, offsets), strict=True)]
    assert ((decoded[0] - decoded[1]).abs() > 1e-5).float().mean() < 1e-4


def test_a_constant_row_comes_back():
    y = torch.full((1, 64), 2.5)
    row = reference.encode(y, 0.96, REFERENCE)
    assert float(row.scale[0, 0]) == pytest.approx(reference.RANGE_FLOOR / 3)
    torch.testing.assert_close(reference.decode(row, REFERENCE), y, rtol=1e-6, atol=0)


def test_groups_have_their_own_parameters():
    y = gaussian(50, 128) * torch.exp(gaussian(128, seed=1))
    errors = []
    for group in (None, 32):
        semantics = dataclasses.replace(REFERENCE, group=group)
        row = reference.encode(y, 0.96, semantics)
        assert row.scale.shape == (50, 1 if group is None else 4)
        errors.append((reference.decode(row, semantics) - y).square().mean())
    assert errors[1] < 0.8 * errors[0]
    with pytest.raises(ValueError, match="group=48: expected a divisor"):
        reference.encode(y, 0.96, dataclasses.replace(REFERENCE, group=48))


def test_errors_on_gaussian_rows_are_those_measured_on_the_reference():
    """Relative squared errors at D = 128: .156 at rank .96, .127 at .92, .251 unclipped, .141 with its Lloyd-Max."""
    y = gaussian(8000, 128)

    def error(ratio, **changes):
        semantics = dataclasses.replace(REFERENCE, **changes)
        decoded = reference.decode(reference.encode(y, ratio, semantics), semantics)
        return float((decoded - y).square().sum() / y.square().sum())

    assert error(0.96) == pytest.approx(0.156, abs=0.002)
    assert error(0.92) == pytest.approx(0.127, abs=0.002)
    assert error(0.0) == pytest.approx(0.251, abs=0.003)
    assert error(0.96, codebook="lloyd-max") == pytest.approx(0.141, abs=0.002)


def test_history_end_of_the_reference_is_its_flush_counter():
    """Simulates the counter: initialised to max(0, W + 7 - H0), a flush of 8 when it is zero, else one less."""
    tiers = Tiers(sink=16, recent=24, group=8)
    for prompt, chunk in ((100, 1000), (101, 1000), (101, 32), (128, 32), (17, 1000), (130, 128)):
        positions = torch.arange(prompt + 70)
        got = tiers.reference_history_end(positions, prompt=prompt, chunk=chunk).tolist()
        last_chunk = (prompt - 1) // chunk * chunk
        end = max(tiers.sink, last_chunk, prompt - tiers.recent)
        counter = max(0, tiers.recent + 7 - (prompt - end))
        for position in range(prompt):
            assert got[position] == max(tiers.sink, position // chunk * chunk)
        for position in range(prompt, len(positions)):
            if counter == 0:
                end, counter = end + 8, 7
            else:
                counter -= 1
            assert got[position] == end, (prompt, chunk, position)
            assert position + 1 - end <= tiers.recent + 7
        recents = np.arange(prompt, len(positions)) + 1 - np.array(got[prompt:])
        assert set(recents[60:]) <= set(range(tiers.recent, tiers.recent + 8))


def test_this_projects_rule_counts_from_position_zero():
    tiers = Tiers(sink=16, recent=24, group=8)
    positions = torch.arange(300)
    ends = tiers.history_end(positions)
    assert (ends == tiers.reference_history_end(positions, prompt=1, chunk=1000))[1:].all()
    recents = (positions + 1 - ends)[positions >= 40]
    assert set(recents.tolist()) == set(range(24, 32))


def serve(semantics, *, prompt=80, chunk=1000, rotations=None):
    q, k, v = gaussian(120, 4, 64), gaussian(120, 2, 64, seed=1), gaussian(120, 2, 64, seed=2)
    matrix = linalg.hadamard(64).float()
    tiers = Tiers(sink=8, recent=16, group=8)
    rotations = rotations or (matrix, matrix)
    return reference.serve(q, k, v, rotations, semantics=semantics, tiers=tiers, prompt=prompt, chunk=chunk)


def test_a_prompt_of_one_chunk_is_read_without_loss_only_chunk_exactly():
    lossless = serve(Semantics(plain_dtype=torch.float32), prompt=120, chunk=16_384)
    exact = serve(Semantics(prefill="chunk-exact", plain_dtype=torch.float32), prompt=120)
    q, k, v = gaussian(120, 4, 64), gaussian(120, 2, 64, seed=1), gaussian(120, 2, 64, seed=2)
    grouped = [x.repeat_interleave(2, 1).transpose(0, 1) for x in (k, v)]
    plain = torch.nn.functional.scaled_dot_product_attention(q.transpose(0, 1), *grouped, is_causal=True)
    torch.testing.assert_close(exact, plain.transpose(0, 1), rtol=1e-5, atol=1e-5)
    assert (lossless - exact).abs().max() > 1e-3


@pytest.mark.parametrize(
    "change",
    [
        {"clip": "by-writer"},
        {"parameters": "zero-point"},
        {"parameter_dtype": torch.float32},
        {"frame": "rotated"},
        {"recents": "from-prompt"},
        {"prefill": "chunk-exact"},
        {"parameters": "zero-point", "codebook": "lloyd-max"},
        {"group": 32},
    ],
    ids=str,
)
def test_every_option_changes_something_and_breaks_nothing(change):
    base = Semantics(plain_dtype=torch.float32)
    ours = serve(base, prompt=77)
    changed = serve(dataclasses.replace(base, **change), prompt=77)
    difference = (changed - ours).norm() / ours.norm()
    assert 0 < difference < 0.5


def test_rotated_tiers_cost_only_rounding_where_nothing_is_quantized():
    wide = Semantics(prefill="chunk-exact", frame="rotated", plain_dtype=torch.float32)
    plain = dataclasses.replace(wide, frame="plain")
    factor = gaussian(2, 64, 64).double()
    rotation = linalg.reference_rotation(factor @ factor.mT).float()
    a, b = (serve(each, prompt=120, rotations=(rotation, rotation)) for each in (wide, plain))
    torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    narrow = serve(dataclasses.replace(wide, plain_dtype=torch.bfloat16), prompt=120, rotations=(rotation, rotation))
    assert 1e-3 < (narrow - b).norm() / b.norm() < 2e-2


def test_lloyd_max_needs_zero_points():
    with pytest.raises(ValueError, match="expected parameters='zero-point'"):
        reference.encode(gaussian(1, 64), 0.96, Semantics(codebook="lloyd-max"))
