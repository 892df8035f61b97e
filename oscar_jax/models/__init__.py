"""A decoder for Llama, Qwen2, Qwen3 and Gemma 3 models, and loaders for Hugging Face directories and GGUF files."""

from oscar_jax.models.attention import Attend, causal_attention, plain_attention
from oscar_jax.models.config import ModelConfig
from oscar_jax.models.decoder import Decoder
from oscar_jax.models.load import LoadedModel, ModelIdentity, load
from oscar_jax.models.random import random_decoder, random_model, tiny_config

__all__ = [
    "Attend",
    "Decoder",
    "LoadedModel",
    "ModelConfig",
    "ModelIdentity",
    "causal_attention",
    "load",
    "plain_attention",
    "random_decoder",
    "random_model",
    "tiny_config",
]
