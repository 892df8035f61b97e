"""Checks codec, packing and tiers of the vectors with numpy alone and reads the rest: `python check.py [FOLDER]`."""

import json
import sys
from pathlib import Path

import numpy as np


def unpack(packed):  # byte j holds slots j, j + N/4, j + N/2, j + 3N/4, lowest bits first
    return np.concatenate([packed >> bit & 3 for bit in (0, 2, 4, 6)], axis=-1)


def pairwise(x):  # sum: pad with zeros to a power of two, add the upper half to the lower, repeat
    x = np.pad(x, (0, (1 << (len(x) - 1).bit_length()) - len(x)))
    while len(x) > 1:
        x = x[: len(x) // 2] + x[len(x) // 2 :]
    return x[0]


def quantize(y, code, kind, clip, clip_ratio):  # one fp32 row of one head: levels in coordinate order, scale
    if kind == "minmax":
        bound = (
            np.sort(abs(y))[min(int(clip_ratio * len(y)), len(y) - 1)] if clip == "rank" else code.get("clip_threshold")
        )
        y = np.clip(y, -bound, bound) if clip != "none" else y
        scale = (y.max() - y.min()) / np.float32(3)
        return np.floor((y - y.min()) / (scale or np.float32(1)) + np.float32(0.5)).astype(int), scale
    half, kept = (1 << code["bits"].astype(int)) // 2, code["bits"] > 0
    y = np.where(kept, y, np.float32(0))
    sigma = np.sqrt(pairwise(y * y) / np.float32(kept.sum()) + np.float32(1e-12))
    k = np.clip(np.floor(y * (1 / sigma) * (1 / code["delta"])), -half, np.maximum(half - 1, 0)).astype(int)
    level = np.where(kept, code["delta"] * (k.astype(np.float32) + np.float32(0.5)), np.float32(0))
    dot, norm = (pairwise(code["weight"] * level * x) for x in (y, level))
    return k + half, code["gain"] * dot / (norm or np.float32(1))


def check_codec(meta, a):
    for row, head in np.argwhere(np.isfinite(a["out.scale"])):  # other rows hold NaN or Inf: slots 0, scale NaN
        code = {n[8:]: x[head] for n, x in a.items() if n.startswith("in.code.")}
        pairs = [(i, shift) for i, width in enumerate(code["bits"]) for shift in range(width - 2, -1, -2)]
        owner, shift = np.array(pairs + [(0, 8)] * (len(code["slot_order"]) - len(pairs)))[code["slot_order"]].T
        slots = unpack(a["out.slots"][row, head])
        scale = np.float64(a["out.scale"][row, head])
        offset = np.float64(a["out.offset"][row, head]) if "out.offset" in a else -1.5 * scale
        x_hat = (scale * slots + offset) @ code["decode"].astype(float) + code["mu"]
        np.testing.assert_allclose(x_hat, a["out.x_hat"][row, head], rtol=1e-12, atol=1e-12)
        if "metric" not in code:  # error feedback rounds one coordinate after another: triton_ref/codec.py
            level, exact = quantize(a["out.y"][row, head], code, **meta["code"])
            assert (level[owner] >> shift & 3 == slots).all()
            assert np.float16(np.clip(exact, -65504, 65504)) == scale


def check_tiers(meta, a):
    for (sink, recent, group, _), end in zip(meta["tiers"], a["out.history_end"], strict=True):
        assert (end == sink + group * (np.maximum(0, a["in.positions"] + 1 - sink - recent) // group)).all()


def check_packing(meta, a):
    assert (unpack(a["out.packed"]) == a["in.slots"]).all()


CHECKS = {"codec": check_codec, "history end": check_tiers, "packing": check_packing}
for path in sorted((Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent).glob("*.npz")):
    with np.load(path) as file:
        arrays, meta = {name: file[name] for name in file.files}, json.loads(str(file["meta"]))
    check = CHECKS.get(
        meta["case"] if meta["case"] in CHECKS else meta["operation"], lambda meta, arrays: "not checked"
    )
    print(path.name, check(meta, arrays) or "ok")
