"""Writing history: the Triton kernel interpreted and lowered here, run with `-m gpu` on the device."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

from pallas_kernels import codec, sm90
from pallas_kernels.attention import PlainTiers
from pallas_kernels.history import History, SidePages, bucket_tables
from pallas_kernels.rope import Rotary
from pallas_kernels.storage import loaded, stored
from pallas_kernels.tiers import Tiers
from pallas_kernels.transform_code import TransformCode, TransformCodes
from pallas_kernels.write import benchmark, demote, demote_ahead, triton, write, xla
from tests.pallas_kernels.codes import transform_code, transform_codes

QUICK = {"xla_backend_optimization_level": 0}  # compiling is nearly all the time of an interpreted kernel
NEAR = 2.0**-12  # rule E2: a level may differ where the fp64 z lies this close to a threshold


@dataclasses.dataclass(frozen=True)
class Case:
    """Rows of some sequences to store in the middle one of three layers; some of them not valid."""

    batch: int = 3
    rows: int = 40
    key: str = "levels"
    value: str = "levels-uniform"
    head_dim: int = 128
    kv_heads: int = 2
    slots: int | None = None
    bucket: int | None = 128
    rotary: Rotary | None = None
    tiers: Tiers = Tiers(4, 8, 4, 16)  # noqa: RUF009
    dtype: str = "bfloat16"
    scale_dtype: str = "float16"
    tokens_last: bool = True  # of values; of keys the other way round


def case(**changes):
    return dataclasses.replace(Case(), **changes)


NEOX = Rotary(tuple(10000.0 ** (-i / 16) for i in range(16)), 32, "interleaved")
CASES = {
    "default": case(),
    "one bucket": case(bucket=None),
    "pairs of neighbours, a part of the head": case(rotary=NEOX),
    "a part of the head": case(rotary=dataclasses.replace(NEOX, pairing="half")),
    "naive": case(key="naive", value="naive", bucket=None),
    "rank clipping": case(key="rotation-rank", value="rotation-rank", bucket=None),
    "static clipping": case(key="rotation-static", value="rotation-static", bucket=None),
    "uniform levels of keys": case(key="levels-uniform", value="levels"),
    "float16": case(dtype="float16", scale_dtype="bfloat16"),
    "float32": case(dtype="float32", scale_dtype="bfloat16", value="rotation-rank"),
    "fewer slots": case(slots=104),
    "more slots": case(slots=136, head_dim=64, value="levels"),
    "pages of values by token": case(tokens_last=False),
    "page 128": case(tiers=Tiers()),
    "page 24": case(tiers=Tiers(3, 8, 8, 24), bucket=96),
    "no sinks": case(tiers=Tiers(0, 8, 8, 64)),
    "one row": case(rows=1, batch=1),
    **{
        f"head size {n}, {key}": case(head_dim=n, key=key, value=value, bucket=64 if key == "levels" else None)
        for n in (64, 80, 96, 192, 256)
        for key, value in (("levels", "levels-uniform"), ("naive", "rotation-static"), ("rotation-rank", "naive"))
    },
}
TURNED = case(batch=2, rows=5, head_dim=32, bucket=16)
ODD = case(
    batch=1, rows=17, head_dim=40, slots=32, value="rotation-rank", tiers=Tiers(3, 8, 4, 8), bucket=8,
    scale_dtype="bfloat16", tokens_last=False, dtype="float32",
)  # fmt: skip
LOWERED = ("default", "head size 80, rotation-rank", "fewer slots", "static clipping")
LAYER, LAYERS = 1, 3


@dataclasses.dataclass(frozen=True)
class State:
    codes: TransformCodes
    history: History
    k: jax.Array
    v: jax.Array
    positions: np.ndarray
    valid: np.ndarray
    table: np.ndarray

    @property
    def arguments(self) -> dict[str, Any]:
        return dict(
            layer=jnp.int32(LAYER), positions=jnp.asarray(self.positions), valid=jnp.asarray(self.valid),
            page_indices=jnp.asarray(self.table),
        )  # fmt: skip


def codes_of(case: Case) -> TransformCodes:
    def side(kind: str, seed: int) -> TransformCode:
        slots = case.slots if kind == "levels" else None
        return transform_code(
            kind, layers=LAYERS, kv_heads=case.kv_heads, head_dim=case.head_dim, slots=slots, seed=seed
        )

    rotary = case.rotary or Rotary.standard(case.head_dim)
    return TransformCodes(side(case.key, 0), side(case.value, 1), rotary, case.bucket, case.scale_dtype)


def exact(codes: TransformCodes) -> TransformCodes:
    """The same quantizer of `y = x`, which every product computes exactly: what follows must then be bit-equal."""

    def side(code: TransformCode) -> TransformCode:
        kept = np.asarray(code.bits) > 0
        return dataclasses.replace(
            code, mu=np.zeros_like(code.mu), encode=(np.eye(code.head_dim) * kept[..., None, :]).astype(np.float32)
        )

    return dataclasses.replace(codes, key=side(codes.key), value=side(codes.value), bucket=None, rotary=None)


def poisoned(codes: TransformCodes, pool: int, page: int, tokens_last: bool) -> History:
    def side(code: TransformCode, tokens_last: bool) -> SidePages:
        rows = (LAYERS, pool, code.kv_heads, page)
        width = code.slots // 4
        scale = stored(jnp.full(rows, jnp.nan, codes.scale_dtype))
        slots = jnp.full((*rows[:3], width, page) if tokens_last else (*rows, width), 0xFF, jnp.uint8)
        return SidePages(slots, scale, scale if code.has_offset else None, tokens_last)

    return History(side(codes.key, not tokens_last), side(codes.value, tokens_last))


def build(case: Case, codes: TransformCodes, seed=0) -> State:
    rng = np.random.default_rng(seed)
    tiers, batch = case.tiers, case.batch
    begin = rng.integers(0, 3 * tiers.page, size=(batch, 1))
    positions = tiers.sink + begin + np.arange(case.rows)
    entries = int(positions.max() - tiers.sink) // tiers.page + 1
    pool = batch * entries + 2
    table = rng.permutation(pool)[: batch * entries].reshape(batch, entries)
    shape = (batch, case.rows, case.kv_heads, case.head_dim)
    k, v = rng.normal(size=shape) * np.exp(rng.normal(size=shape)), 3 * rng.normal(size=shape)
    valid = rng.random(size=positions.shape) < 0.9
    valid[0, 0] = True
    return State(
        codes, poisoned(codes, pool, tiers.page, case.tokens_last), jnp.asarray(k, case.dtype),
        jnp.asarray(v, case.dtype), positions.astype(np.int32), valid, table.astype(np.int32),
    )  # fmt: skip


@functools.partial(jax.jit, static_argnames=("tiers", "tile"))
def run(history, k, v, codes, *, tiers, tile=None, **arguments):
    return triton.write(history, k, v, codes=codes, tiers=tiers, tile=tile, **arguments)


def written(case: Case, state: State, *, tile=None) -> History:
    return run(state.history, state.k, state.v, state.codes, tiers=case.tiers, tile=tile, **state.arguments)


def interpreted(case: Case, state: State) -> History:
    call = functools.partial(triton.write, tiers=case.tiers, interpret=True)
    arguments = dict(codes=state.codes, **state.arguments)
    return jax.jit(call, compiler_options=QUICK)(state.history, state.k, state.v, **arguments)


def defined(case: Case, state: State) -> History:
    """What XLA writes on the CPU, where divisions and roots round to nearest."""
    with jax.default_device(jax.devices("cpu")[0]):
        arrays = jax.tree.map(np.asarray, (state.history, state.k, state.v, state.codes, state.arguments))
        history, k, v, codes, arguments = jax.tree.map(jnp.asarray, arrays)
        return jax.jit(functools.partial(xla.write, tiers=case.tiers))(history, k, v, codes=codes, **arguments)


def assert_histories_equal(got: History, want: History) -> None:
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def stored_rows(case: Case, state: State, side: SidePages) -> codec.Encoded:
    """Unpacked slots `[n, K, N]`, scale and offset of the valid rows, in fp32."""
    index = np.where(state.valid, state.positions - case.tiers.sink, 0)
    pages = np.take_along_axis(state.table, index // case.tiers.page, axis=1)
    side = side.laid_out(tokens_last=False)

    def rows(leaf):
        return np.asarray(leaf)[LAYER, pages, :, index % case.tiers.page][state.valid]

    slots = np.asarray(codec.unpack(jnp.asarray(rows(side.slots))))
    scale, offset = (None if x is None else rows(loaded(x)) for x in (side.scale, side.offset))
    return codec.Encoded(slots, scale, offset)  # type: ignore[arg-type]


def reference(code: TransformCode, x: np.ndarray):
    """In float64: distance to the next threshold, levels `[n, K, D]`, scale, offset of rows x `[n, K, D]`."""
    bits = np.asarray(code.bits).astype(int)
    y = np.einsum("nkd,kde->nke", x - np.asarray(code.mu, np.float64), np.asarray(code.encode, np.float64))
    if code.kind == "minmax":
        if code.clip == "rank":
            rank = codec.clip_rank(code.clip_ratio, y.shape[-1])
            limit = np.sort(np.abs(y), axis=-1)[..., rank : rank + 1]
            y = np.clip(y, -limit, limit)
        elif code.clip == "static":
            limit = np.asarray(code.clip_threshold, np.float64)[:, None]
            y = np.clip(y, -limit, limit)
        low = y.min(-1, keepdims=True)
        scale = (y.max(-1, keepdims=True) - low) / 3
        z = (y - low) / scale + 0.5
        return np.abs(z - np.round(z)), np.clip(np.floor(z), 0, 3), scale[..., 0], low[..., 0]
    kept, half = bits > 0, 2**bits // 2
    y = np.where(kept, y, 0)
    delta, weight = (np.asarray(leaf, np.float64) for leaf in (code.delta, code.weight))
    sigma = np.sqrt((y**2).sum(-1) / kept.sum(-1) + 1e-12)
    z = y / sigma[..., None] / delta
    index = np.clip(np.floor(z), -half, np.maximum(half - 1, 0))
    level = np.where(kept, delta * (index + 0.5), 0)
    scale = np.asarray(code.gain, np.float64) * (weight * y * level).sum(-1) / (weight * level**2).sum(-1)
    return np.abs(z - np.round(z)), np.where(kept, index + half, 0), scale, None


def levels_of(code: TransformCode, slots: np.ndarray) -> np.ndarray:
    """Levels `[n, K, D]` that slots `[n, K, N]` spell."""
    levels = np.zeros((*slots.shape[:2], code.head_dim), int)
    for head in range(code.kv_heads):
        owner, shift = (np.asarray(leaf)[head] for leaf in (code.slot_owner, code.slot_shift))
        owned = shift < 8
        parts = slots[:, head, owned].astype(int) << shift[owned]
        levels[:, head] = parts @ (owner[owned][:, None] == np.arange(code.head_dim))
    return levels


def turned(case: Case, state: State) -> np.ndarray:
    """Valid keys `[n, K, D]` relative to their buckets, float64."""
    codes, x = state.codes, np.asarray(state.k, np.float64)[state.valid]
    tables = bucket_tables(codes, case.tiers, case.tiers.sink + state.table.shape[1] * case.tiers.page, np.float32)
    if tables is None or codes.rotary is None or codes.bucket is None:
        return x
    bucket = (state.positions[state.valid] - case.tiers.sink) // codes.bucket
    cos, sin = (np.asarray(table, np.float64)[bucket][:, None] for table in tables)
    size = codes.rotary.rotary_dim
    pair = np.arange(size // 2)
    first, second = (2 * pair, 2 * pair + 1) if codes.rotary.pairing == "interleaved" else (pair, pair + size // 2)
    turned = x.copy()
    turned[..., first] = x[..., first] * cos + x[..., second] * sin
    turned[..., second] = x[..., second] * cos - x[..., first] * sin
    return turned


def ulps(a, b: np.ndarray) -> np.ndarray:
    """Distance of 16-bit floats in units of the last place."""
    a, b = (np.asarray(x).view(np.int16).astype(int) for x in (a, b))
    return np.abs(np.where(a < 0, -(a & 0x7FFF), a) - np.where(b < 0, -(b & 0x7FFF), b))


def assert_near_ties_only(case: Case, state: State, history: History) -> None:
    """Rule E2 against float64."""
    values = np.asarray(state.v, np.float64)[state.valid]
    for name, side, x in (("key", history.key, turned(case, state)), ("value", history.value, values)):
        code = jax.tree.map(np.asarray, getattr(state.codes, name).layer(LAYER))
        got = stored_rows(case, state, side)
        distance, levels, scale, offset = reference(code, x)
        difference = levels_of(code, np.asarray(got.slots)) - levels
        assert np.abs(difference).max() <= 1
        assert (distance[difference != 0] < NEAR).all()
        assert (difference != 0).sum() <= 3 + 1e-5 * difference.size  # the rate of E2, and what chance adds to few rows
        same = (difference == 0).all(-1)
        assert same.mean() > 0.9
        dtype = jnp.dtype(state.codes.scale_dtype)
        assert ulps(got.scale, scale.astype(dtype))[same].max() <= 1
        if offset is not None:
            assert ulps(got.offset, offset.astype(dtype)).max() <= 1


def test_the_interpreted_kernel_writes_what_the_definition_does():
    state = build(TURNED, codes_of(TURNED))
    assert_near_ties_only(TURNED, state, interpreted(TURNED, state))


def test_the_interpreted_kernel_quantizes_bit_for_bit():
    """Sizes that are no power of two, dropped coordinates, both kinds."""
    state = build(ODD, exact(codes_of(ODD)))
    assert_histories_equal(interpreted(ODD, state), defined(ODD, state))


def lowered(function, *arguments, **keywords):
    mesh = AbstractMesh(
        (1,), ("x",), abstract_device=AbstractDevice(device_kind="NVIDIA H200", platform="gpu", num_cores=None)
    )
    with use_abstract_mesh(mesh):
        return function.trace(*arguments, **keywords).lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize(
    "name", [name if name in LOWERED else pytest.param(name, marks=pytest.mark.slow) for name in CASES]
)
def test_the_kernel_lowers_for_a_gpu_that_is_not_there_and_works_in_place(name):
    case = CASES[name]
    state = build(case, codes_of(case))
    text = lowered(run, state.history, state.k, state.v, state.codes, tiers=case.tiers, **state.arguments)
    assert text.count("xla.gpu.triton") == 2
    assert text.count("output_operand_alias<") == len(jax.tree.leaves(state.history))


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ("default", "oscar-reference"))
@pytest.mark.parametrize("head_dim", (64, 128, 256))
@pytest.mark.parametrize("tokens", (1, 4096))
def test_the_kernel_spills_no_register_on_hopper(tokens, head_dim, recipe):
    pytest.importorskip("triton", reason="compiling for sm_90 needs Triton and its ptxas")
    shape = benchmark.Shape(batch=2, kv_heads=2, layers=2, tokens=tokens, head_dim=head_dim, recipe=recipe)
    step, carry, arguments = benchmark.decode_step(shape) if tokens == 1 else benchmark.prefill_step(shape, "triton")
    for kernel in sm90.kernels(sm90.lower(step, jnp.int32(0), carry, *arguments)):
        assert sm90.compiled(kernel).spills == 0


def test_with_x64_enabled_the_kernel_lowers_too():
    state = build(TURNED, codes_of(TURNED))
    with jax.enable_x64(True):
        text = lowered(run, state.history, state.k, state.v, state.codes, tiers=TURNED.tiers, **state.arguments)
    assert text.count("xla.gpu.triton") == 2


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (dict(dtype="float64"), "plain tokens of float64"),
        (dict(value="feedback"), "error feedback"),
        (dict(head_dim=264, bucket=None), "head size 264, 264 slots: at most 256 is built"),
    ],
)
def test_what_is_not_built_is_refused_by_name(changes, reason):
    small = case(batch=1, rows=2, kv_heads=1, **changes)
    with jax.enable_x64(small.dtype == "float64"):
        state = build(small, codes_of(small))
        with pytest.raises(NotImplementedError, match=reason):
            written(small, state)


def test_shapes_that_do_not_fit_are_named():
    small = case(batch=1, rows=2)
    state = build(small, codes_of(small))
    options: dict[str, Any] = dict(codes=state.codes, tiers=small.tiers, **state.arguments)
    with pytest.raises(ValueError, match=r"v \(1, 2, 2, 64\): expected both \[B, M, 2, 128\]"):
        write(state.history, state.k, state.v[..., :64], **options)
    with pytest.raises(ValueError, match=r"positions \(1, 1\).*expected \(1, 2\)"):
        write(state.history, state.k, state.v, **{**options, "positions": options["positions"][:, :1]})
    with pytest.raises(ValueError, match="tokens=9: expected at most recent=8"):
        demote_ahead(
            state.history, PlainTiers(*[state.k] * 4), tokens=9, starts=jnp.zeros(1, int), counts=jnp.zeros(1, int),
            page_indices=jnp.asarray(state.table), codes=state.codes, tiers=small.tiers,
        )  # fmt: skip


# Demotion: the tokens that leave the window, read from the ring or the new tokens by position.

TIERS = Tiers(4, 8, 4, 16)
EDGES = (0, 1, 3, 4, 5, 11, 12, 13, 15, 16, 17, 19, 20, 27, 28, 29, 43, 44, 45, 60, 76)


@functools.cache
def demotion(tokens: int, starts: tuple[int, ...], kind: str, dtype: str):
    """Empty history, plain tiers full of numbers, new tokens, codes, and lengths and page table."""
    rng = np.random.default_rng(1)
    codes = transform_codes(*kind.split(), bucket=32, layers=LAYERS)
    batch, ring = len(starts), TIERS.ring(1) + 5
    entries = max(1, TIERS.history_pages(max(starts) + tokens))
    table = rng.permutation(batch * entries).reshape(batch, entries).astype(np.int32)

    def normal(*shape):
        return stored(jnp.asarray(rng.normal(size=(*shape, codes.kv_heads, codes.head_dim)), dtype))

    plain = PlainTiers(*(normal(LAYERS, batch, n) for n in (TIERS.sink, TIERS.sink, ring, ring)))
    new = [loaded(normal(batch, tokens)) for _ in range(2)]
    counts = np.resize([tokens, tokens, max(0, tokens - 1), 0], batch)
    arguments = dict(
        starts=jnp.asarray(starts, jnp.int32), counts=jnp.asarray(counts, jnp.int32), page_indices=jnp.asarray(table),
    )  # fmt: skip
    return poisoned(codes, batch * entries, TIERS.page, True), plain, new, codes, arguments


def in_each_layer(function, history, plain, new, codes, arguments):
    """`demote` in one layer after another."""

    def step(layer, history):
        return function(history, plain, *new, layer=layer, codes=codes, tiers=TIERS, **arguments)

    return jax.lax.fori_loop(0, LAYERS, step, history)


each_layer = jax.jit(in_each_layer, static_argnames="function")


@functools.partial(jax.jit, static_argnames="tokens")
def ahead(history, plain, codes, arguments, *, tokens):
    return triton.demote_ahead(history, plain, tokens=tokens, codes=codes, tiers=TIERS, **arguments)


def differing(a: History, b: History) -> float:
    """Share of bytes that differ."""
    pairs = [(np.asarray(x), np.asarray(y)) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)]
    unequal = sum(int((x.view(np.uint8) != y.view(np.uint8)).sum()) for x, y in pairs)
    return unequal / sum(x.nbytes for x, _ in pairs)


def test_interpreted_demotion_reads_the_ring_and_the_chunk():
    case = demotion(24, (2, 19), "naive levels", "float32")
    interpreted = functools.partial(in_each_layer, functools.partial(triton.demote, interpret=True))
    got = jax.jit(interpreted, compiler_options=QUICK)(*case)
    want = each_layer(xla.demote, *case)
    assert differing(case[0], want) > 0
    assert differing(got, want) < 1e-4


def test_demotion_of_all_layers_lowers_to_one_launch_a_side():
    history, plain, _, codes, arguments = demotion(1, EDGES, "levels levels-uniform", "bfloat16")
    text = lowered(ahead, history, plain, codes, arguments, tokens=1)
    assert text.count("xla.gpu.triton") == 2


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="there is a GPU")
def test_where_no_implementation_demotes_ahead_it_says_so():
    history, plain, _, codes, arguments = demotion(1, (13, 44), "levels rotation-rank", "bfloat16")
    with pytest.raises(NotImplementedError, match=r"of demote_ahead takes this case \(xla: has none\)"):
        demote_ahead(history, plain, tokens=1, codes=codes, tiers=TIERS, implementation="xla", **arguments)


# On the device.


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_slots_and_scales_are_bit_equal_from_the_same_y(name):
    """Rule E1; the rest of the pool keeps its poison."""
    case = CASES[name]
    case = dataclasses.replace(case, bucket=None, rows=max(case.rows, 8))
    if case.dtype == "float32":
        case = dataclasses.replace(case, dtype="bfloat16")  # rounded products of three TF32 parts are not exact in fp32
    state = build(case, exact(codes_of(case)))
    assert_histories_equal(written(case, state), defined(case, state))


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_slots_equal_the_definition_but_near_ties(name):
    case = dataclasses.replace(CASES[name], batch=4, rows=300)
    state = build(case, codes_of(case))
    assert_near_ties_only(case, state, written(case, state))


@pytest.mark.gpu
@pytest.mark.parametrize("tile", (16, 32, 128))
def test_the_tile_and_the_neighbours_do_not_matter(tile):
    case = CASES["default"]
    state = build(case, codes_of(case))
    got = written(case, state, tile=tile)
    assert_histories_equal(got, written(case, state))
    alone = dataclasses.replace(state, valid=state.valid & (np.arange(case.batch) == 1)[:, None])
    only = written(case, alone)
    for a, b in zip(stored_rows(case, alone, only.key), stored_rows(case, alone, got.key), strict=True):
        np.testing.assert_array_equal(a, b)


DEGENERATE = {
    "nan": lambda x: x.at[0, 1, 0, 9].set(jnp.nan),
    "inf": lambda x: x.at[0, 1, 0, 9].set(jnp.inf).at[1, 2, 1, 3].set(-jnp.inf),
    "zeros": lambda x: x.at[0, 1].set(0),
    "constant": lambda x: x.at[0, 1].set(3.7).at[1, 1].set(-2.5),
    "tiny": lambda x: x * 1e-30,
    "huge": lambda x: x * 1e15,
    "beyond the squares": lambda x: x.at[0, 1].set(1e25),
    "almost the largest": lambda x: jnp.sign(x) * 1e37,
}


@pytest.mark.gpu
@pytest.mark.parametrize("kinds", ("levels levels-uniform", "naive rotation-rank", "rotation-static naive"))
@pytest.mark.parametrize("name", DEGENERATE)
def test_degenerate_rows(name, kinds):
    key, value = kinds.split()
    case = dataclasses.replace(CASES["default"], key=key, value=value, bucket=None)
    state = build(case, exact(codes_of(case)))
    state = dataclasses.replace(state, k=DEGENERATE[name](state.k), v=DEGENERATE[name](state.v))
    assert_histories_equal(written(case, state), defined(case, state))


@pytest.mark.gpu
def test_pages_that_are_not_there_are_dropped():
    case = CASES["default"]
    state = build(case, codes_of(case))
    table = state.table.copy()
    table[0], table[1], table[2, :] = -1, 2**30, state.history.key.scale.shape[1]
    assert_histories_equal(written(case, dataclasses.replace(state, table=table)), state.history)
    short = dataclasses.replace(state, table=state.table[:, :1], positions=state.positions + 16 * case.tiers.page)
    assert_histories_equal(written(case, short), state.history)


@pytest.mark.gpu
def test_with_x64_enabled():
    case = CASES["default"]
    state = build(case, codes_of(case))
    want = written(case, state)
    with jax.enable_x64(True):
        assert_histories_equal(written(case, state), want)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ("bfloat16", "float32"))
@pytest.mark.parametrize("kind", ("levels levels-uniform", "naive rotation-rank"))
@pytest.mark.parametrize("tokens", (1, 2, 5, 8, 24))
def test_demotion_around_every_edge_of_the_tiers(tokens, kind, dtype):
    case = demotion(tokens, EDGES, kind, dtype)
    history, plain, _, codes, arguments = case
    got = each_layer(triton.demote, *case)
    with jax.default_device(jax.devices("cpu")[0]):
        want = each_layer(xla.demote, *jax.tree.map(lambda x: jnp.asarray(np.asarray(x)), case))
    assert differing(got, want) < 1e-4
    if tokens <= TIERS.recent:
        assert differing(ahead(history, plain, codes, arguments, tokens=tokens), got) == 0


@pytest.mark.gpu
def test_a_donated_history_is_written_in_place():
    case = CASES["default"]
    state = build(case, codes_of(case))
    call = jax.jit(
        functools.partial(triton.write, tiers=case.tiers, codes=state.codes, **state.arguments), donate_argnums=0
    )
    analysis: Any = call.lower(state.history, state.k, state.v).compile().memory_analysis()
    assert analysis.alias_size_in_bytes >= sum(x.nbytes for x in jax.tree.leaves(state.history))


@pytest.mark.gpu
def test_it_is_what_runs_on_a_gpu():
    case = CASES["default"]
    state = build(case, codes_of(case))
    options: dict[str, Any] = dict(codes=state.codes, tiers=case.tiers, **state.arguments)
    assert_histories_equal(write(state.history, state.k, state.v, **options), written(case, state))
    options["codes"] = codes_of(dataclasses.replace(case, value="feedback"))
    with pytest.raises(NotImplementedError, match="error feedback"):
        write(state.history, state.k, state.v, **options, implementation="triton")
    demoted = demotion(1, EDGES, "levels feedback", "bfloat16")
    assert differing(each_layer(demote, *demoted), each_layer(xla.demote, *demoted)) == 0
