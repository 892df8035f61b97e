"""On a GPU: eager PyTorch, Triton and Pallas agree on every vector and on 200 random configurations."""

import dataclasses
import functools

import pytest

torch = pytest.importorskip("torch", reason="the reference is PyTorch")
pytest.importorskip("triton", reason="the kernels are Triton")

from oscar_jax import parity  # noqa: E402
from oscar_jax.parity import cases  # noqa: E402
from triton_ref import cases as made  # noqa: E402
from triton_ref import clip, codec, reference  # noqa: E402
from triton_ref.kernels import quantize  # noqa: E402

CONFIGURATIONS = 200
IMPLEMENTATIONS = ("pallas-triton", "torch", "triton")
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
VECTORS = sorted(path.stem for path in parity.VECTORS.glob("*.npz"))


def failures(case, implementations):
    rows, skips = parity.compare([case], seeds=0, only=implementations)
    absent = [skip.reason for skip in skips if skip.operation is None]
    assert not absent, absent
    assert rows or any(skip.case for skip in skips)
    return [dataclasses.asdict(row) for row in rows if not row.passed]


@functools.cache
def on_gpu(kind, head_dim):
    return made.code(kind, head_dim=head_dim, kv_heads=2, seed=0).to("cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("name", VECTORS)
def test_every_implementation_agrees_on_every_vector(name):
    case = cases.read(parity.VECTORS / f"{name}.npz")
    assert failures(case, ("xla", *IMPLEMENTATIONS)) == []


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(CONFIGURATIONS))
def test_attention_agrees_on_random_configurations(seed):
    case = cases.from_torch(made.random_attention(seed, dtypes=DTYPES), seed)
    rows, _ = parity.compare([case], seeds=0, only=IMPLEMENTATIONS)
    assert [dataclasses.asdict(row) for row in rows if not row.passed] == [], case.meta
    assert {row.implementation for row in rows} == set(IMPLEMENTATIONS)


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 192, 256])
@pytest.mark.parametrize("kind", ["naive", "rotation-rank", "rotation-static", "levels", "levels-uniform"])
def test_kernels_store_what_eager_stores_bit_for_bit(kind, head_dim):
    """From the same y: on the GPU's kernel, eager on the GPU, eager on the CPU; scales of both dtypes."""
    code = on_gpu(kind, head_dim)
    random = torch.Generator().manual_seed(1)
    x = torch.randn(4096, 2, head_dim, generator=random) * torch.exp(torch.randn(4096, 1, 1, generator=random))
    x[0], x[1] = 0, 3.7
    x[2, 0, 3], x[3, 1, 2] = torch.nan, torch.inf
    y = codec.transform(code, x.cuda())
    for scale_dtype in (torch.float16, torch.bfloat16):
        wanted = codec.quantize(code.to("cpu"), y.cpu(), scale_dtype=scale_dtype)
        for found in (
            quantize.quantize(code, y, scale_dtype=scale_dtype),
            codec.quantize(code, y, scale_dtype=scale_dtype),
        ):
            for ours, theirs in zip(found, wanted, strict=True):
                if ours is not None and theirs is not None:
                    torch.testing.assert_close(ours.cpu(), theirs, rtol=0, atol=0, equal_nan=True)


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
@pytest.mark.parametrize("evaluator", ["rank", "bisect"])
def test_the_references_rows_are_the_same_on_the_gpu(evaluator, head_dim):
    y = torch.randn(4096, 2, head_dim, generator=torch.Generator().manual_seed(2))
    y[0], y[1] = 0, 2.5
    for ratio in (0.92, 0.96, 1.0, 0.0):
        wanted = reference.encode(y, ratio, reference.REFERENCE, evaluator=evaluator)
        found = quantize.reference_encode(y.cuda(), ratio, evaluator=evaluator)
        for ours, theirs in zip(found, wanted, strict=True):
            torch.testing.assert_close(ours.cpu(), theirs, rtol=0, atol=0)
        assert 0 <= clip.rank(ratio, head_dim) < head_dim
