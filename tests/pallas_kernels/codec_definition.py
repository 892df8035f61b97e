"""The codec's definition once more, in numpy, row by row: the oracle of the codec tests."""

import numpy as np


def pairwise_sum(x):
    width = 1 << (len(x) - 1).bit_length()
    x = np.concatenate([x, np.zeros(width - len(x), x.dtype)])
    while len(x) > 1:
        x = x[: len(x) // 2] + x[len(x) // 2 :]
    return x[0]


def quantize_row(code, head, y, scale_dtype=np.float16):
    """Slots in stored order, scale and offset of one transformed row; `code` has `[K, ...]` leaves."""
    f32, dim = np.float32, len(y)
    bits = np.asarray(code.bits)[head].astype(int)
    order = np.asarray(code.slot_order)[head]
    if not np.isfinite(y).all():
        return np.zeros(len(order), int), np.nan, np.nan
    if code.kind == "minmax":
        if code.clip == "rank":
            threshold = np.sort(np.abs(y))[min(int(np.floor(code.clip_ratio * dim)), dim - 1)]
            y = np.clip(y, -threshold, threshold)
        elif code.clip == "static":
            threshold = np.asarray(code.clip_threshold)[head]
            y = np.clip(y, -threshold, threshold)
        low, high = y.min(), y.max()
        step = (high - low) / f32(3)
        levels = np.zeros(dim, int) if high == low else np.clip(np.floor((y - low) / step + f32(0.5)), 0, 3).astype(int)
        return levels[order], scale_dtype(step), scale_dtype(low)
    kept = bits > 0
    delta, weight = np.asarray(code.delta)[head], np.asarray(code.weight)[head]
    with np.errstate(over="ignore"):
        mean_square = pairwise_sum(np.where(kept, y * y, f32(0))) / f32(kept.sum())
    if not np.isfinite(mean_square):
        return np.zeros(len(order), int), np.nan, None
    sigma = np.sqrt(mean_square + f32(1e-12))
    z = y * (f32(1) / sigma) * (f32(1) / delta)
    half = np.where(kept, 2 ** np.maximum(bits - 1, 0), 0)
    index = np.clip(np.floor(z), -half, np.maximum(half - 1, 0))
    level = np.where(kept, delta * (index.astype(f32) + f32(0.5)), f32(0))
    weighted = weight * level
    dot, norm = pairwise_sum(weighted * y), pairwise_sum(weighted * level)
    scale = np.asarray(code.gain)[head] * dot / norm
    limit = 65504.0
    logical = []
    for coordinate in range(dim):
        stored = int(index[coordinate] + half[coordinate])
        logical += [(stored >> shift) & 3 for shift in range(bits[coordinate] - 2, -1, -2)]
    logical += [0] * (len(order) - len(logical))
    return np.array(logical)[order], scale_dtype(np.clip(scale, -limit, limit)), None


def pack_row(slots):
    quarter = len(slots) // 4
    return np.array([sum(int(slots[j + i * quarter]) << 2 * i for i in range(4)) for j in range(quarter)], np.uint8)


def decode_row(code, head, slots, scale, offset):
    scale = float(scale)
    offset = -1.5 * scale if offset is None else float(offset)
    rows = np.asarray(code.decode, np.float64)[head]
    return (scale * slots + offset) @ rows + np.asarray(code.mu, np.float64)[head]
