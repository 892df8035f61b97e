"""Kernels compiled for Hopper without a GPU: what a module holds, what ptxas says, no spills where it counts."""

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels import sm90

pytest.importorskip("triton", reason="PyPI's Triton compiles the kernels")
# Main shapes that are compiled in every run; the others are slow.
QUICK = {"decode": (0, 4), "prefill": (0,), "write": (0,)}
MAIN = [
    pytest.param(operation, shape, marks=() if i in QUICK[operation] else pytest.mark.slow, id=f"{operation}-{i}")
    for operation in sm90.OPERATIONS
    for i, shape in enumerate(sm90.shapes(operation)[1])
]


def doubled(x, *, warps=4):
    def double(x_ref, y_ref):
        y_ref[...] = 2 * x_ref[...]

    return pl.pallas_call(
        double, out_shape=x, compiler_params=plgpu.CompilerParams(num_warps=warps, num_stages=2), name="double"
    )(x)


def crowded(x):
    """Products of 64 x 64 in one warp: 128 values a thread each."""

    def crowd(x_ref, y_ref):
        x = x_ref[...]
        product = jnp.dot(x, x, preferred_element_type=jnp.float32)
        again = jnp.dot(product.astype(x.dtype), x, preferred_element_type=jnp.float32)
        y_ref[...] = product * again * jnp.dot(again.astype(x.dtype), x, preferred_element_type=jnp.float32)

    return pl.pallas_call(
        crowd, out_shape=jax.ShapeDtypeStruct(x.shape, jnp.float32), compiler_params=plgpu.CompilerParams(num_warps=1)
    )(x)


ROW = jax.ShapeDtypeStruct((256,), jnp.float32)


def test_launches_are_found_with_their_parameters_each_once():
    def twice(x):
        return doubled(doubled(doubled(x)), warps=8)

    first, second = sm90.kernels(sm90.lower(twice, ROW))
    assert (first.name, first.grid, first.warps, first.stages) == ("double", (1, 1, 1), 4, 2)
    assert second.warps == 8


def test_a_function_without_a_kernel_is_refused():
    with pytest.raises(ValueError, match="no Triton kernel; expected a pallas_call"):
        sm90.kernels(sm90.lower(jnp.sin, ROW))


def test_what_a_small_kernel_takes():
    [kernel] = sm90.kernels(sm90.lower(doubled, ROW))
    usage = sm90.compiled(kernel)
    assert (usage.spills, usage.stack, usage.shared) == (0, 0, 0)
    assert 4 <= usage.registers <= 32
    assert usage.resident_warps == sm90.WARPS
    assert ".target sm_90a" in usage.ptx
    assert "FADD" in sm90.sass(usage) or "FMUL" in sm90.sass(usage)
    assert 5 <= sm90.instructions(sm90.sass(usage)) <= 100


def test_a_crowded_kernel_spills():
    [kernel] = sm90.kernels(sm90.lower(crowded, jax.ShapeDtypeStruct((64, 64), jnp.float16)))
    usage = sm90.compiled(kernel)
    assert usage.spill_stores > 0
    assert usage.spill_loads > 0
    assert usage.stack > 0
    assert usage.shared
    assert usage.resident_warps <= 8


NESTED = """
.L_x_0:
        /*0000*/                   STL [R1], R2 ;
.L_x_1:
        /*0010*/                   LDL R2, [R1] ;
        /*0020*/                   FADD R2, R2, R3 ;
        /*0030*/              @P0  STL [R1+0x4], R2 ;
        /*0040*/              @P0  BRA `(.L_x_1) ;
        /*0050*/                   LDL R2, [R1] ;
        /*0060*/              @P1  BRA `(.L_x_0) ;
        /*0070*/                   BRA `(.L_x_2) ;
.L_x_2:
        /*0080*/                   LDL R4, [R1] ;
        /*0090*/                   EXIT ;
"""


def test_spills_count_in_innermost_loops_only():
    assert sm90.spills_in_loops(NESTED) == 2
    assert sm90.spills_in_loops(NESTED.replace("LDL", "LDS").replace("STL", "STS")) == 0


def test_shapes_are_read_from_their_first_fields():
    kind, main = sm90.shapes("decode")
    assert sm90.shape_of(kind, "16,65536") == main[0]
    assert sm90.shape_of(kind, "1,8,2,1,64,2,oscar-reference,64") == kind(1, 8, 2, 1, 64, 2, "oscar-reference", 64)
    with pytest.raises(ValueError, match="expected at most batch,context,"):
        sm90.shape_of(kind, "1,8,2,1,64,2,default,64,9")


@pytest.mark.parametrize("batch", [1, 16])
def test_large_heads_fit_shared_memory(batch):
    kind, _ = sm90.shapes("decode")
    kernels = {kernel.name: kernel for kernel in sm90.kernels(sm90.decode(kind(batch, 4096, head_dim=256)))}
    shared = sm90.compiled(kernels["oscar_finish"]).shared  # it holds a decode matrix whole
    assert shared is not None
    assert shared <= sm90.SHARED - sm90.SHARED_RESERVED


# Their registers are full: what they keep beside their loops may go to memory once a program, nothing inside a loop.
FULL = {"oscar_prefill", "oscar_attend_history", "oscar_write_rows"}


@pytest.mark.parametrize(("operation", "shape"), MAIN)
def test_kernels_of_the_main_shapes_do_not_spill(operation, shape):
    usages = [sm90.compiled(kernel) for kernel in sm90.kernels(sm90.OPERATIONS[operation](shape))]
    rows = {"decode": lambda: shape.q_heads // shape.kv_heads * shape.q_len, "prefill": lambda: 64, "write": lambda: 32}
    full = FULL if rows[operation]() > 4 else set()
    assert {usage.kernel.name: usage.spills for usage in usages if usage.spills and usage.kernel.name not in full} == {}
    for usage in usages:
        assert usage.spills < 256
        assert sm90.spills_in_loops(sm90.sass(usage)) == 0, usage.kernel.name
