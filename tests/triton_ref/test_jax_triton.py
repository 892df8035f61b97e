"""One kernel, two frameworks: the reference's Triton kernels called from JAX give the bits that PyTorch gets.

Needs a GPU and `jax_triton` (the wheel jax-triton 0.3.1 goes with jax 0.11 and Triton 3.6).
"""

import dataclasses
import os
from typing import Any
from unittest import mock

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the kernels' other caller is PyTorch")
pytest.importorskip("triton", reason="the kernels are Triton")

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402

from triton_ref import cases, codec, states  # noqa: E402
from triton_ref.kernels import decode, launch, quantize  # noqa: E402
from triton_ref.tiers import Tiers  # noqa: E402


def jax_triton():
    try:
        with mock.patch.dict(os.environ):  # it sets Triton's folder to none, which Triton 3.6 refuses
            import jax_triton
    except ImportError as error:
        pytest.skip(f"jax_triton cannot be imported ({error}); install the wheel jax-triton 0.3.1 with --no-deps")
    return jax_triton


def to_jax(tensor):
    if tensor.dtype == torch.bfloat16:
        return jnp.asarray(tensor.cpu().view(torch.uint16).numpy()).view(jnp.bfloat16)
    return jnp.asarray(tensor.cpu().numpy())


def shape_of(tensor):
    return jax.ShapeDtypeStruct(tuple(tensor.shape), to_jax(tensor.reshape(-1)[:1]).dtype)


def assert_bit_equal(from_jax, from_torch):
    for ours, theirs in zip(from_jax, from_torch, strict=True):
        np.testing.assert_array_equal(np.asarray(ours), theirs.cpu().numpy())


def history_call(dtype, device):
    """Inputs, grid, constants and PyTorch outputs of one decode step over INT2 history."""
    tiers = Tiers(4, 8, 4, 32)
    both = cases.codes("default", head_dim=64, kv_heads=2, bucket=64, seed=0).layer(0)
    rows = cases.activations(64, 2, seed=0, length=700)
    shape = states.Shape((30, 690), dtype=dtype, tiers=tiers)
    state = states.build(shape, both, lambda b, length: tuple(x[0, 0, :length] for x in rows), seed=0)
    q = state.q.to(device)
    cache, call = _to(state.cache, device), _to(state.call, device)
    both = both.to(device)
    capacity = tiers.page * cache.page_indices.shape[1]
    prepared = decode.prepare(q, both, call, tiers=tiers, capacity=capacity)
    arrays, splits, constants = decode.history_arguments(prepared, cache, both, call, tiers=tiers, tokens=1, span=128)
    batch, kv_heads, _, count, _ = prepared.queries.shape
    outputs = [
        torch.empty(batch, kv_heads, splits, count, 64, device=device),
        torch.empty(batch, kv_heads, splits, 2, count, device=device),
    ]
    return arrays, (batch, kv_heads, splits), constants, outputs


def _to(value: Any, device: str) -> Any:
    """Tensors of a dataclass, and of dataclasses in it, moved."""
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        return value
    fields = {field.name: _to(getattr(value, field.name), device) for field in dataclasses.fields(value)}
    return dataclasses.replace(value, **fields)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_history_kernel_from_jax_equals_pytorch(dtype):
    jt = jax_triton()
    arrays, grid, constants, outputs = history_call(dtype, "cuda")
    launch.run(decode.history_kernel, grid, *arrays, *outputs, **constants, num_warps=4)
    found = jt.triton_call(
        *map(to_jax, arrays), kernel=decode.history_kernel, out_shape=list(map(shape_of, outputs)), grid=grid,
        num_warps=4, **constants,
    )  # fmt: skip
    assert_bit_equal(found, outputs)

    merged = [torch.empty(*outputs[0].shape[:2], *outputs[0].shape[3:], device="cuda")]
    merged.append(torch.empty(*outputs[1].shape[:2], *outputs[1].shape[3:], device="cuda"))
    rows, width = outputs[0].shape[3:]
    options = dict(ROWS=rows, WIDTH=width, BLOCK=width, SPLITS=grid[2], NORMALISE=True)
    launch.run(decode.merge_kernel, (grid[0] * grid[1],), *outputs, *merged, **options, num_warps=4)
    found = jt.triton_call(
        *map(to_jax, outputs), kernel=decode.merge_kernel, out_shape=list(map(shape_of, merged)),
        grid=(grid[0] * grid[1],), num_warps=4, **options,
    )  # fmt: skip
    assert_bit_equal(found, merged)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["levels", "rotation-rank"])
def test_quantize_kernel_from_jax_equals_pytorch(kind):
    jt = jax_triton()
    code = cases.code(kind, head_dim=64, kv_heads=2, seed=0).to("cuda")
    x = cases.activations(64, 2, seed=0, length=100, text=9)[1][0, 0].float().to("cuda")
    call = quantize.arguments(code, codec.transform(code, x), scale_dtype=torch.float16)
    wanted = call.run()
    found = jt.triton_call(
        *map(to_jax, call.inputs), kernel=quantize.quantize_kernel, out_shape=list(map(shape_of, wanted)),
        grid=call.grid, num_warps=4, enable_fp_fusion=False, **call.constants,
    )  # fmt: skip
    written = 2 if kind == "levels" else 3
    assert_bit_equal(found[:written], wanted[:written])
