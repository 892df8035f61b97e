"""Seeded transform codes for tests: every kind, clip and bit pattern, without calibration."""

import numpy as np

from pallas_kernels.rope import Rotary
from pallas_kernels.transform_code import Clip, TransformCode, TransformCodes

KINDS = ("naive", "rotation-rank", "rotation-static", "levels", "levels-uniform", "feedback")

CLIPS: dict[str, Clip] = {"naive": "none", "rotation-rank": "rank", "rotation-static": "static"}


def split(slots, dim):
    """Class sizes n6, n4, n2 that fill `slots` as the calibrated ones do, with dropped coordinates left."""
    n6, n4 = 2, max(1, slots // 6)
    return n6, n4, min(slots - 3 * n6 - 2 * n4, dim - n6 - n4)


def transform_code(kind, *, layers=1, kv_heads=2, head_dim=64, slots=None, seed=0, sort_slots=True):
    rng = np.random.default_rng(seed)
    shape = (layers, kv_heads, head_dim)
    orthogonal = np.linalg.qr(rng.normal(size=(*shape, head_dim)))[0]
    mu = rng.normal(size=shape)
    two = np.full(shape, 2, np.int8)
    if kind in CLIPS:
        rotation = np.broadcast_to(np.eye(head_dim), orthogonal.shape) if kind == "naive" else orthogonal
        clip = CLIPS[kind]
        return TransformCode.build(
            mu=np.zeros(shape), encode=rotation, inverse=np.swapaxes(rotation, -1, -2), bits=two, delta=np.ones(shape),
            weight=np.ones(shape), kind="minmax", clip=clip, clip_ratio=0.96,
            clip_threshold=np.full(shape[:2], 1.7) if clip == "static" else None,
        )  # fmt: skip
    stretch = np.exp(rng.normal(size=shape) * 0.5)
    encode, inverse = orthogonal * stretch[..., None, :], np.swapaxes(orthogonal, -1, -2) / stretch[..., None]
    if kind == "levels":
        n6, n4, n2 = split(slots or head_dim, head_dim)
        bits = np.repeat([6, 4, 2, 0], [n6, n4, n2, head_dim - n6 - n4 - n2]).astype(np.int8)
        delta = np.select([bits == 6, bits == 4], [0.104, 0.335], 0.996)
        return TransformCode.build(
            mu=mu, encode=encode, inverse=inverse, bits=np.broadcast_to(bits, shape), delta=delta,
            weight=np.exp(rng.normal(size=shape)), slots=slots, sort_slots=sort_slots,
        )  # fmt: skip
    metric = inverse @ np.swapaxes(inverse, -1, -2)
    metric = metric + 0.01 * np.eye(head_dim) * np.diagonal(metric, axis1=-2, axis2=-1)[..., None]
    return TransformCode.build(
        mu=mu, encode=encode, inverse=inverse, bits=two, delta=np.full(shape, 0.98), weight=np.ones(shape), gain=1.06,
        slots=slots, metric=metric if kind == "feedback" else None,
    )  # fmt: skip


def transform_codes(key="levels", value="levels-uniform", *, bucket=None, head_dim=64, seed=0, **kwargs):
    rotary = Rotary.standard(head_dim) if bucket else None
    return TransformCodes(
        transform_code(key, head_dim=head_dim, seed=seed, **kwargs),
        transform_code(value, head_dim=head_dim, seed=seed + 1, **kwargs),
        rotary,
        bucket,
    )
