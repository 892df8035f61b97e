"""The statistics and frames of `docs/design.md` again, in dense float64 numpy, one head and one pair at a time."""

from __future__ import annotations

import dataclasses

import numpy as np

from pallas_kernels.rope import Rotary


@dataclasses.dataclass(frozen=True)
class Sample:
    """Random rows: q `[L, B, T, N, D]`, k, v `[L, B, T, K, D]`, value metric `[L, K, D, D]`, lengths `[B]`."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    metric: np.ndarray
    lengths: np.ndarray
    rope: Rotary

    @property
    def sizes(self) -> dict[str, int]:
        layers, _, _, kv_heads, dim = self.k.shape
        return dict(layers=layers, kv_heads=kv_heads, q_heads=self.q.shape[3], head_dim=dim)

    @property
    def arrays(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        return self.q, self.k, self.v

    @property
    def where(self) -> dict:
        return dict(positions=np.arange(self.q.shape[2]), lengths=self.lengths, rope=self.rope)


def sample(
    *,
    layers: int = 2,
    lengths: tuple[int, ...] = (48, 37),
    kv_heads: int = 2,
    group: int = 2,
    dim: int = 8,
    seed: int = 0,
) -> Sample:
    """Rows with unequal variances, a mean, and garbage (NaN) behind each sequence's end."""
    rng = np.random.default_rng(seed)
    batch, rows = len(lengths), max(lengths) + 3
    spread = np.exp(rng.normal(size=(layers, 1, 1, kv_heads, dim)))

    def draw(heads: int) -> np.ndarray:
        x = rng.normal(size=(layers, batch, rows, heads, dim)) * np.repeat(spread, heads // kv_heads, 3)
        x += rng.normal(size=(layers, 1, 1, heads, dim))
        for index, length in enumerate(lengths):
            x[:, index, length:] = np.nan
        return x.astype(np.float32)

    factor = rng.normal(size=(layers, kv_heads, dim, dim))
    metric = factor @ np.swapaxes(factor, -1, -2) / dim
    return Sample(
        draw(kv_heads * group),
        draw(kv_heads),
        draw(kv_heads),
        metric,
        np.array(lengths),
        Rotary.standard(dim, base=100.0),
    )


def moments(
    data: Sample, *, bucket: int, sink: int, recent: int, stride: int = 8, window: int = 1 << 30
) -> dict[str, np.ndarray]:
    """Every first-pass sum, as `calib.moments` names them."""
    layers, batch, _, kv_heads, dim = data.k.shape
    group = data.q.shape[3] // kv_heads
    vector, square = (layers, kv_heads, dim), (layers, kv_heads, dim, dim)
    sums: dict[str, np.ndarray] = {name: np.zeros(square) for name in ("query", "key", "value", "output")}
    sums |= {f"weighted_{name}": np.zeros(square) for name in ("query", "key", "value")}
    sums |= {name: np.zeros(vector) for name in ("key_sum", "value_sum", "weighted_key_sum", "weighted_value_sum")}
    sums |= {name: np.zeros(vector[:-1]) for name in ("weighted_pair", "weighted_value_weight")}
    sums |= {"tokens": np.array(float(data.lengths.sum())), "weighted_covered": np.zeros(bucket)}
    turn = {origin: data.rope.matrix(-origin, dim) for origin in range(sink, int(data.lengths.max()) + bucket, bucket)}

    def back(x: np.ndarray, position: int) -> np.ndarray:
        return x @ turn[sink + bucket * ((position - sink) // bucket)]

    for index in range(batch):
        length = int(data.lengths[index])
        last = (length - 1) // stride * stride
        for j in range(sink, last - recent + 1):
            sums["weighted_covered"][(j - sink) % bucket] += 1
        for layer, head in np.ndindex(layers, kv_heads):
            at = layer, head
            k, v = (x[layer, index, :length, head].astype(np.float64) for x in (data.k, data.v))
            metric = data.metric[at]
            sums["key_sum"][at] += k.sum(0)
            sums["value_sum"][at] += v.sum(0)
            sums["key"][at] += k.T @ k
            sums["value"][at] += v.T @ v
            for member in range(head * group, (head + 1) * group):
                q = data.q[layer, index, :length, member].astype(np.float64)
                sums["query"][at] += q.T @ q
                for t in range(length):
                    score = np.exp(k[: t + 1] @ q[t] / np.sqrt(dim)) * (np.arange(t + 1) > t - window)
                    p = score / score.sum()
                    o = p @ v[: t + 1]
                    sums["output"][at] += np.outer(o, o)
                    if t % stride:
                        continue
                    for j in range(sink, t - recent + 1):
                        w = p[j] ** 2 * (v[j] - o) @ metric @ (v[j] - o)
                        key, query = back(k[j], j), back(q[t], t)
                        sums["weighted_pair"][at] += w
                        sums["weighted_query"][at] += w * np.outer(query, query)
                        sums["weighted_key_sum"][at] += w * key
                        sums["weighted_key"][at] += w * np.outer(key, key)
                        sums["weighted_value_weight"][at] += p[j] ** 2
                        sums["weighted_value_sum"][at] += p[j] ** 2 * v[j]
                        sums["weighted_value"][at] += p[j] ** 2 * np.outer(v[j], v[j])
    return sums


def eigh(a: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Descending, largest-magnitude entry of each vector positive."""
    values, vectors = np.linalg.eigh((a + a.T) / 2)
    values, vectors = values[::-1], vectors[:, ::-1]
    largest = np.abs(vectors).argmax(0)
    return values, vectors * np.sign(vectors[largest, np.arange(len(a))])


def power(a: np.ndarray, exponent: float) -> np.ndarray:
    values, vectors = np.linalg.eigh(a)
    return vectors @ np.diag(values**exponent) @ vectors.T


def mixing(n: int) -> np.ndarray:
    """`Q_n`: Sylvester's Hadamard matrix for powers of two, else the DCT-II."""
    if n & (n - 1) == 0:
        matrix = np.ones((1, 1))
        while len(matrix) < n:
            matrix = np.kron(np.array([[1, 1], [1, -1]]), matrix)
        return matrix / np.sqrt(n)
    j, k = np.arange(n)[:, None], np.arange(n)[None]
    return np.sqrt((2 - (k == 0)) / n) * np.cos(np.pi * (j + 0.5) * k / n)


def split(spectrum: np.ndarray, slots: int) -> tuple[int, int, int]:
    """(n6, n4, n2) of least predicted error, the first one of equals."""
    dim, best, chosen = len(spectrum), np.inf, (0, 0, 0)
    for n6 in (0, 1, 2, 3, 4, 6, 8):
        for n4 in range(dim + 1):
            spare = slots - 3 * n6 - 2 * n4
            n2 = min(spare, dim - n6 - n4)
            if spare < 0 or n2 < 0:
                continue
            error, start = 0.0, 0
            for n, d in ((n6, 0.00112), (n4, 0.0118), (n2, 0.119)):
                error += d * spectrum[start : start + n].sum() ** 2 / max(n, 1)
                start += n
            error += (spectrum[start:] ** 2).sum()
            if error < best:
                best, chosen = error, (n6, n4, n2)
    return chosen


def balanced(covariance: np.ndarray, metric: np.ndarray, classes, ridge: float = 1e-3):
    """Spectrum, M, A and `A C A^T` of one head; `classes` is a function of the spectrum."""
    dim = len(covariance)
    s, c = (a + ridge * np.trace(a) / dim * np.eye(dim) for a in (covariance, metric))
    root, inverse_root = power(s, 0.5), power(s, -0.5)
    p = inverse_root @ power(root @ c @ root, 0.5) @ inverse_root
    spectrum, vectors = eigh(power(p, 0.5) @ covariance @ power(p, 0.5))
    encode, inverse, start = np.zeros((dim, dim)), np.zeros((dim, dim)), 0
    for n in classes(spectrum):
        if n:
            columns = slice(start, start + n)
            rms = np.sqrt(spectrum[columns].mean())
            encode[:, columns] = power(p, 0.5) @ vectors[:, columns] @ mixing(n) / rms
            inverse[columns] = rms * mixing(n).T @ vectors[:, columns].T @ power(p, -0.5)
            start += n
    return spectrum, encode, inverse, inverse @ metric @ inverse.T
