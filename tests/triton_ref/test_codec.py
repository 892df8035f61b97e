"""The codec in eager PyTorch and in Triton's interpreter equals the one in JAX bit for bit from the same y (E1)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import codec as jax_codec
from tests.pallas_kernels.codes import KINDS, transform_code

torch = pytest.importorskip("torch", reason="the reference is PyTorch")

from tests.triton_ref.adapters import tensor, torch_code  # noqa: E402
from triton_ref import clip, codec, reference  # noqa: E402

pytest.importorskip("triton", reason="the kernels are Triton")

from triton_ref.kernels import launch, quantize  # noqa: E402


def rows(head_dim, *, seed=3):
    """Rows `[20, 2, D]` with heavy tails, among them zeros, constants, NaN, Inf, and what overflows or vanishes."""
    x = (np.random.default_rng(seed).standard_t(4, size=(20, 2, head_dim)) * 1.5).astype(np.float32)
    x[0], x[1] = 0, 3.7
    x[2, 0, 3], x[3, 1, 2] = np.nan, np.inf
    return x * np.array([1] * 4 + [1e19, 1e-30, 1e30] + [1] * 13, np.float32)[:, None, None]


def assert_same(got, wanted):
    for ours, theirs in zip(got, wanted, strict=True):
        assert (ours is None) == (theirs is None)
        if ours is not None:
            np.testing.assert_array_equal(ours.numpy(), np.asarray(theirs))


@pytest.mark.parametrize(("kind", "head_dim"), [*((kind, 64) for kind in KINDS), ("levels", 96), ("rotation-rank", 96)])
def test_slots_and_parameters_equal_jax(kind, head_dim):
    code = transform_code(kind, head_dim=head_dim)
    quantized = jax.jit(jax_codec.quantize)(
        code.layer(0), jax_codec.transform(code.layer(0), jnp.asarray(rows(head_dim)))
    )
    y = tensor(jax_codec.transform(code.layer(0), jnp.asarray(rows(head_dim))))
    ours = torch_code(code)
    assert_same(codec.quantize(ours, y), quantized)
    if kind != "feedback":
        assert_same(quantize.quantize(ours, y), quantized)


def test_slot_counts_other_than_the_head_size():
    code = transform_code("levels", head_dim=64, slots=72)
    y = jax_codec.transform(code.layer(0), jnp.asarray(rows(64)))
    wanted = jax_codec.quantize(code.layer(0), y)
    assert_same(codec.quantize(torch_code(code), tensor(y)), wanted)
    assert_same(quantize.quantize(torch_code(code), tensor(y)), wanted)


@pytest.mark.parametrize("kind", KINDS)
def test_decoding_equals_jax(kind):
    code = transform_code(kind)
    encoded = jax_codec.encode(code.layer(0), jnp.asarray(rows(64)[7:]))
    offset = None if encoded.offset is None else tensor(encoded.offset)
    stored = codec.Encoded(tensor(encoded.slots), tensor(encoded.scale), offset)
    got = codec.decode(torch_code(code), stored).numpy()
    np.testing.assert_allclose(got, jax_codec.decode(code.layer(0), encoded), atol=3e-5, rtol=3e-5)


def test_error_feedback_is_refused_by_the_kernel():
    with pytest.raises(NotImplementedError, match="error feedback"):
        quantize.quantize(torch_code(transform_code("feedback")), torch.zeros(1, 2, 64))


def test_bfloat16_scales():
    """Not in the interpreter, which has no bfloat16: eager alone."""
    code = transform_code("levels")
    y = jax_codec.transform(code.layer(0), jnp.asarray(rows(64)[7:]))
    wanted = jax_codec.quantize(code.layer(0), y, scale_dtype="bfloat16")
    got = codec.quantize(torch_code(code), tensor(y), scale_dtype=torch.bfloat16)
    np.testing.assert_array_equal(got.scale.float().numpy(), np.asarray(wanted.scale, np.float32))


@pytest.mark.parametrize("evaluator", ["rank", "bisect"])
@pytest.mark.parametrize("head_dim", [64, 96, 128])
def test_the_kernel_stores_the_rows_of_the_reference(evaluator, head_dim):
    y = torch.from_numpy(rows(head_dim)[7:])
    y[0], y[1] = 0, 2.5
    for ratio in (0.92, 0.96, 1.0, 0.0):
        wanted = reference.encode(y, ratio, reference.REFERENCE, evaluator=evaluator)
        got = quantize.reference_encode(y, ratio, evaluator=evaluator)
        for ours, theirs in zip(got, wanted, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


def test_an_unready_process_says_why(monkeypatch):
    if torch.cuda.is_available():
        pytest.skip("kernels run here")
    import triton

    compiled = triton.runtime.jit.JITFunction(quantize.quantize_kernel.fn)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert "is not set" in str(launch.unavailable(compiled))
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert "after triton was imported" in str(launch.unavailable(compiled))
    assert launch.unavailable(quantize.quantize_kernel) is None


def test_rank_is_that_of_the_codec():
    assert [clip.rank(ratio, 128) for ratio in (0.96, 0.92, 1.0)] == [122, 117, 127]
    assert [clip.rank(ratio, 64) for ratio in (0.96, 0.92)] == [61, 58]
