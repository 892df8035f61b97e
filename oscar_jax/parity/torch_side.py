"""Operations of a case in PyTorch: eager, and the Triton kernels, on a GPU where there is one."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from oscar_jax.parity.cases import Case, part
from oscar_jax.parity.rules import Outputs
from triton_ref import cache, clip, codec, decoder, fit, linalg, moments, reference
from triton_ref.code import TransformCode, TransformCodes
from triton_ref.rope import Rotary
from triton_ref.tiers import Tiers

Operation = Callable[[Case], Outputs]


def eager_operations() -> dict[str, Operation]:
    """What eager PyTorch does."""
    return {
        "packing": packing,
        "codec": functools.partial(encode_and_decode, quantize=codec.quantize),
        "clip": functools.partial(clip_rows, encode=_reference_encode),
        "rotations": rotations,
        "demotion": demotion,
        "attention": functools.partial(attend, kernel=cache.attend),
        "calibration": calibration,
        "model": model,
    }


def triton_operations() -> dict[str, Operation]:
    """What the Triton kernels do.

    Raises:
        NotImplementedError: they cannot run here; the message says why.
    """
    try:
        from triton_ref.kernels import decode, launch, quantize
    except ImportError as error:
        raise NotImplementedError(f"triton cannot be imported ({error})") from error
    if reason := launch.unavailable(quantize.quantize_kernel):
        raise NotImplementedError(reason)
    return {
        "codec": functools.partial(encode_and_decode, quantize=quantize.quantize),
        "clip": functools.partial(clip_rows, encode=quantize.reference_encode),
        "attention": functools.partial(attend, kernel=decode.attend),
    }


def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def packing(case: Case) -> Outputs:
    return {"packed": _array(codec.pack(_tensor(case.inputs["slots"])))}


def encode_and_decode(case: Case, *, quantize: Callable) -> Outputs:
    code = _code(part(case.inputs, "code"), case.meta["code"])
    exact = _rows(quantize(code, _tensor(case.expected["y"])))
    rows = _rows(quantize(code, codec.transform(code, _tensor(case.inputs["x"]))))
    offset = case.expected.get("offset")
    stored = codec.Encoded(
        _tensor(case.expected["slots"]), _tensor(case.expected["scale"]), None if offset is None else _tensor(offset)
    )
    return {f"y.{name}": x for name, x in exact.items()} | rows | {"x_hat": _array(codec.decode(code, stored))}


def clip_rows(case: Case, *, encode: Callable) -> Outputs:
    """Thresholds (eager only) and the reference's stored rows of both of its evaluators."""
    y, ratio = _tensor(case.inputs["y"]), case.meta["ratio"]
    outputs = {}
    for evaluator, find in (("rank", clip.sorted_threshold), ("bisect", clip.bisected_threshold)):
        rows = encode(y, ratio, evaluator=evaluator)
        outputs |= {f"{evaluator}.slots": _array(rows.slots), f"{evaluator}.scale": _array(rows.scale[..., 0])}
        outputs[f"{evaluator}.zero"] = _array(rows.bias[..., 0])
        if encode is _reference_encode:
            outputs[f"{evaluator}.threshold"] = _array(find(y, ratio)[..., 0])
    return outputs


def rotations(case: Case) -> Outputs:
    target = torch.from_numpy(np.array(case.inputs["target"]))
    dim = target.shape[-1]
    found = {
        "eigenvalues": linalg.eigh(target, descending=False)[0],
        "rotation": linalg.reference_rotation(target),
        "hadamard": linalg.hadamard(dim),
        "bit_reversal": torch.tensor(linalg.bit_reversal(dim)),
    }
    for name in case.expected:
        if name.startswith("mixer"):
            found[name] = linalg.mixer(int(name.removeprefix("mixer")))
    return {name: x.numpy() for name, x in found.items()}


def demotion(case: Case) -> Outputs:
    """History ends, this project's and the reference's, or pages after a write."""
    meta = case.meta
    if "positions" in case.inputs:
        positions = _tensor(case.inputs["positions"])
        ends = [Tiers(*size).history_end(positions) for size in meta["tiers"]]
        reference_ends = [
            Tiers().reference_history_end(positions, prompt=prompt, chunk=chunk) for prompt, chunk in meta["prompts"]
        ]
        return {"history_end": _array(torch.stack(ends)), "reference": _array(torch.stack(reference_ends))}
    tiers, codes = Tiers(*meta["tiers"]), _codes(case)
    k, v, table = (_tensor(case.inputs[name]) for name in ("k", "v", "page_indices"))
    nothing = torch.zeros(1, 0, *k.shape[1:], device=k.device)
    sides = []
    for side in ("key", "value"):
        pools = part(case.expected, f"pages.{side}")
        empty = {name: torch.zeros_like(_tensor(pool)) for name, pool in pools.items()}
        sides.append(cache.Pages(empty["slots"], empty["scale"], empty.get("offset")))
    store = cache.LayerCache(nothing, nothing, nothing, nothing, sides[0], sides[1], table)
    cache.write(store, k, v, sequence=0, first=tiers.sink, codes=codes, tiers=tiers)
    outputs = {}
    for side in ("key", "value"):
        for name in part(case.expected, f"pages.{side}"):
            outputs[f"pages.{side}.{name}"] = _array(getattr(getattr(store, side), name))
    return outputs


def attend(case: Case, *, kernel: Callable) -> Outputs:
    meta, arrays = case.meta, case.inputs
    sides = []
    for side in ("key", "value"):
        pools = {name: _tensor(pool) for name, pool in part(arrays, f"pages.{side}").items()}
        sides.append(cache.Pages(pools["slots"], pools["scale"], pools.get("offset")))
    plain = [_tensor(arrays[tier]) for tier in ("sink_k", "sink_v", "recent_k", "recent_v")]
    store = cache.LayerCache(*plain, *sides, _tensor(arrays["page_indices"]))  # type: ignore[call-arg]
    sinks = arrays.get("sink_logits")
    call = cache.Call(
        _tensor(arrays["starts"]), _tensor(arrays["counts"]), meta["scale"], meta["softcap"], meta["window"],
        None if sinks is None else _tensor(sinks),
    )  # fmt: skip
    q, k, v = (_tensor(arrays[name]) for name in ("q", "k", "v"))
    if kernel is cache.attend:
        # Eager products of 16-bit tensors round where the device's library does; this rounds where kernels must.
        rounded_to = None if q.dtype == torch.float32 else q.dtype
        out = kernel(q.float(), k, v, store, _codes(case), call, tiers=Tiers(*meta["tiers"]), rounded_to=rounded_to)
    else:
        out = kernel(q, k, v, store, _codes(case), call, tiers=Tiers(*meta["tiers"]))
    return {"out": _array(out.to(q.dtype))}


def calibration(case: Case) -> Outputs:
    """On the CPU: float64 eigenvectors are its business."""
    meta = case.meta
    q, k, v, metric = (torch.from_numpy(np.array(case.inputs[n])) for n in ("q", "k", "v", "value_metric"))
    settings = moments.Settings(**meta["settings"])
    rotary = _rotary(meta["rotary"])
    groups = q.shape[3] // k.shape[3]
    first = moments.first_pass(q, k, v, lengths=meta["lengths"], rotary=rotary, settings=settings, value_metric=metric)
    second = moments.second_pass(k, v, first["query"] / (first["tokens"] * groups), lengths=meta["lengths"])
    outputs = {f"moments.{name}": x.numpy() for name, x in (first | second).items()}
    for recipe, per_layer in (("oscar-reference", True), ("oscar-head", False)):
        targets = fit.reference_targets(first, second, groups=groups, per_layer=per_layer)
        for side, target in zip(("key", "value"), targets, strict=True):
            outputs[f"{recipe}.{side}.rotation"] = linalg.reference_rotation(target).numpy()
    both = fit.default_statistics(
        first, rotary=rotary, max_position=meta["max_position"], settings=settings, value_metric=metric
    )
    codes = fit.default(*both, rotary=rotary, bucket=settings.bucket)
    for side, code in (("key", codes.key), ("value", codes.value)):
        for name in ("encode", "bits", "slot_order"):
            outputs[f"default.{side}.{name}"] = getattr(code, name).numpy()
    return outputs


def model(case: Case) -> Outputs:
    meta = case.meta
    weights = {name: _tensor(x).double() for name, x in part(case.inputs, "weights").items()}
    config = decoder.Config(
        meta["q_heads"], meta["kv_heads"], meta["head_dim"], meta["norm_eps"], _rotary(meta["rotary"])
    )
    found = decoder.decode(
        weights, config, _tensor(case.inputs["tokens"]), _codes(case), Tiers(*meta["tiers"]), plain_dtype=torch.float64
    )
    outputs = {"logits": _array(found.logits)}
    for side, rows in (("key", found.keys), ("value", found.values)):
        outputs[f"{side}.slots"] = _array(torch.stack([row.slots for row in rows]))
        outputs[f"{side}.scale"] = _array(torch.stack([row.scale for row in rows]))
    return outputs


def _reference_encode(y: torch.Tensor, ratio: float, *, evaluator: Any) -> reference.Rows:
    return reference.encode(y, ratio, reference.REFERENCE, evaluator=evaluator)


def _code(arrays: dict[str, np.ndarray], attributes: dict[str, Any]) -> TransformCode:
    return TransformCode.from_arrays(arrays, **attributes, device=device())


def _codes(case: Case) -> TransformCodes:
    meta = case.meta["codes"]
    key, value = (_code(part(case.inputs, f"codes.{side}"), meta[side]) for side in ("key", "value"))
    rotary = None if meta["rotary"] is None else _rotary(meta["rotary"])
    return TransformCodes(key, value, rotary, meta["bucket"], getattr(torch, meta["scale_dtype"]))


def _rotary(meta: dict[str, Any]) -> Rotary:
    return Rotary(tuple(meta["inverse_frequencies"]), meta["rotary_dim"], meta["pairing"])


def _tensor(array: np.ndarray) -> torch.Tensor:
    array = np.array(array)  # torch wants memory that it may write to
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.uint16)).view(torch.bfloat16).to(device())
    return torch.from_numpy(array).to(device())


def _array(tensor: torch.Tensor) -> np.ndarray:
    tensor = tensor.detach().cpu()
    return (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy()


def _rows(encoded: codec.Encoded) -> Outputs:
    return {name: _array(x) for name, x in zip(encoded._fields, encoded, strict=True) if x is not None}
