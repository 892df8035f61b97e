"""`ModelConfig`: everything about a model that is not a weight."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import sys
from typing import Any, Literal

from pallas_kernels.rope import Rotary

ARCHITECTURES = ("llama", "qwen2", "qwen3", "gemma3")
# Fields that not every model has: those at their defaults are left out of the hash, which artifacts remember.
_LATER = ("local_rotary", "query_scale", "embedding_scale", "activation", "post_norms")

# Lists and tables of these sizes are made before any weight is read, so a damaged number must not cost time and memory.
_MOST = {"layers": 10_000, "head_dim": 1 << 16, "max_position": 1 << 24}


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """A decoder of the Llama, Qwen2, Qwen3 or Gemma 3 family. Hashable, so it may be a static argument of `jax.jit`.

    Attributes:
        architecture: "llama", "qwen2", "qwen3" or "gemma3"; informative, the fields below decide what is computed.
        vocab_size: V, rows of the token embedding.
        layers: L.
        hidden_size: E, width of the residual stream.
        mlp_size: F, width of the gated MLP.
        q_heads, kv_heads: N and K; N is a multiple of K.
        head_dim: D; not always `hidden_size / q_heads`.
        norm_eps: added to the mean square in every RMSNorm.
        rotary: the pure rotation of queries and keys.
        local_rotary: that of layers with a window; None is `rotary`.
        attention_factor: multiplies the rotated dimensions of q and of k (YaRN, longrope), else 1.
        max_position: tokens the rotary tables hold; the model's context unless `load` was told otherwise.
        tied_embeddings: the output head is the token embedding.
        qkv_bias, output_bias: biases of the query, key and value projections, and of the output projection.
        qk_norm: RMSNorm over D of each query and key head before the rotation.
        windows: for each layer None, or the number w of latest tokens it sees (`j > t - w`); `()` is None everywhere.
        query_scale: factor on `q . k` before the softmax; None is `head_dim ** -0.5`.
        embedding_scale: factor on the token embedding, not on the tied head.
        activation: of the gated MLP, "silu" or "gelu_tanh".
        post_norms: RMSNorm of the outputs of attention and MLP before they are added.
    """

    architecture: str
    vocab_size: int
    layers: int
    hidden_size: int
    mlp_size: int
    q_heads: int
    kv_heads: int
    head_dim: int
    norm_eps: float
    rotary: Rotary
    max_position: int
    attention_factor: float = 1.0
    tied_embeddings: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    qk_norm: bool = False
    windows: tuple[int | None, ...] = ()
    local_rotary: Rotary | None = None
    query_scale: float | None = None
    embedding_scale: float = 1.0
    activation: Literal["silu", "gelu_tanh"] = "silu"
    post_norms: bool = False

    def __post_init__(self):
        check_architecture(self.architecture)
        for name in (
            "vocab_size",
            "layers",
            "hidden_size",
            "mlp_size",
            "q_heads",
            "kv_heads",
            "head_dim",
            "max_position",
        ):
            check_size(name, getattr(self, name), name)
        if self.q_heads % self.kv_heads:
            raise ValueError(f"q_heads={self.q_heads}: expected a multiple of kv_heads={self.kv_heads}.")
        if self.rotary.rotary_dim > self.head_dim:
            raise ValueError(f"rotary_dim={self.rotary.rotary_dim}: expected at most head_dim={self.head_dim}.")
        if not self.windows:
            object.__setattr__(self, "windows", (None,) * self.layers)
        if len(self.windows) != self.layers:
            raise ValueError(f"windows has {len(self.windows)} entries: expected one for each of {self.layers} layers.")
        for window in set(self.windows) - {None}:
            check_size("entry of windows", window)

    @property
    def softmax_scale(self) -> float:
        """Factor on `q . k` before the softmax; `attention_factor` is already in q and k."""
        return self.head_dim**-0.5 if self.query_scale is None else self.query_scale

    def rotary_of(self, layer: int) -> Rotary:
        """The rotation of one layer."""
        local = self.local_rotary is not None and self.windows[layer] is not None
        return self.local_rotary if local else self.rotary  # type: ignore[return-value]

    def config_hash(self) -> str:
        """SHA-256 of the canonical JSON of all fields but `max_position`, which is the user's choice."""
        fields = dataclasses.asdict(self)
        del fields["max_position"]
        for field in dataclasses.fields(self):
            if field.name in _LATER and fields[field.name] == field.default:
                del fields[field.name]
        return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()


def checked_max_position(max_position: int | None, context: int) -> int:
    """The rows of the rotary tables: `max_position`, or the model's context if None; ValueError beyond the context."""
    if max_position is None:
        return context
    if not 0 < max_position <= context:
        raise ValueError(f"max_position={max_position}: expected 1 to {context}, the context of the model.")
    return max_position


def check_size(name: str, value: Any, field: str = "") -> None:
    """Raises ValueError, calling it `name`, unless `value` is a whole number that a field of `ModelConfig` may have."""
    most = _MOST.get(field, (1 << 31) - 1)
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
        raise ValueError(f"{name}={value!r:.60}: expected a whole number from 1 to {most}.")


def positive_number(name: str, value: Any, *, above: float = 0.0) -> float:
    """`value` as a float; ValueError, calling it `name`, unless it is a finite number above `above`."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not above < value <= sys.float_info.max:
        raise ValueError(f"{name}={value!r:.60}: expected a finite number above {above:g}.")
    return float(value)


def check_architecture(name: object) -> None:
    """Raises ValueError unless `name` is an architecture that the decoder computes."""
    if name not in ARCHITECTURES:
        raise ValueError(
            f"architecture {name!r:.60} is not supported: expected one of {', '.join(ARCHITECTURES)} "
            "(dense decoders; mixture of experts and latent attention are not implemented)."
        )
