"""`load`: a model by folder, file or known name, with its tokenizer and identity. Never uses the network."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from calib.identity import ModelIdentity
from oscar_jax import download
from oscar_jax.models import hf
from oscar_jax.models.checkpoint import compute_dtype
from oscar_jax.models.config import ModelConfig
from oscar_jax.models.decoder import Decoder


@dataclasses.dataclass(frozen=True)
class LoadedModel:
    """A decoder ready to run, and what belongs to it. `tokenizer` is transformers' object, or None."""

    decoder: Decoder
    config: ModelConfig
    tokenizer: Any
    identity: ModelIdentity

    @classmethod
    def build(cls, decoder: Decoder, tokenizer: Any, model_id: str) -> LoadedModel:
        """Collects the parts and works out the identity."""
        config = decoder.config
        identity = ModelIdentity(model_id, config.architecture, config.config_hash(), tokenizer_hash(tokenizer))
        return cls(decoder, config, tokenizer, identity)


def load(
    source: str | Path,
    *,
    dtype: Any = jnp.float32,
    max_position: int | None = None,
    mesh: jax.sharding.Mesh | None = None,
) -> LoadedModel:
    """Loads a Llama, Qwen2, Qwen3 or Gemma 3 (text) model.

    Args:
        source: a Hugging Face directory, a `.gguf` file, a folder that holds one, or the name of a model that
            `oscar-jax download` has fetched.
        dtype: of weights and computation: float32, bfloat16, float16, or float64 (within `jax.enable_x64(True)`).
        max_position: tokens to make rotary tables for; None means the model's context, more is refused.
        mesh: of `sharding.make_mesh`, whose devices get their parts of the weights; None for one device.

    Raises:
        ValueError: nothing there, an unknown architecture, weights that do not fit, or `max_position` too large.
        NotImplementedError: a feature of the model that the decoder does not have; the sentence names it.
    """
    compute_dtype(dtype)
    path = _resolve(source)
    if path.is_dir():
        config = hf.read_config(path, max_position=max_position)
        decoder = hf.read_decoder(path, config, dtype=dtype, mesh=mesh)
        return LoadedModel.build(decoder, hf.read_tokenizer(path), path.resolve().name)
    from oscar_jax.models.gguf import GgufModel  # its reader is needed for GGUF files only

    model = GgufModel(path)
    decoder = model.decoder(model.config(max_position=max_position), dtype=dtype, mesh=mesh)
    return LoadedModel.build(decoder, model.tokenizer(), model.name)


def tokenizer_hash(tokenizer: Any) -> str | None:
    """SHA-256 of the canonical JSON of a fast tokenizer, without its momentary truncation and padding."""
    if tokenizer is None:
        return None
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    del state["truncation"], state["padding"]
    return hashlib.sha256(json.dumps(state, sort_keys=True).encode()).hexdigest()


def _resolve(source: str | Path) -> Path:
    """The directory or GGUF file that `source` means."""
    path = Path(source).expanduser()
    if path.is_dir() and not (path / "config.json").is_file():
        files = sorted(path.glob("*.gguf"))
        if len(files) != 1:
            raise ValueError(
                f"source={str(source)!r} is a folder with neither a config.json nor exactly one .gguf file: expected a "
                "Hugging Face model directory or a GGUF file."
            )
        return files[0]
    if path.exists():
        return path
    if isinstance(source, str) and source in download.ASSETS:
        if not download.ASSETS[source].member.endswith(".gguf"):
            raise ValueError(f"source={source!r} is a text and no model: expected for example 'smollm2-135m'.")
        found = download.find(source)
        if found is None:
            raise ValueError(f"source={source!r} is not downloaded yet: run `oscar-jax download {source}`.")
        return found
    raise ValueError(
        f"source={str(source)!r} does not exist: expected a Hugging Face model directory, a .gguf file, or a known "
        "name such as 'smollm2-135m'."
    )
