"""Cases of every operation with inputs and expected outputs: what `tests/vectors` stores and parity runs on.

Expected outputs come from the eager PyTorch of this package: codes, slots and parameters in the codec's own fp32,
decoded rows, attention, moments and a whole decode in float64.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import torch

from triton_ref import cache, clip, codec, decoder, fit, linalg, moments, reference, states
from triton_ref.code import TransformCode, TransformCodes
from triton_ref.rope import Rotary
from triton_ref.tiers import Tiers

FORMAT = 1
KINDS = ("naive", "rotation-rank", "rotation-static", "levels", "levels-uniform", "feedback")
LOW_PRECISIONS = (torch.float32, torch.float16, torch.bfloat16)
STATISTICS = moments.Settings(bucket=32, sink=4, recent=8)
TINY = decoder.Config(4, 2, 16, 1e-5, Rotary(tuple(10000.0 ** (-i / 8) for i in range(8)), 16))
TINY_TIERS = Tiers(sink=4, recent=8, group=4, page=8)


@dataclasses.dataclass(frozen=True)
class Case:
    """`meta` holds numbers and strings, what JSON can; arrays are tensors of the dtypes they are stored in."""

    operation: str
    name: str
    meta: dict[str, Any]
    inputs: dict[str, torch.Tensor]
    expected: dict[str, torch.Tensor]


def rotary(head_dim: int, base: float = 10000.0) -> Rotary:
    return Rotary(tuple(base ** (-2 * i / head_dim) for i in range(head_dim // 2)), head_dim)


@functools.cache
def activations(head_dim: int, kv_heads: int, *, seed: int, layers: int = 1, length: int = 160, text: int = 0):
    """q `[L, 1, T, 2K, D]`, k, v `[L, 1, T, K, D]` float64: unequal variances, means, queries and keys rotated.

    Args:
        seed: of the variances and means, as of a model.
        text: seed of the rows.
    """
    model, rows = (torch.Generator().manual_seed(s) for s in (seed, 1000 * seed + text))

    def draw(heads: int) -> torch.Tensor:
        size = (layers, 1, 1, heads, head_dim)
        spread, mean = (torch.randn(size, generator=model, dtype=torch.float64) / 2 for _ in range(2))
        noise = torch.randn(layers, 1, length, heads, head_dim, generator=rows, dtype=torch.float64)
        return noise * torch.exp(spread) + mean

    turn = rotary(head_dim)
    at = torch.arange(length)[:, None]
    return turn.rotate(draw(2 * kv_heads), at), turn.rotate(draw(kv_heads), at), draw(kv_heads)


@functools.cache
def codes(kind: str, *, head_dim: int, kv_heads: int, bucket: int | None, seed: int, layers: int = 1) -> TransformCodes:
    """Both sides of all layers, fitted to `activations`; `kind` is "reference", "naive", "static", "default" or
    "feedback". Only the last two know buckets."""
    q, k, v = activations(head_dim, kv_heads, seed=seed, layers=layers)
    lengths = [q.shape[2]]
    turn = rotary(head_dim) if bucket else None
    settings = dataclasses.replace(STATISTICS, bucket=bucket or 1 << 20)
    first = moments.first_pass(q, k, v, lengths=lengths, rotary=turn, settings=settings)
    if kind in ("default", "feedback"):
        both = fit.default_statistics(first, rotary=turn, max_position=512, settings=settings, value_metric=None)
        return fit.default(*both, rotary=turn, bucket=bucket, feedback=kind == "feedback")
    query = first["query"] / (first["tokens"] * 2)
    second = moments.second_pass(k, v, query, lengths=lengths)
    targets = fit.reference_targets(first, second, groups=2, per_layer=False)
    if kind == "reference":
        return fit.reference(targets)
    sides = []
    for target, rows, ratio in zip(targets, (k, v), (0.96, 0.92), strict=True):
        rotation = linalg.reference_rotation(target)
        if kind == "naive":
            rotation = torch.eye(head_dim, dtype=torch.float64).expand(rotation.shape)
            sides.append(fit.rotation_code(rotation, clip="none", clip_ratio=1.0))
            continue
        rotated = torch.einsum("lbtkd,lkde->lbtke", rows, rotation)
        counts = torch.stack([moments.histogram(layer, lengths=lengths) for layer in rotated])
        code = fit.rotation_code(rotation, clip="static", clip_ratio=ratio)
        sides.append(dataclasses.replace(code, clip_threshold=moments.quantile(counts, ratio).float()))
    return TransformCodes(*sides)


def code(kind: str, *, head_dim: int, kv_heads: int, seed: int) -> TransformCode:
    """One side of one layer, of one of `KINDS`."""
    source, side = {
        "naive": ("naive", "key"), "rotation-rank": ("reference", "value"), "rotation-static": ("static", "key"),
        "levels": ("default", "key"), "levels-uniform": ("default", "value"), "feedback": ("feedback", "key"),
    }[kind]  # fmt: skip
    both = codes(source, head_dim=head_dim, kv_heads=kv_heads, bucket=None, seed=seed)
    return getattr(both, side).layer(0)


def packing_case() -> Case:
    """Every byte value once, and the slots of its four planes."""
    packed = torch.arange(256, dtype=torch.uint8).reshape(16, 16)
    return Case("packing", "every byte", {}, {"slots": codec.unpack(packed)}, {"packed": packed})


def codec_case(
    kind: str, *, head_dim: int = 64, kv_heads: int = 2, rows: int = 24, degenerate: bool = True, seed: int = 0
) -> Case:
    """Rows x `[n, K, D]`, among them rows of zeros, constants, NaN, Inf and extreme size."""
    one = code(kind, head_dim=head_dim, kv_heads=kv_heads, seed=seed)
    random = torch.Generator().manual_seed(seed + 1)
    x = torch.randn(rows, kv_heads, head_dim, generator=random) * 2
    x = x + x.pow(3) / 4 + one.mu
    if degenerate:
        x[0], x[1], x[2] = 0, 3.7, one.mu
        x[3, 0, 3], x[3, -1, 2] = torch.nan, torch.inf
        x[4:6] *= torch.tensor([1e19, 1e-12])[:, None, None]
    y = codec.transform(one, x)
    encoded = codec.quantize(one, y)
    expected = {
        "y": y,
        "slots": encoded.slots,
        "scale": encoded.scale,
        "x_hat": codec.decode(one, encoded, dtype=torch.float64),
    }
    if encoded.offset is not None:
        expected["offset"] = encoded.offset
    meta = {"code": attributes(one)}
    return Case("codec", f"{kind}, D={head_dim}", meta, {"x": x, **arrays("code", one)}, expected)


def clip_case(*, head_dim: int = 128, ratio: float = 0.92, seed: int = 0) -> Case:
    """Both evaluators of the reference on rotated rows y `[n, K, D]`, and the reference's stored rows after each."""
    random = torch.Generator().manual_seed(seed)
    y = torch.randn(24, 2, head_dim, generator=random)
    y = y + y.pow(3) / 4
    y[0], y[1] = 0, 2.5  # a range below the floor, and ties
    expected = {}
    for evaluator, find in (("rank", clip.sorted_threshold), ("bisect", clip.bisected_threshold)):
        rows = reference.encode(y, ratio, reference.REFERENCE, evaluator=evaluator)  # type: ignore[arg-type]
        expected[f"{evaluator}.threshold"] = find(y, ratio)[..., 0]
        expected |= {f"{evaluator}.slots": rows.slots, f"{evaluator}.scale": rows.scale[..., 0]}
        expected[f"{evaluator}.zero"] = rows.bias[..., 0]
    return Case("clip", f"D={head_dim}, ratio {ratio}", {"ratio": ratio}, {"y": y}, expected)


def rotation_case(*, head_dim: int, seed: int = 0) -> Case:
    """`U H P_br` of two targets, with the closed forms it is made of."""
    random = torch.Generator().manual_seed(seed)
    factor = torch.randn(2, head_dim, head_dim, generator=random, dtype=torch.float64)
    target = factor @ torch.diag(torch.linspace(0.1, 3, head_dim, dtype=torch.float64)) @ factor.mT
    rotation = linalg.reference_rotation(target)
    expected = {
        "eigenvalues": linalg.eigh(target, descending=False)[0],
        "rotation": rotation,
        "hadamard": linalg.hadamard(head_dim),
        "bit_reversal": torch.tensor(linalg.bit_reversal(head_dim)),
    }
    for size in (3, 12, 16):
        expected[f"mixer{size}"] = linalg.mixer(size)
    return Case("rotations", f"D={head_dim}", {}, {"target": target}, expected)


def tiers_case() -> Case:
    """h(t) of several window sizes, and of the reference for a prompt in chunks."""
    positions = torch.arange(1200)
    sizes = [(64, 256, 8, 128), (4, 8, 4, 8), (0, 1, 1, 1), (16, 64, 16, 64), (0, 8, 8, 8)]
    prompts = [(600, 8192), (601, 256), (700, 512), (130, 128), (40, 8192)]
    return Case(
        "demotion",
        "history end",
        {"tiers": sizes, "prompts": prompts},
        {"positions": positions},
        {
            "history_end": torch.stack([Tiers(*size).history_end(positions) for size in sizes]),
            "reference": torch.stack(
                [Tiers().reference_history_end(positions, prompt=prompt, chunk=chunk) for prompt, chunk in prompts]
            ),
        },
    )


def demotion_case(kind: str, *, bucket: int | None, seed: int = 0) -> Case:
    """Pages after the rows k, v `[n, K, D]` of positions S .. S + n - 1 of one sequence left the recent window."""
    tiers = Tiers(4, 8, 4, 16)
    both = codes(kind, head_dim=64, kv_heads=2, bucket=bucket, seed=seed)
    _, k, v = (x[0, 0, :56].float() for x in activations(64, 2, seed=seed, text=2))
    table, pool = torch.tensor([[3, 2, 4, 0]], dtype=torch.int32), 5
    nothing = torch.zeros(1, 0, 2, 64)
    sides = [states.empty_pages(side.layer(0), pool, tiers.page, torch.float16, 0) for side in (both.key, both.value)]
    store = cache.LayerCache(nothing, nothing, nothing, nothing, sides[0], sides[1], table)
    cache.write(store, k, v, sequence=0, first=tiers.sink, codes=both.layer(0), tiers=tiers)
    inputs = {"k": k, "v": v, "page_indices": table, **codes_arrays(both.layer(0))}
    meta = {"tiers": dataclasses.astuple(tiers), "codes": codes_attributes(both), "pool": pool}
    return Case("demotion", f"pages, {kind}", meta, inputs, page_arrays(store))


def attention_case(
    name: str, shape: states.Shape, kinds: str | tuple[str, str], *, head_dim: int, kv_heads: int, bucket: int | None,
    seed: int = 0, scale_dtype: torch.dtype = torch.float16,
) -> Case:  # fmt: skip
    """One attention call over all tiers.

    Args:
        kinds: of `codes`, for both sides or for keys and values.
    """
    key_kind, value_kind = (kinds, kinds) if isinstance(kinds, str) else kinds
    options = dict(head_dim=head_dim, kv_heads=kv_heads, seed=seed)
    keys = codes(key_kind, bucket=bucket if key_kind in ("default", "feedback") else None, **options)  # type: ignore[arg-type]
    values = codes(value_kind, bucket=None, **options)  # type: ignore[arg-type]
    both = dataclasses.replace(keys, value=values.value, scale_dtype=scale_dtype).layer(0)

    def sequence(b: int, length: int):
        rows = activations(head_dim, kv_heads, seed=seed, length=length, text=b + 1)
        # As many query heads as the shape has: those of the model again and again.
        return rows[0][0, 0].repeat(1, shape.q_heads, 1)[:, : shape.q_heads], rows[1][0, 0], rows[2][0, 0]

    state = states.build(shape, both, sequence, seed=seed)
    call, tiers = state.call, shape.tiers

    def run(dtype: torch.dtype, rounded_to: torch.dtype | None = None) -> torch.Tensor:
        return cache.attend(
            state.q.to(dtype), state.k, state.v, state.cache, both, call, tiers=tiers, rounded_to=rounded_to
        )

    exact = run(torch.float64)
    errors = {}
    for dtype in LOW_PRECISIONS:
        out = run(torch.float32, None if dtype == torch.float32 else dtype).to(dtype)
        errors[_name(dtype)] = float((out.double() - exact).abs().max())
    meta = {
        "tiers": dataclasses.astuple(tiers), "codes": codes_attributes(both), "scale": call.scale,
        "softcap": call.softcap, "window": call.window, "plain_dtype": _name(shape.dtype),
        "low_precision_error": errors,
    }  # fmt: skip
    inputs = {
        "q": state.q, "k": state.k, "v": state.v, "starts": call.starts, "counts": call.counts,
        "page_indices": state.cache.page_indices, **codes_arrays(both), **page_arrays(state.cache),
    }  # fmt: skip
    inputs |= {tier: getattr(state.cache, tier) for tier in ("sink_k", "sink_v", "recent_k", "recent_v")}
    if call.sink_logits is not None:
        inputs["sink_logits"] = call.sink_logits
    return Case("attention", name, meta, inputs, {"out": exact})


def random_attention(
    seed: int, *, dtypes: tuple[torch.dtype, ...] = (torch.float32,), bucket: int | None = None
) -> Case:
    """An attention call drawn at random: windows, page, head sizes and groups, ragged lengths, and what models add.

    Args:
        bucket: tokens of a bucket; None draws 64 or 128.
    """
    random = torch.Generator().manual_seed(seed)

    def choose(*options):
        return options[int(torch.randint(len(options), (), generator=random))]

    head_dim, kv_heads = choose(64, 64, 128), choose(1, 2)
    group, page = choose(4, 8), choose(16, 32, 64)
    tiers = Tiers(choose(0, 4, 16), choose(8, 24), group, page)
    tokens = choose(1, 1, 1, 2, 4)
    starts = tuple(int(x) for x in torch.randint(0, 200, (3,), generator=random))
    counts = tuple(int(x) for x in torch.randint(0, tokens + 1, (3,), generator=random))
    shape = states.Shape(
        starts,
        tokens=tokens,
        counts=(tokens, *counts[1:]),
        q_heads=kv_heads * choose(1, 2, 3, 4, 7),
        tiers=tiers,
        dtype=choose(*dtypes),
        softcap=choose(None, None, 4.0),
        window=choose(None, None, 50),
        sinks=choose(False, True),
        room=224,  # whatever the lengths, so that kernels of the same shapes are compiled once
    )
    kinds = choose("default", "reference", ("default", "reference"), ("naive", "default"))
    return attention_case(
        "random", shape, kinds, head_dim=head_dim, kv_heads=kv_heads, bucket=bucket or choose(64, 128), seed=seed % 4
    )


def calibration_case(*, seed: int = 0) -> Case:
    """Two layers, two ragged sequences: all moments, and the codes of three recipes."""
    dim, kv_heads, lengths = 16, 2, [120, 97]
    q, k, v = (torch.cat([x, x.flip(2)], 1)[:, :, :120] for x in activations(dim, kv_heads, seed=seed, layers=2))
    turn = rotary(dim)
    random = torch.Generator().manual_seed(seed)
    factor = torch.randn(2, kv_heads, dim, dim, generator=random, dtype=torch.float64)
    metric = factor @ factor.mT / dim
    first = moments.first_pass(q, k, v, lengths=lengths, rotary=turn, settings=STATISTICS, value_metric=metric)
    second = moments.second_pass(k, v, first["query"] / (first["tokens"] * 2), lengths=lengths)
    expected = {f"moments.{name}": x for name, x in (first | second).items()}
    for name, per_layer in (("oscar-reference", True), ("oscar-head", False)):
        targets = fit.reference_targets(first, second, groups=2, per_layer=per_layer)
        for side, target in zip(("key", "value"), targets, strict=True):
            expected[f"{name}.{side}.target"] = target
            expected[f"{name}.{side}.rotation"] = linalg.reference_rotation(target)
    both = fit.default_statistics(first, rotary=turn, max_position=512, settings=STATISTICS, value_metric=metric)
    fitted = fit.default(*both, rotary=turn, bucket=STATISTICS.bucket)
    for side, statistics in zip(("key", "value"), both, strict=True):
        one = getattr(fitted, side)
        expected |= {f"default.{side}.covariance": statistics.covariance, f"default.{side}.metric": statistics.metric}
        expected |= arrays(f"default.{side}", one)
    meta = {"lengths": lengths, "rotary": rotary_attributes(turn), "settings": dataclasses.asdict(STATISTICS)}
    meta["max_position"] = 512
    return Case("calibration", "two layers, ragged", meta, {"q": q, "k": k, "v": v, "value_metric": metric}, expected)


def model_case(*, seed: int = 0, length: int = 56) -> Case:
    """Logits after every token of a tiny Llama in float64, and what its pages hold at the end."""
    random = torch.Generator().manual_seed(seed)
    hidden, mlp, vocab, layers, dim = 48, 96, 96, 2, TINY.head_dim
    query, key = TINY.q_heads * dim, TINY.kv_heads * dim
    sizes = {"query": (hidden, query), "key": (hidden, key), "value": (hidden, key), "output": (query, hidden)}
    sizes |= {"gate": (hidden, mlp), "up": (hidden, mlp), "down": (mlp, hidden)}

    def draw(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=random, dtype=torch.float64).float()

    weights = {"embedding": draw(vocab, hidden), "final_norm": torch.ones(hidden)}
    for name, (inputs, outputs) in sizes.items():
        weights[f"layers.{name}"] = draw(layers, inputs, outputs) / inputs**0.5
    weights |= {f"layers.{name}": 1 + 0.1 * draw(layers, hidden) for name in ("attention_norm", "mlp_norm")}
    tokens = torch.randint(vocab, (length,), generator=random)
    both = codes("default", head_dim=dim, kv_heads=TINY.kv_heads, bucket=16, seed=seed, layers=layers)
    wide = {name: weight.double() for name, weight in weights.items()}
    result = decoder.decode(wide, TINY, tokens, both, TINY_TIERS, plain_dtype=torch.float64)
    expected = {"logits": result.logits}
    for side, rows in (("key", result.keys), ("value", result.values)):
        expected[f"{side}.slots"] = torch.stack([row.slots for row in rows])
        expected[f"{side}.scale"] = torch.stack([row.scale for row in rows])
    meta = {
        "q_heads": TINY.q_heads, "kv_heads": TINY.kv_heads, "head_dim": dim, "norm_eps": TINY.norm_eps,
        "rotary": rotary_attributes(TINY.rotary), "tiers": dataclasses.astuple(TINY_TIERS),
        "codes": codes_attributes(both), "plain_dtype": "float64",
    }  # fmt: skip
    inputs = {f"weights.{name}": weight for name, weight in weights.items()}
    return Case("model", "tiny llama", meta, inputs | {"tokens": tokens, **codes_arrays(both)}, expected)


def arrays(prefix: str, one: TransformCode) -> dict[str, torch.Tensor]:
    """A code's leaves by `<prefix>.<name>`, of the dtypes that `pallas_kernels.transform_code` has."""
    narrow = {"bits": torch.int8, "slot_order": torch.int32}
    names = [field.name for field in dataclasses.fields(one)]
    leaves = {name: getattr(one, name) for name in names if isinstance(getattr(one, name), torch.Tensor)}
    return {f"{prefix}.{name}": leaf.to(narrow.get(name, leaf.dtype)).contiguous() for name, leaf in leaves.items()}


def attributes(one: TransformCode) -> dict[str, Any]:
    return {"kind": one.kind, "clip": one.clip, "clip_ratio": one.clip_ratio}


def codes_arrays(both: TransformCodes) -> dict[str, torch.Tensor]:
    return arrays("codes.key", both.key) | arrays("codes.value", both.value)


def codes_attributes(both: TransformCodes) -> dict[str, Any]:
    return {
        "key": attributes(both.key), "value": attributes(both.value), "bucket": both.bucket,
        "rotary": None if both.rotary is None else rotary_attributes(both.rotary),
        "scale_dtype": _name(both.scale_dtype),
    }  # fmt: skip


def rotary_attributes(turn: Rotary) -> dict[str, Any]:
    return dataclasses.asdict(turn)


def page_arrays(store: cache.LayerCache) -> dict[str, torch.Tensor]:
    """`pages.<side>.slots`, `.scale` and, where stored, `.offset`."""
    result = {}
    for side in ("key", "value"):
        pages = getattr(store, side)
        named = zip(("slots", "scale", "offset"), (pages.slots, pages.scale, pages.offset), strict=True)
        result |= {f"pages.{side}.{name}": pool for name, pool in named if pool is not None}
    return result


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
