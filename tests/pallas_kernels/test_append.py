"""New tokens in the plain tiers: the one-launch kernel stores the bits that the definition says, and nothing else."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.attention import PlainTiers
from pallas_kernels.storage import stored
from pallas_kernels.tiers import Tiers
from pallas_kernels.write import append, triton_append


@dataclasses.dataclass(frozen=True)
class Case:
    tokens: int = 1
    sink: int = 4
    ring: int = 24
    heads: int = 2
    dim: int = 64
    dtype: str = "bfloat16"
    starts: tuple[int, ...] = (0, 3, 4, 30)
    counts: tuple[int, ...] = (1, 1, 0, 1)

    @property
    def tiers(self) -> Tiers:
        return Tiers(self.sink, 8, 8, 8)


CASES = {
    "decode": Case(),
    "several tokens over the edge of the sinks": Case(tokens=6, counts=(6, 5, 3, 0)),
    "a chunk longer than the ring": Case(tokens=40, counts=(40, 33, 25, 24)),
    "no sinks": Case(tokens=3, sink=0, counts=(3, 2, 1, 0)),
    "three heads of 80, fp16": Case(tokens=2, heads=3, dim=80, dtype="float16", counts=(2, 1, 2, 0)),
    "heads of 256, fp32": Case(heads=1, dim=256, dtype="float32"),
}
LAYERS, LAYER = 3, 1


def build(case: Case):
    rng = np.random.default_rng(0)
    batch = len(case.starts)

    def draw(*shape) -> jax.Array:
        return jnp.asarray(rng.standard_normal(shape), case.dtype)

    sides = [draw(LAYERS, batch, n, case.heads, case.dim) for n in (case.sink, case.sink, case.ring, case.ring)]
    k, v = (draw(batch, case.tokens, case.heads, case.dim) for _ in range(2))
    return PlainTiers(*map(stored, sides)), k, v


def defined(case: Case, plain: PlainTiers, k, v) -> list[np.ndarray]:
    """Token by token: a sink lies at its position, any other token at its position modulo the ring's length."""
    sink_k, sink_v, recent_k, recent_v = (np.array(x) for x in jax.tree.leaves(plain))
    for b, (start, count) in enumerate(zip(case.starts, case.counts, strict=True)):
        for t in range(count):
            position = start + t
            for sinks, ring, rows in ((sink_k, recent_k, k), (sink_v, recent_v, v)):
                row = np.asarray(stored(rows[b, t]))
                if position < case.sink:
                    sinks[LAYER, b, position] = row
                else:
                    ring[LAYER, b, position % case.ring] = row
    return [sink_k, sink_v, recent_k, recent_v]


def check(case: Case, function, **options):
    plain, k, v = build(case)
    wanted = defined(case, plain, k, v)
    got = jax.jit(lambda plain, k, v, starts, counts, out: function(
        plain, k, v, layer=jnp.int32(LAYER), starts=starts, counts=counts, tiers=case.tiers, after=out, **options
    ))(plain, k, v, jnp.asarray(case.starts, jnp.int32), jnp.asarray(case.counts, jnp.int32), k)  # fmt: skip
    for ours, theirs in zip(jax.tree.leaves(got), wanted, strict=True):
        np.testing.assert_array_equal(np.asarray(ours), theirs)


@pytest.mark.parametrize("name", CASES)
def test_interpreted(name):
    check(CASES[name], triton_append.append, interpret=True)


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_on_a_gpu(name):
    check(CASES[name], append, implementation="triton")


@pytest.mark.parametrize(
    ("k", "v", "starts", "message"),
    [
        ((4, 1, 2, 64), (4, 2, 2, 64), 4, "expected both"),
        ((3, 1, 2, 64), (3, 1, 2, 64), 3, "the same sequences and heads"),
        ((4, 1, 4, 32), (4, 1, 4, 32), 4, "the same sequences and heads"),
        ((4, 1, 1, 128), (4, 1, 1, 128), 4, "the same sequences and heads"),
        ((4, 1, 2, 64), (4, 1, 2, 64), 1, "one for each sequence"),
    ],
)
def test_shapes_that_do_not_fit_are_refused_everywhere(k, v, starts, message):
    case = Case()
    plain, *_ = build(case)
    k, v = (jnp.zeros(shape, case.dtype) for shape in (k, v))
    lengths = jnp.zeros(starts, jnp.int32)
    with pytest.raises(ValueError, match=message):
        append(plain, k, v, layer=jnp.int32(0), starts=lengths, counts=lengths, tiers=case.tiers)


def test_tokens_of_another_dtype_are_refused_not_cast_to_bits():
    case = Case()
    plain, k, v = build(case)
    lengths = jnp.zeros(4, jnp.int32)
    with pytest.raises(ValueError, match="expected bfloat16, the plain dtype"):
        append(plain, k.astype(jnp.float32), v, layer=jnp.int32(0), starts=lengths, counts=lengths, tiers=case.tiers)


def test_no_tokens_change_nothing():
    case = Case()
    plain, k, v = build(case)
    lengths = jnp.zeros(4, jnp.int32)
    options = dict(layer=jnp.int32(0), starts=lengths, counts=lengths, tiers=case.tiers)
    assert append(plain, k[:, :0], v[:, :0], **options) is plain


def test_tiers_of_another_layout_are_refused():
    case = Case()
    plain, k, v = build(case)
    rows = jax.tree.map(lambda x: x.reshape(*x.shape[:3], 1, 128), plain)
    with pytest.raises(NotImplementedError, match="another implementation"):
        triton_append.append(
            rows, k, v, layer=jnp.int32(0), starts=jnp.zeros(4, jnp.int32), counts=jnp.zeros(4, jnp.int32),
            tiers=case.tiers, interpret=True,
        )  # fmt: skip
