"""Operations of a case in JAX: the definition in XLA, and the Pallas kernels."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from calib import fit, linalg
from calib import moments as calib_moments
from oscar_jax.models import Decoder, ModelConfig
from oscar_jax.parity.cases import Case, part
from oscar_jax.parity.rules import Outputs
from oscar_jax.step import cache_config, make_step
from pallas_kernels import codec
from pallas_kernels.attention import AttentionSpec, PlainTiers
from pallas_kernels.history import History, SidePages, init_history, short_page
from pallas_kernels.rope import Rotary
from pallas_kernels.storage import loaded, stored
from pallas_kernels.tiers import Tiers
from pallas_kernels.transform_code import TransformCode, TransformCodes

Operation = Callable[[Case], Outputs]


def xla_operations() -> dict[str, Operation]:
    """What the definition in XLA does."""
    from pallas_kernels.attention import xla as attention
    from pallas_kernels.write import xla as write

    return {
        "packing": packing,
        "codec": encode_and_decode,
        "rotations": rotations,
        "demotion": functools.partial(demotion, write=write.write),
        "attention": functools.partial(attend, kernel=attention.attend),
        "calibration": calibration,
        "model": model,
    }


def pallas_operations(backend: str) -> dict[str, Operation]:
    """What the Pallas kernels of "triton" or "tpu" do: on their device, elsewhere in an interpreter, on the CPU.

    Raises:
        NotImplementedError: the kernels are not part of this version; the message says so.
    """
    operations: dict[str, Operation] = {}
    device = {"triton": "gpu", "tpu": "tpu"}[backend]
    interpret = jax.default_backend() != device
    for operation, function, build in (("attention", "attend", attend), ("demotion", "write", demotion)):
        package = "attention" if operation == "attention" else "write"
        try:
            module = importlib.import_module(f"pallas_kernels.{package}.{backend}")
        except ImportError:
            continue
        kernel = functools.partial(getattr(module, function), interpret=interpret)
        keyword = "kernel" if operation == "attention" else "write"
        options: dict[str, Any] = {keyword: kernel, "backend": backend}
        if operation == "attention":
            options["interpret"] = interpret
        run = functools.partial(build, **options)
        operations[operation] = functools.partial(_on_cpu, run) if interpret else run
    if not operations:
        raise NotImplementedError(f"the {backend} kernels are not part of this version")
    return operations


def packing(case: Case) -> Outputs:
    return {"packed": np.asarray(codec.pack(jnp.asarray(case.inputs["slots"])))}


def encode_and_decode(case: Case) -> Outputs:
    code = TransformCode.from_arrays(part(case.inputs, "code"), **case.meta["code"])
    exact = _rows(_compiled(codec.quantize)(code, case.expected["y"]))
    rows = _rows(_compiled(codec.encode)(code, case.inputs["x"]))
    offset = case.expected.get("offset")
    stored_rows = codec.Encoded(
        jnp.asarray(case.expected["slots"]),
        jnp.asarray(case.expected["scale"]),
        None if offset is None else jnp.asarray(offset),
    )
    return {f"y.{name}": x for name, x in exact.items()} | rows | {
        "x_hat": np.asarray(_compiled(codec.decode)(code, stored_rows))
    }  # fmt: skip


def rotations(case: Case) -> Outputs:
    target = case.inputs["target"]
    dim = target.shape[-1]
    sizes = [int(name.removeprefix("mixer")) for name in case.expected if name.startswith("mixer")]

    def found(target: jax.Array) -> dict[str, jax.Array]:
        mixers = {f"mixer{n}": linalg.mixer(jnp.zeros(n, int), jnp.full(n, n)) for n in sizes}
        values = linalg.eigh(target, descending=False)[0]
        return {"eigenvalues": values, "rotation": linalg.reference_rotation(target)} | mixers

    with jax.enable_x64(True):
        outputs = {name: np.asarray(x) for name, x in _compiled(found)(jnp.asarray(target)).items()}
    return outputs | {"hadamard": linalg.hadamard(dim), "bit_reversal": linalg.bit_reversal(dim)}


def _on_cpu(operation: Operation, case: Case) -> Outputs:
    """Interpreters are meant for the CPU: that of TPU kernels gave other numbers on a GPU."""
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        return operation(case)


def demotion(case: Case, *, write: Callable, backend: str = "xla") -> Outputs:
    """History ends, or pages after a write."""
    if "positions" in case.inputs:
        if backend != "xla":
            raise NotImplementedError("tier boundaries are the same function in every kernel")
        positions = jnp.asarray(case.inputs["positions"])
        return {"history_end": np.stack([Tiers(*size).history_end(positions) for size in case.meta["tiers"]])}
    codes, tiers = _codes(case), Tiers(*case.meta["tiers"])
    pool = case.meta["pool"]
    history = _laid_out(init_history(codes, pages=pool, page=tiers.page), backend)
    rows = len(case.inputs["k"])
    run = _compiled(functools.partial(write, tiers=tiers))
    history = run(
        history,
        jnp.asarray(case.inputs["k"][None]),
        jnp.asarray(case.inputs["v"][None]),
        layer=jnp.int32(0),
        positions=jnp.arange(tiers.sink, tiers.sink + rows, dtype=jnp.int32)[None],
        valid=jnp.ones((1, rows), bool),
        page_indices=jnp.asarray(case.inputs["page_indices"], jnp.int32),
        codes=codes,
    )
    return _page_arrays(history)


def attend(case: Case, *, kernel: Callable, backend: str = "xla", interpret: bool = False) -> Outputs:
    meta, arrays = case.meta, case.inputs
    if interpret and not meta["tiers"][0]:
        raise NotImplementedError("Pallas' interpreter takes no array without elements, and there are no sinks")
    codes, tiers = _codes(case), Tiers(*meta["tiers"])
    history = _laid_out(History(_pages(case, "key"), _pages(case, "value")), backend)
    plain = [stored(jnp.asarray(arrays[tier][None])) for tier in ("sink_k", "sink_v", "recent_k", "recent_v")]
    sinks = arrays.get("sink_logits")
    run = _compiled(functools.partial(kernel, tiers=tiers, spec=AttentionSpec(meta["scale"], meta["softcap"])))
    out = run(
        *(jnp.asarray(arrays[name]) for name in ("q", "k", "v")),
        PlainTiers(*plain),
        history,
        layer=jnp.int32(0),
        starts=jnp.asarray(arrays["starts"]),
        counts=jnp.asarray(arrays["counts"]),
        page_indices=jnp.asarray(arrays["page_indices"]),
        codes=codes,
        window=None if meta["window"] is None else jnp.int32(meta["window"]),
        sink_logits=None if sinks is None else jnp.asarray(sinks),
    )
    return {"out": np.asarray(out)}


def calibration(case: Case) -> Outputs:
    """Moments of two passes, and the codes of three recipes."""
    arrays, meta = case.inputs, case.meta
    layers, _, length, kv_heads, dim = arrays["k"].shape
    rotary = _rotary(meta["rotary"])
    settings = {name: meta["settings"][name] for name in ("bucket", "sink", "recent")}
    recipes = ("oscar-reference", "oscar-head", "default")
    moments = calib_moments.init(
        recipes,
        layers=layers,
        kv_heads=kv_heads,
        q_heads=arrays["q"].shape[3],
        head_dim=dim,
        value_metric=arrays["value_metric"],
        **settings,
    )
    where = {"positions": np.arange(length), "lengths": np.asarray(meta["lengths"]), "rope": rotary}
    with jax.enable_x64(True):
        rows = [jnp.asarray(arrays[name]) for name in ("q", "k", "v")]
    moments = calib_moments.accumulate(moments, *rows, **where)
    moments = calib_moments.accumulate(moments, *rows, **where, first_fit=fit.first_fit(moments))
    found = {f"moments.{name}": np.asarray(x) for name, x in moments.sums.items()}
    outputs = {name: x for name, x in found.items() if name in case.expected}
    # A few hundred synthetic tokens are thin statistics, which is what `fit` would warn about.
    for recipe in recipes:
        codes = fit.fit(moments, recipe, rope=rotary, max_position=meta["max_position"])
        for side, code in (("key", codes.key), ("value", codes.value)):
            if recipe == "default":
                outputs |= {
                    f"default.{side}.{n}": np.asarray(getattr(code, n)) for n in ("encode", "bits", "slot_order")
                }
            else:
                outputs[f"{recipe}.{side}.rotation"] = _wide_rotation(moments, side, np.asarray(code.encode))
    return outputs


def _wide_rotation(moments: calib_moments.Moments, side: str, narrow: np.ndarray) -> np.ndarray:
    """The rotation before it was rounded to the fp32 `narrow`, which it must round to."""
    settings, sums = moments.settings, {name: np.asarray(x) for name, x in moments.sums.items()}
    if side == "key":
        target = sums["query"] / (sums["tokens"] * (settings.q_heads // settings.kv_heads))
    else:
        target = sums["logit"] / sums["logit_weight"][..., None, None]
    if (narrow == narrow[:, :1]).all():
        target = np.broadcast_to(target.mean(1, keepdims=True), target.shape)
    with jax.enable_x64(True):
        wide = np.asarray(linalg.reference_rotation(jnp.asarray(target)))
    return np.where(np.abs(wide - narrow) < 1e-6, wide, np.nan)


def model(case: Case) -> Outputs:
    """A decoder over a cache in float64, token by token."""
    meta, tokens = case.meta, case.inputs["tokens"]
    weights = part(case.inputs, "weights")
    vocab, hidden = weights["embedding"].shape
    layers, _, mlp = weights["layers.gate"].shape
    tiers = Tiers(*meta["tiers"])
    config = ModelConfig(
        architecture="llama",
        vocab_size=vocab,
        layers=layers,
        hidden_size=hidden,
        mlp_size=mlp,
        q_heads=meta["q_heads"],
        kv_heads=meta["kv_heads"],
        head_dim=meta["head_dim"],
        norm_eps=meta["norm_eps"],
        rotary=_rotary(meta["rotary"]),
        max_position=4 * len(tokens),
        tied_embeddings=True,
    )
    with jax.enable_x64(True):
        decoder = Decoder(config, {name: jnp.asarray(x, jnp.float64) for name, x in weights.items()})
        options: dict[str, Any] = {"tiers": tiers, "plain_dtype": meta["plain_dtype"], "implementation": "xla"}
        step = make_step(decoder, cache_config(config, max_length=len(tokens) + tiers.page, **options), _codes(case))
        cache, logits = step.init(), []
        for token in tokens:
            found, cache = step(cache, [[token]])
            logits.append(np.asarray(found)[0])
        assert cache.history is not None
        held = np.arange(tiers.history_tokens(len(tokens)))
        ids, places = np.asarray(cache.page_indices)[0, held // tiers.page], held % tiers.page
        outputs: Outputs = {"logits": np.stack(logits)}
        for side in ("key", "value"):
            pages = getattr(cache.history, side)
            outputs[f"{side}.slots"] = np.stack([layer[ids, :, places] for layer in np.asarray(pages.slots)])
            outputs[f"{side}.scale"] = np.stack([layer[ids, :, places] for layer in np.asarray(pages.scale)])
        return outputs


def _compiled(function: Callable) -> Callable:
    """On a CPU nearly all the time is LLVM's optimiser, whose work does not change what is compared here."""
    options = {"xla_backend_optimization_level": 0} if jax.default_backend() == "cpu" else None
    return jax.jit(function, compiler_options=options)


def _codes(case: Case) -> TransformCodes:
    """All layers of a case; one layer gets the axis it lacks."""
    meta, sides = case.meta["codes"], []
    for side in ("key", "value"):
        arrays = part(case.inputs, f"codes.{side}")
        if arrays["mu"].ndim == 2:
            arrays = {name: x[None] for name, x in arrays.items()}
        sides.append(TransformCode.from_arrays(arrays, **meta[side]))
    rotary = None if meta["rotary"] is None else _rotary(meta["rotary"])
    return TransformCodes(sides[0], sides[1], rotary, meta["bucket"], meta["scale_dtype"])


def _rotary(meta: dict[str, Any]) -> Rotary:
    return Rotary(tuple(meta["inverse_frequencies"]), meta["rotary_dim"], meta["pairing"])


def _pages(case: Case, side: str) -> SidePages:
    pools = part(case.inputs, f"pages.{side}")
    scale, offset = (stored(jnp.asarray(pools[name][None])) if name in pools else None for name in ("scale", "offset"))
    return SidePages(jnp.asarray(pools["slots"][None]), scale, offset)  # type: ignore[arg-type]


def _laid_out(history: History, backend: str) -> History:
    """The same pages in the layout that the kernels of a backend take."""

    def for_tpu(side: SidePages) -> SidePages:
        kv_heads, page = side.scale.shape[2:]
        short = short_page(codec.PLANES * side.slots.shape[-1], page, kv_heads)
        return side.as_words() if short else side.laid_out(tokens_last=True)

    if backend == "tpu":
        return History(for_tpu(history.key), for_tpu(history.value))
    return History(history.key, history.value.laid_out(tokens_last=backend == "triton"))


def _page_arrays(history: History) -> Outputs:
    outputs = {}
    for side in ("key", "value"):
        pages = getattr(history, side).laid_out(tokens_last=False)
        for name in ("slots", "scale", "offset"):
            if (pool := getattr(pages, name)) is not None:
                outputs[f"pages.{side}.{name}"] = np.array(pool if name == "slots" else loaded(pool))[0]
    return outputs


def _rows(encoded: codec.Encoded) -> Outputs:
    return {name: np.asarray(x) for name, x in zip(encoded._fields, encoded, strict=True) if x is not None}
