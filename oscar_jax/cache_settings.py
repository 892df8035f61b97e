"""`CacheConfig`: what is known of a cache before there is one.

Not named cache_config: once imported, a module of that name would hide the function `oscar_jax.cache_config`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax

from oscar_jax import sharding
from pallas_kernels import dispatch
from pallas_kernels.attention import AttentionSpec
from pallas_kernels.tiers import Tiers

TESTED_HEAD_DIMS = (64, 80, 96, 128, 192, 256)
MAX_GROUP = 32  # query heads a KV head
DEFAULT_TIERS = Tiers()


@dataclasses.dataclass(frozen=True)
class CacheConfig:
    """Everything about a cache that is known when it is built; checked here, never at the first request.

    Attributes:
        layers, q_heads, kv_heads, head_dim: the model's.
        batch: sequences held at once.
        max_length: longest sequence in tokens.
        tiers: window and page sizes in tokens.
        plain_dtype: dtype of sinks and recents, "float16", "bfloat16", "float32" or "float64"; None stands for the
            model's, to be filled in by who knows the model (`step.make_step`).
        step_tokens: most tokens of one decode step that may be taken back afterwards (drafted tokens).
        pages: pages of the pool; by default enough for `batch` sequences of `max_length`.
        attention: scale, soft-cap and chunk rule.
        windows: sliding window of each layer in tokens, None entries for full attention; None for a model without.
        implementation: a name, names in order of preference, or None for the best one here.
        unroll_layers: compile every layer of the model by itself: a program L times as long, which on a GPU copies
            fewer weights (`Decoder.__call__`).
        mesh: of `sharding.make_mesh`, over which sequences and heads are divided; None for one device.

    Raises:
        ValueError: a size or dtype out of range, or a mesh that does not divide them.
        NotImplementedError: no implementation here takes the combination.
    """

    layers: int
    q_heads: int
    kv_heads: int
    head_dim: int
    max_length: int
    attention: AttentionSpec
    batch: int = 1
    tiers: Tiers = DEFAULT_TIERS
    plain_dtype: str | None = "bfloat16"
    step_tokens: int = 1
    pages: int | None = None
    windows: tuple[int | None, ...] | None = None
    implementation: str | tuple[str, ...] | None = None
    unroll_layers: bool = False
    mesh: jax.sharding.Mesh | None = None

    def __post_init__(self):
        for name in ("layers", "q_heads", "kv_heads", "head_dim", "max_length", "batch", "step_tokens"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{name}={value!r}: expected a whole number, at least 1.")
        if self.head_dim % 8:
            raise ValueError(
                f"head_dim={self.head_dim}: expected a multiple of 8, of "
                f"which {', '.join(map(str, TESTED_HEAD_DIMS))} are tested."
            )
        if self.q_heads % self.kv_heads or self.q_heads // self.kv_heads > MAX_GROUP:
            raise ValueError(
                f"q_heads={self.q_heads}, kv_heads={self.kv_heads}: expected a whole number of query heads a KV head, "
                f"at most {MAX_GROUP}."
            )
        if self.plain_dtype not in ("float16", "bfloat16", "float32", "float64", None):
            raise ValueError(f"plain_dtype={self.plain_dtype!r}: expected float16, bfloat16, float32 or float64.")
        if self.step_tokens > self.tiers.recent:
            raise ValueError(f"step_tokens={self.step_tokens}: expected at most recent={self.tiers.recent}.")
        if self.windows is not None and (
            len(self.windows) != self.layers or any(w is not None and w < 1 for w in self.windows)
        ):
            raise ValueError(f"windows={self.windows}: expected {self.layers} entries, each None or at least 1.")
        if self.mesh is not None:
            sharding.check_mesh(
                self.mesh, batch=self.batch, pages=self.pages, q_heads=self.q_heads, kv_heads=self.kv_heads
            )
        self._check_implementation()

    def _check_implementation(self) -> None:
        reasons = dispatch.availability()
        wanted = self.implementation
        names: Sequence[str] = tuple(reasons) if wanted is None else (wanted,) if isinstance(wanted, str) else wanted
        unknown = [name for name in names if name not in reasons]
        if unknown:
            raise ValueError(f"implementation={unknown[0]!r}: expected one of {', '.join(reasons)}, or None.")
        if all(reasons[name] is not None for name in names):
            why = "; ".join(f"{name}: {reasons[name]}" for name in names)
            raise NotImplementedError(f"implementation={wanted!r} cannot run here ({why}); 'xla' runs everywhere.")

    @property
    def sequence_pages(self) -> int:
        """Pages that a sequence of `max_length` tokens needs."""
        return self.tiers.history_pages(self.max_length)

    @property
    def pool_pages(self) -> int:
        """Pages of the pool, those of all parts of a mesh together."""
        return self.batch * self.sequence_pages if self.pages is None else self.pages

    @property
    def data_parts(self) -> int:
        """Parts into which the mesh divides sequences and pages."""
        return 1 if self.mesh is None else self.mesh.shape[sharding.DATA]

    @property
    def head_copies(self) -> int:
        """How many devices hold the same KV head."""
        return 1 if self.mesh is None else max(1, self.mesh.shape[sharding.TENSOR] // self.kv_heads)

    @property
    def stored_heads(self) -> int:
        """KV heads of the cache's arrays, copies counted."""
        return self.kv_heads * self.head_copies

    @property
    def device_heads(self) -> int:
        """KV heads that a device holds."""
        return self.stored_heads // (1 if self.mesh is None else self.mesh.shape[sharding.TENSOR])

    @property
    def ring(self) -> int:
        """Recent tokens a sequence has room for; no more than it can ever hold."""
        return min(self.tiers.ring(self.step_tokens), max(1, self.max_length - self.tiers.sink))
