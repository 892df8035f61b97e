"""GGUF files: metadata, dequantized weights, tokenizer.

llama.cpp stores the query and key rows of `llama` models reordered for rotating neighbouring pairs; they are put back,
so that every decoder here rotates pairs (i, i + D/2).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np
from gguf import GGUFReader, dequantize

from oscar_jax.models.checkpoint import StoredTensor, assemble
from oscar_jax.models.config import ModelConfig, check_architecture, check_size, checked_max_position, positive_number
from oscar_jax.models.decoder import Decoder
from oscar_jax.models.gguf_tokenizer import tokenizer_from_metadata
from oscar_jax.models.rope_scaling import rotary_from_parameters
from pallas_kernels.rope import Rotary

NAMES = {
    "embedding": "token_embd.weight",
    "layers.attention_norm": "blk.{layer}.attn_norm.weight",
    "layers.query": "blk.{layer}.attn_q.weight",
    "layers.query_bias": "blk.{layer}.attn_q.bias",
    "layers.query_norm": "blk.{layer}.attn_q_norm.weight",
    "layers.key": "blk.{layer}.attn_k.weight",
    "layers.key_bias": "blk.{layer}.attn_k.bias",
    "layers.key_norm": "blk.{layer}.attn_k_norm.weight",
    "layers.value": "blk.{layer}.attn_v.weight",
    "layers.value_bias": "blk.{layer}.attn_v.bias",
    "layers.output": "blk.{layer}.attn_output.weight",
    "layers.output_bias": "blk.{layer}.attn_output.bias",
    "layers.attention_post_norm": "blk.{layer}.post_attention_norm.weight",
    "layers.mlp_norm": "blk.{layer}.ffn_norm.weight",
    "layers.mlp_post_norm": "blk.{layer}.post_ffw_norm.weight",
    "layers.gate": "blk.{layer}.ffn_gate.weight",
    "layers.up": "blk.{layer}.ffn_up.weight",
    "layers.down": "blk.{layer}.ffn_down.weight",
    "final_norm": "output_norm.weight",
    "head": "output.weight",
}
_MAGIC = b"GGUF"
_FREQUENCY_DIVISORS = "rope_freqs.weight"
_GEMMA_PERIOD, _GEMMA_27B_LAYERS = 6, 62
# Metadata, after the architecture's name, that changes what the model computes in a way the decoder does not have.
_REFUSED = (
    "expert_count",
    "attention.scale",
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "logit_scale",
    "rope.scaling.yarn_ext_factor",
    "rope.scaling.yarn_attn_factor",
    "rope.scaling.yarn_log_multiplier",
    "rope.dimension_sections",
)


class _Reader(GGUFReader):
    """`GGUFReader` over a plain view of its memory map: slicing an `np.memmap` for each token string is slow."""

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value.view(np.ndarray) if name == "data" else value)


class GgufModel:
    """An open GGUF file. Metadata is read at once, tensors when a decoder is made.

    Raises:
        ValueError: not a GGUF file, a truncated or damaged one, one part of a split model, or another architecture.
    """

    def __init__(self, path: Path):
        self.path = path
        with path.open("rb") as file:
            if file.read(len(_MAGIC)) != _MAGIC:
                raise ValueError(f"source={str(path)!r} is no GGUF file: expected one, or a Hugging Face directory.")
        try:
            self._reader = _Reader(path)
        except Exception as error:  # whatever numpy says to sizes and types that make no sense
            raise ValueError(
                f"source={str(path)!r} is truncated or damaged, or of an unknown GGUF version: fetch the file again."
            ) from error
        self._tensors = {tensor.name: tensor for tensor in self._reader.tensors}
        self.architecture = self.get("general.architecture")
        check_architecture(self.architecture)
        if (self.get("split.count") or 1) > 1:
            raise ValueError(
                f"source={str(path)!r} is one part of {self.get('split.count')}: merge it with llama-gguf-split."
            )

    def get(self, key: str) -> Any:
        """A metadata value as Python objects, or None."""
        field = self._reader.fields.get(key)
        return None if field is None else field.contents()

    @property
    def name(self) -> str:
        """The model's name as the file gives it, else the file's own."""
        return self.get("general.name") or self.path.stem

    def config(self, *, max_position: int | None = None) -> ModelConfig:
        """The model's configuration.

        Raises:
            ValueError: metadata is missing, or `max_position` is beyond the model's context.
            NotImplementedError: a feature that the decoder does not have.
        """
        gemma = self.architecture == "gemma3"
        for key in (*_REFUSED, *([] if gemma else ["attention.sliding_window"])):
            if value := self._own(key, None):
                raise NotImplementedError(f"GGUF metadata {self.architecture}.{key}={value} is not supported.")
        context = self._size("context_length")
        max_position = checked_max_position(max_position, context)
        hidden_size, q_heads = self._size("embedding_length"), self._size("attention.head_count")
        head_dim = self._size("attention.key_length", hidden_size // q_heads, field="head_dim")
        if self._own("attention.value_length", head_dim) != head_dim:
            raise NotImplementedError("keys and values of different sizes (latent attention) are not supported.")
        rotary, attention_factor = self._rotary(head_dim, context, max_position)
        layers = self._size("block_count", field="layers")
        if gemma and layers == _GEMMA_27B_LAYERS:
            raise NotImplementedError(
                f"gemma3 with {layers} layers (27B) has a softmax scale that GGUF files do not hold: use the model's "
                "Hugging Face directory."
            )
        return ModelConfig(
            architecture=self.architecture,
            vocab_size=int(self._tensors[NAMES["embedding"]].shape[1]) if NAMES["embedding"] in self._tensors else 1,
            layers=layers,
            hidden_size=hidden_size,
            mlp_size=self._size("feed_forward_length"),
            q_heads=q_heads,
            kv_heads=self._size("attention.head_count_kv", q_heads),
            head_dim=head_dim,
            norm_eps=self._number("attention.layer_norm_rms_epsilon"),
            rotary=rotary,
            max_position=max_position,
            attention_factor=attention_factor,
            tied_embeddings=NAMES["head"] not in self._tensors,
            qkv_bias=self.architecture == "qwen2" or NAMES["layers.query_bias"].format(layer=0) in self._tensors,
            output_bias=NAMES["layers.output_bias"].format(layer=0) in self._tensors,
            qk_norm=self.architecture in ("qwen3", "gemma3"),
            **(self._gemma(layers, hidden_size, head_dim) if gemma else {}),
        )

    def _gemma(self, layers: int, hidden_size: int, head_dim: int) -> dict[str, Any]:
        """What Gemma 3 has beside the others; every sixth layer sees everything, the others a window."""
        window = self._size("attention.sliding_window")
        theta = self._number("rope.freq_base_swa", 10000.0)
        return {
            "windows": tuple(None if (layer + 1) % _GEMMA_PERIOD == 0 else window for layer in range(layers)),
            "local_rotary": Rotary.standard(head_dim, theta),
            "embedding_scale": hidden_size**0.5,
            "activation": "gelu_tanh",
            "post_norms": True,
        }

    def decoder(self, config: ModelConfig, *, dtype: object, mesh: jax.sharding.Mesh | None = None) -> Decoder:
        """Dequantizes all weights; on a mesh a tensor at a time, of which its devices' parts stay.

        Raises:
            ValueError: tensors that do not fit the configuration, all listed.
        """
        tensors = {key: StoredTensor(_shape(t), self._weight_reader(t, config)) for key, t in self._tensors.items()}
        return assemble(
            config, tensors, NAMES, source=str(self.path), dtype=dtype, mesh=mesh,
            ignored=_FREQUENCY_DIVISORS.replace(".", r"\."),
        )  # fmt: skip

    def tokenizer(self) -> Any:
        """A transformers fast tokenizer, or None if the file has none."""
        if self.get("tokenizer.ggml.model") is None:
            return None
        return tokenizer_from_metadata(self.get)

    def _own(self, key: str, *default: Any) -> Any:
        value = self.get(f"{self.architecture}.{key}")
        if value is not None:
            return value
        if default:
            return default[0]
        raise ValueError(f"GGUF metadata {self.architecture}.{key} is missing from {str(self.path)!r}.")

    def _size(self, key: str, *default: int, field: str = "") -> int:
        value = self._own(key, *default)
        check_size(f"GGUF metadata {self.architecture}.{key}", value, field)
        return int(value)

    def _number(self, key: str, *default: float) -> float:
        """The short decimal number that was stored as float32, so that 1e-5 hashes like the 1e-5 of a config.json."""
        value = positive_number(f"GGUF metadata {self.architecture}.{key}", self._own(key, *default))
        return float(np.format_float_scientific(np.float32(value)))

    def _rotary(self, head_dim: int, context: int, max_position: int) -> tuple[Rotary, float]:
        scaling = self._own("rope.scaling.type", "none")
        parameters = {
            "rope_type": "default" if scaling == "none" else scaling,
            "rope_theta": self._number("rope.freq_base", 10000.0),
            "partial_rotary_factor": self._size("rope.dimension_count", head_dim) / head_dim,
            "factor": self._own("rope.scaling.factor", None),
            "original_max_position_embeddings": self._own("rope.scaling.original_context_length", None),
            "beta_fast": self._own("rope.scaling.yarn_beta_fast", None),
            "beta_slow": self._own("rope.scaling.yarn_beta_slow", None),
        }
        if scaling == "longrope":
            raise NotImplementedError(
                "GGUF rope.scaling.type 'longrope' is not supported: use the Hugging Face directory."
            )
        rotary, factor = rotary_from_parameters(
            parameters, head_dim=head_dim, context=context, max_position=max_position
        )
        if _FREQUENCY_DIVISORS in self._tensors:  # llama3 scaling, stored as one divisor for each frequency
            stored = self._tensors[_FREQUENCY_DIVISORS]
            divisors = np.asarray(dequantize(stored.data, stored.tensor_type), np.float64)
            if divisors.size != len(rotary.inverse_frequencies):
                raise ValueError(
                    f"{_FREQUENCY_DIVISORS} has {divisors.size} entries: expected {len(rotary.inverse_frequencies)}."
                )
            frequencies = np.asarray(rotary.inverse_frequencies) / divisors
            rotary = Rotary(tuple(float(f) for f in frequencies), rotary.rotary_dim, "half")
        return rotary, factor

    def _weight_reader(self, tensor: Any, config: ModelConfig):
        shape = _shape(tensor)

        def read(index: tuple[slice, ...]) -> np.ndarray:
            data = tensor.data[index[0]]  # rows, or the only axis; on the other one blocks cannot be cut
            x = dequantize(data, tensor.tensor_type).reshape(len(data), *shape[1:])
            kind = tensor.name.split(".")[-2]
            heads = {"attn_q": config.q_heads, "attn_k": config.kv_heads}.get(kind)
            if self.architecture == "llama" and heads is not None:
                x = _halves_from_pairs(x, heads * len(data) // shape[0])
            return x[(slice(None), *index[1:])]

        return read


def _shape(tensor: Any) -> tuple[int, ...]:
    return tuple(int(size) for size in reversed(tensor.shape))


def _halves_from_pairs(x: np.ndarray, heads: int) -> np.ndarray:
    """Rows (0, 1), (2, 3), ... of each head become rows (0, D/2), (1, D/2 + 1), ..."""
    return x.reshape(heads, -1, 2, *x.shape[1:]).swapaxes(1, 2).reshape(x.shape)
