"""Small random models for tests and examples: the real decoder with seeded weights."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

from oscar_jax.models.checkpoint import compute_dtype
from oscar_jax.models.config import ModelConfig
from oscar_jax.models.decoder import Decoder, parameter_shapes
from oscar_jax.models.load import LoadedModel
from pallas_kernels.rope import Rotary


def tiny_config(
    *,
    architecture: str = "llama",
    layers: int = 2,
    q_heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 16,
    hidden_size: int = 48,
    vocab_size: int = 96,
    max_position: int = 512,
    **changes: Any,
) -> ModelConfig:
    """A `ModelConfig` small enough for tests, with the features of its architecture; `changes` are any other fields."""
    fields: dict[str, Any] = {
        "mlp_size": 2 * hidden_size,
        "norm_eps": 1e-5,
        "rotary": Rotary.standard(head_dim),
        "tied_embeddings": architecture == "llama",
        "qkv_bias": architecture == "qwen2",
        "qk_norm": architecture == "qwen3",
    }
    return ModelConfig(
        architecture=architecture,
        vocab_size=vocab_size,
        layers=layers,
        hidden_size=hidden_size,
        q_heads=q_heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        max_position=max_position,
        **(fields | changes),
    )


def random_decoder(config: ModelConfig, *, seed: int = 0, dtype: Any = jnp.float32) -> Decoder:
    """A decoder with normal weights that keep activations near one, norm weights near one and small biases.

    The numbers are drawn in float64 and then rounded, so the same seed is the same model in every dtype.
    """
    dtype = compute_dtype(dtype)
    rng = np.random.default_rng(seed)
    weights = {}
    for name, kind in parameter_shapes(config).items():
        shape = (config.layers, *kind.shape) if name.startswith("layers.") else kind.shape
        x = rng.standard_normal(shape)
        if kind.matrix:
            x /= np.sqrt(kind.shape[0])
        elif name.endswith("norm"):
            x = 1 + 0.1 * x
        elif name.endswith("bias"):
            x *= 0.5
        weights[name] = jnp.asarray(x.astype(dtype))
    return Decoder(config, weights)


def random_model(config: ModelConfig, *, seed: int = 0, dtype: Any = jnp.float32) -> LoadedModel:
    """`random_decoder` as a `LoadedModel` without a tokenizer."""
    return LoadedModel.build(
        random_decoder(config, seed=seed, dtype=dtype), None, f"random-{config.architecture}-{seed}"
    )
