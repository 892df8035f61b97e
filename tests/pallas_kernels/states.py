"""Cache states laid out by hand from the definition, every unused byte poisoned: inputs of the attention tests."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.attention import AttentionSpec, PlainTiers
from pallas_kernels.attention.api import lane_heads
from pallas_kernels.history import History, SidePages
from pallas_kernels.storage import stored
from pallas_kernels.tiers import Tiers
from pallas_kernels.transform_code import TransformCodes
from tests.pallas_kernels import attention_definition as definition
from tests.pallas_kernels.codes import transform_codes


@dataclasses.dataclass(frozen=True)
class Case:
    """One attention call: a batch of sequences of `starts` stored tokens that get `counts` of `tokens` new ones."""

    starts: tuple[int, ...]
    tokens: int = 1
    counts: tuple[int, ...] | None = None
    head_dim: int = 64
    q_heads: int = 4
    kv_heads: int = 2
    tiers: Tiers = Tiers(4, 8, 4, 8)  # noqa: RUF009
    bucket: int | None = None
    key: str = "levels"
    value: str = "levels-uniform"
    slots: int | None = None  # of codes of kind "levels"
    dtype: str = "float32"
    scale_dtype: str = "float16"
    softcap: float | None = None
    window: int | None = None
    sinks: bool = False
    exact_chunk: bool = False
    seed: int = 0
    behind: bool = False  # poison, too, what a window hides from every query of the call
    bias: float = 0.0  # of channel 7 of every key, known to the code's mean
    room: int = 0  # shapes are those of a sequence of at least this length

    @property
    def new(self):
        return self.counts or (self.tokens,) * len(self.starts)

    @property
    def spec(self):
        return AttentionSpec(self.head_dim**-0.5, softcap=self.softcap, exact_chunk=self.exact_chunk)


@dataclasses.dataclass(frozen=True)
class State:
    """Arguments of `attend`, and the same in rows `[n, K, D]` a sequence for the definition."""

    q: jnp.ndarray
    k: jnp.ndarray
    v: jnp.ndarray
    plain: PlainTiers
    history: History
    arguments: dict
    rows: list


def codes_of(case: Case, layers=2) -> TransformCodes:
    codes = transform_codes(
        case.key, case.value, bucket=case.bucket, head_dim=case.head_dim, kv_heads=case.kv_heads, layers=layers,
        seed=case.seed, slots=case.slots,
    )  # fmt: skip
    mean = codes.key.mu + np.float32(case.bias) * (np.arange(case.head_dim) == 7)
    return dataclasses.replace(codes, key=dataclasses.replace(codes.key, mu=mean), scale_dtype=case.scale_dtype)


def build(case: Case, codes: TransformCodes, *, layer=1, page_order=None) -> State:
    """A state whose history holds random slots and scales on permuted pages of a poisoned pool."""
    rng = np.random.default_rng(case.seed)
    tiers, dim, kv_heads = case.tiers, case.head_dim, case.kv_heads
    dtype = jnp.dtype(case.dtype)
    batch, layers = len(case.starts), codes.layers
    longest = max(case.room, *(a + b for a, b in zip(case.starts, case.new, strict=True)))
    ring, pages = tiers.ring(max(1, min(case.tokens, tiers.recent))), max(1, tiers.history_pages(longest))
    pool = batch * pages + 3
    ids = np.random.default_rng(case.seed + 1).permutation(pool) if page_order is None else page_order
    garbage = [-1, pool, 2**30, -(2**30)]

    def rounded(x):
        return np.asarray(jnp.asarray(x, dtype))

    q = rng.normal(size=(batch, case.tokens, case.q_heads, dim))
    plain = {
        side: [np.full((layers, batch, n, kv_heads, dim), np.nan, dtype) for n in (tiers.sink, ring)] for side in "kv"
    }
    new = {side: np.full((batch, case.tokens, kv_heads, dim), np.nan, dtype) for side in "kv"}
    sides = {"k": codes.key, "v": codes.value}
    slots = {
        side: np.full((layers, pool, kv_heads, tiers.page, code.slots // 4), 0xFF, np.uint8)
        for side, code in sides.items()
    }
    scale_dtype = jnp.dtype(codes.scale_dtype)
    numbers = {
        side: [np.full((layers, pool, kv_heads, tiers.page), np.nan, scale_dtype) for _ in range(2)] for side in "kv"
    }
    table = np.full((batch, pages + 2), 0)
    table[:] = np.resize(garbage, table.shape)
    rows = []
    for b, (start, count) in enumerate(zip(case.starts, case.new, strict=True)):
        total = start + count
        end = definition.history_end(total - 1, tiers) if count else definition.history_end(start - 1, tiers)
        lowest = start - case.window + 1 if case.behind and case.window is not None else 0
        used = -(-(end - tiers.sink) // tiers.page)
        table[b, :used] = ids[b * pages : b * pages + used]
        turn = definition.bucket_rotations(codes, tiers, total, dim) if total else np.zeros((0, dim, dim))
        sequence = {}
        for side, code in sides.items():
            x = rng.normal(size=(total, kv_heads, dim))
            x = rounded(x + case.bias * (np.arange(dim) == 7) if side == "k" else x)
            new[side][b, :count] = x[start:]
            for j in range(max(0, lowest), min(start, tiers.sink)):
                plain[side][0][layer, b, j] = x[j]
            for j in range(max(tiers.sink, start - ring, lowest), start):
                plain[side][1][layer, b, j % ring] = x[j]
            code_slots = rng.integers(0, 4, size=(total, kv_heads, code.slots)).astype(np.uint8)
            scale = rng.uniform(0.2, 0.6, size=(total, kv_heads)).astype(scale_dtype)
            offset = (-1.5 * scale.astype(np.float32) + 0.1).astype(scale_dtype) if code.has_offset else None
            planes = code_slots.reshape(total, kv_heads, 4, code.slots // 4)
            packed = np.bitwise_or.reduce(planes << np.array([0, 2, 4, 6], np.uint8)[:, None], axis=2)
            for j in range(max(tiers.sink, lowest), end):
                page, place = table[b, (j - tiers.sink) // tiers.page], (j - tiers.sink) % tiers.page
                slots[side][layer, page, :, place] = packed[j]
                numbers[side][0][layer, page, :, place] = scale[j]
                if offset is not None:
                    numbers[side][1][layer, page, :, place] = offset[j]
            hat = definition.decode(code, layer, code_slots, scale, offset) if total else np.zeros((0, kv_heads, dim))
            sequence[side] = x
            sequence[side + "_hat"] = np.einsum("tkd,tde->tke", hat, turn) if side == "k" else hat
        rows.append(sequence)

    def pages_of(side):
        scale, offset = (stored(jnp.asarray(x)) for x in numbers[side])
        return SidePages(jnp.asarray(slots[side]), scale, offset if sides[side].has_offset else None)

    arguments = {
        "layer": jnp.int32(layer),
        "starts": jnp.asarray(case.starts, jnp.int32),
        "counts": jnp.asarray(case.new, jnp.int32),
        "page_indices": jnp.asarray(table, jnp.int32),
        "window": None if case.window is None else jnp.int32(case.window),
        "sink_logits": jnp.asarray(rng.normal(size=case.q_heads), jnp.float32) if case.sinks else None,
    }
    tiers_of = [stored(jnp.asarray(x)) for x in (plain["k"][0], plain["v"][0], plain["k"][1], plain["v"][1])]
    wide = "float64" if case.dtype == "float64" else "float32"
    return State(
        jnp.asarray(q, wide), jnp.asarray(new["k"]), jnp.asarray(new["v"]), PlainTiers(*tiers_of),
        History(pages_of("k"), pages_of("v")), arguments, rows,
    )  # fmt: skip


def expected(case: Case, state: State, *, dtype: str | None = None) -> list:
    """The definition's outputs `[count, N, D]`, a sequence each; in float64, or as plain attention in `dtype`."""
    outputs = []
    for b, (start, count) in enumerate(zip(case.starts, case.new, strict=True)):
        sequence = state.rows[b]
        outputs.append(
            definition.attention(
                np.asarray(state.q)[b, :count], sequence["k"], sequence["v"], sequence["k_hat"], sequence["v_hat"],
                tiers=case.tiers, scale=case.spec.scale, softcap=case.softcap, window=case.window,
                sink_logits=state.arguments["sink_logits"],
                chunk_starts=[start] * count if case.exact_chunk else None, dtype=dtype,
            )
        )  # fmt: skip
    return outputs


def in_lanes(plain: PlainTiers) -> PlainTiers:
    """The same tiers as a cache holds them for TPUs."""

    def rows(x: jnp.ndarray) -> jnp.ndarray:
        heads = lane_heads(x.shape[4], x.shape[3])
        return x.reshape(*x.shape[:3], x.shape[3] // heads, heads * x.shape[4])

    return jax.tree.map(rows, plain)


def kernel_state(case: Case) -> tuple[TransformCodes, State]:
    """As Triton kernels want it: values byte-major."""
    codes = codes_of(case)
    state = build(case, codes)
    history = History(state.history.key, state.history.value.laid_out(tokens_last=True))
    return codes, dataclasses.replace(state, history=history)


def error(case: Case, out, state: State) -> float:
    """Largest difference to the definition, relative to the largest output or one."""
    pairs = [(rows[:n], want) for rows, n, want in zip(out, case.new, expected(case, state), strict=True)]
    largest = max(1.0, *(np.abs(want).max(initial=0) for _, want in pairs))
    return np.max([np.abs(got - want).max(initial=0) for got, want in pairs]) / largest
