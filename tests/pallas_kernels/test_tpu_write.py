"""Writing history on TPUs, in Pallas' interpreter. No TPU has run it; test_tpu_compile.py compiles it for them."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.attention import PlainTiers
from pallas_kernels.history import History, init_history
from pallas_kernels.storage import stored
from pallas_kernels.tiers import Tiers
from pallas_kernels.transform_code import flat
from pallas_kernels.write import tpu, xla
from tests.pallas_kernels import tpu_races
from tests.pallas_kernels.codes import transform_codes
from tests.pallas_kernels.states import in_lanes

QUICK: Any = {"xla_backend_optimization_level": 0}
POOL = 7  # pages of 128 tokens, or as many tokens in shorter ones
TABLE = np.array([[5, 0, -1], [2, 9, 9], [6, 3, 1]], np.int32)  # of a pool of 7 pages: -1 and 9 are none of them
RECIPES = {
    "levels": dict(key="levels", value="levels-uniform", bucket=128),
    "min/max": dict(key="rotation-rank", value="naive"),
}


def table_of(page: int) -> jax.Array:
    """`TABLE` for a pool of as many tokens, short pages in no order."""
    together = 128 // page
    pages = TABLE[..., None] * together + np.arange(together)
    order = np.random.default_rng(4).permutation(POOL * together)
    valid = (pages >= 0) & (pages < len(order))
    return jnp.asarray(np.where(valid, order[pages * valid], pages).reshape(len(TABLE), -1), jnp.int32)


def history_of(codes, page=128) -> History:
    """Pages full of something, so that what is overwritten by mistake shows; bytes in the order that all share."""
    rng = np.random.default_rng(0)
    empty = init_history(codes, pages=POOL * 128 // page, page=page)
    return jax.tree.map(lambda x: jnp.asarray(rng.integers(1, 99, x.shape)).astype(x.dtype), empty)


def for_tpu(history: History, dtype=jnp.int16) -> History:
    """As `init_history` lays pages out for the TPU kernels, numbers as their bits."""

    def laid_out(side):
        side = side.laid_out(tokens_last=True) if side.scale.shape[3] == 128 else side.as_words()
        bits = (None if x is None else jax.lax.bitcast_convert_type(x, dtype) for x in (side.scale, side.offset))
        return dataclasses.replace(side, **dict(zip(("scale", "offset"), bits, strict=True)))

    return History(laid_out(history.key), laid_out(history.value))


def rows_of(count, batch=3, seed=1, dim=64, heads=2):
    rng = np.random.default_rng(seed)
    return [jnp.asarray(rng.normal(size=(batch, count, heads, dim)), jnp.bfloat16) for _ in "kv"]


def assert_same(got, want, before):
    got = History(got.key.laid_out(tokens_last=False), got.value.laid_out(tokens_last=False))
    for a, b, old in zip(*map(jax.tree.leaves, (got, want, before)), strict=True):
        a, b, old = (np.asarray(x).view(np.uint8) for x in (a, b, old))
        np.testing.assert_array_equal(a, b)
        assert (b != old).any()


def run(function, *arguments, **options):
    """Compiling is nearly all the time of an interpreted kernel."""
    return jax.jit(function).lower(*arguments, **options).compile(compiler_options=QUICK)(*arguments, **options)


SIZES = [("levels", 128, 64, 1), ("min/max", 128, 64, 2), ("min/max", 64, 128, 2), ("levels", 16, 64, 2)]
SLOW = [
    ("min/max", 16, 128, 2), ("levels", 32, 256, 2), ("levels", 64, 64, 1), ("levels", 16, 128, 1),
    ("min/max", 128, 64, 3),
]  # fmt: skip


@pytest.mark.parametrize(
    ("recipe", "page", "dim", "heads"), [*SIZES, *(pytest.param(*size, marks=pytest.mark.slow) for size in SLOW)]
)
def test_rows_are_stored_as_by_the_definition_and_nothing_else_changes(recipe, page, dim, heads):
    """Rows of sinks, in a page's first lane, across its edge, past the pool's pages; a fifth of them not valid."""
    codes = transform_codes(**RECIPES[recipe], head_dim=dim, kv_heads=heads, layers=2)
    before = history_of(codes, page)
    positions = jnp.asarray(np.array([4 + 120, 4 - 3, 4 + 250])[:, None] + np.arange(20), jnp.int32)
    arguments = dict(
        layer=jnp.int32(1), positions=positions, page_indices=table_of(page),
        valid=jnp.asarray(np.random.default_rng(2).random((3, 20)) < 0.8),
    )  # fmt: skip
    k, v = rows_of(20, dim=dim, heads=heads)
    options = dict(codes=codes, tiers=Tiers(4, 8, 8, page))
    by_xla = jax.jit(functools.partial(xla.write, **options)).lower(before, k, v, **arguments).compile(QUICK)
    want = by_xla(before, k, v, **arguments | dict(valid=arguments["valid"] & (positions >= 4)))
    assert_same(by_xla(before, k, v, **arguments), want, before)
    pages = for_tpu(before)
    as_held = options | dict(codes=flat(codes))
    assert_same(run(functools.partial(tpu.write, interpret=True, **as_held), pages, k, v, **arguments), want, before)
    assert jax.tree.map(jnp.shape, pages) == jax.tree.map(
        jnp.shape, init_history(codes, pages=POOL * 128 // page, page=page, tpu_heads=heads)
    )
    if pages.key.words:  # which XLA writes too, where the kernel refuses
        assert_same(run(functools.partial(xla.write, **options), pages, k, v, **arguments), want, before)


@pytest.mark.tpu_race
@pytest.mark.parametrize("page", [128, 64, 16])
def test_demotion_has_no_race_and_equals_the_definition(page, capfd):
    codes = transform_codes("levels", "levels-uniform", bucket=128, head_dim=64, layers=2)
    before = history_of(codes, page)
    rng = np.random.default_rng(3)
    plain = PlainTiers(*(stored(jnp.asarray(rng.normal(size=(2, 3, n, 2, 64)), jnp.bfloat16)) for n in (4, 4, 18, 18)))
    k, v = rows_of(4)
    # The first crosses the edge of a page with its ninth token, the second demotes none, the third has no page for it.
    lengths = dict(starts=jnp.asarray([139, 20, 400], jnp.int32), counts=jnp.asarray([4, 0, 4], jnp.int32))
    options = dict(codes=codes, tiers=Tiers(4, 8, 8, page))
    arguments = dict(layer=jnp.int32(0), page_indices=table_of(page), **lengths)
    simulated = functools.partial(tpu.demote, interpret=pltpu.InterpretParams(detect_races=True), **options)
    got = run(simulated, for_tpu(before), in_lanes(plain), k, v, **arguments)
    want = run(functools.partial(xla.demote, **options), before, plain, k, v, **arguments)
    assert_same(got, want, before)
    assert not tpu_races.found()
    assert "non-zero count" not in "".join(capfd.readouterr())


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (dict(page=8), "page=8: 16, 32, 64, 128 are built"),
        (dict(rows=80000), "80000 rows of a sequence take"),
        (dict(layout=dict(values_tokens_last=True)), "laid out for another implementation"),
        (dict(page=64, layout=dict()), "laid out for another implementation"),
    ],
)
def test_what_is_not_built_is_refused_by_name(changes, reason):
    codes = transform_codes(head_dim=64, layers=2)
    tiers = Tiers(4, 8, 8, changes.get("page", 128))
    layout = changes.get("layout", dict(tpu_heads=2))
    before = init_history(codes, pages=POOL, page=tiers.page, **layout)
    row = jax.ShapeDtypeStruct((1, changes.get("rows", 1), 2, 64), jnp.bfloat16)
    numbers = {
        name: jax.ShapeDtypeStruct(row.shape[:2], dtype) for name, dtype in (("positions", "int32"), ("valid", "bool"))
    }
    with pytest.raises(NotImplementedError, match=reason):
        jax.eval_shape(
            functools.partial(tpu.write, codes=codes, tiers=tiers), before, row, row, layer=jnp.int32(0),
            page_indices=jnp.zeros((1, 3), jnp.int32), **numbers,
        )  # fmt: skip
