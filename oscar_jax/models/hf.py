"""Hugging Face directories: config.json, safetensors in one file or in shards, tokenizer files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp  # noqa: F401  (registers bfloat16 with numpy, which safetensors needs to return such tensors)
import numpy as np
from safetensors import SafetensorError, safe_open

from oscar_jax.models.checkpoint import StoredTensor, assemble
from oscar_jax.models.config import ModelConfig, check_architecture, check_size, checked_max_position, positive_number
from oscar_jax.models.decoder import Decoder
from oscar_jax.models.rope_scaling import rotary_from_parameters

NAMES = {
    "embedding": "model.embed_tokens.weight",
    "layers.attention_norm": "model.layers.{layer}.input_layernorm.weight",
    "layers.query": "model.layers.{layer}.self_attn.q_proj.weight",
    "layers.query_bias": "model.layers.{layer}.self_attn.q_proj.bias",
    "layers.query_norm": "model.layers.{layer}.self_attn.q_norm.weight",
    "layers.key": "model.layers.{layer}.self_attn.k_proj.weight",
    "layers.key_bias": "model.layers.{layer}.self_attn.k_proj.bias",
    "layers.key_norm": "model.layers.{layer}.self_attn.k_norm.weight",
    "layers.value": "model.layers.{layer}.self_attn.v_proj.weight",
    "layers.value_bias": "model.layers.{layer}.self_attn.v_proj.bias",
    "layers.output": "model.layers.{layer}.self_attn.o_proj.weight",
    "layers.output_bias": "model.layers.{layer}.self_attn.o_proj.bias",
    "layers.mlp_norm": "model.layers.{layer}.post_attention_layernorm.weight",
    "layers.gate": "model.layers.{layer}.mlp.gate_proj.weight",
    "layers.up": "model.layers.{layer}.mlp.up_proj.weight",
    "layers.down": "model.layers.{layer}.mlp.down_proj.weight",
    "final_norm": "model.norm.weight",
    "head": "lm_head.weight",
}
# Old checkpoints store the rotary frequencies, which the configuration gives.
_GEMMA_NAMES = NAMES | {
    "layers.attention_post_norm": "model.layers.{layer}.post_attention_layernorm.weight",
    "layers.mlp_norm": "model.layers.{layer}.pre_feedforward_layernorm.weight",
    "layers.mlp_post_norm": "model.layers.{layer}.post_feedforward_layernorm.weight",
}
_BUFFERS = r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq"
_SIZES = {  # and the fields of `ModelConfig`
    "vocab_size": "vocab_size",
    "num_hidden_layers": "layers",
    "hidden_size": "hidden_size",
    "intermediate_size": "mlp_size",
    "num_attention_heads": "q_heads",
    "num_key_value_heads": "kv_heads",
    "head_dim": "head_dim",
    "max_position_embeddings": "context",
}
_OPTIONAL = ("num_key_value_heads", "head_dim")
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")
_INDEX = "model.safetensors.index.json"


def read_config(folder: Path, *, max_position: int | None = None) -> ModelConfig:
    """The configuration of a directory, with the defaults that transformers gives to what config.json leaves out."""
    path = folder / "config.json"
    if not path.is_file():
        raise ValueError(f"source={str(folder)!r} has no config.json: expected a Hugging Face model directory.")
    content = _read_json(path)
    check_architecture(_architecture(content.get("model_type")))
    # transformers fills in what is absent, and makes lists of as many entries as there are layers.
    _check_sizes({name: value for name, value in content.items() if value is not None})
    from transformers import AutoConfig  # heavy: only where a model is really loaded

    try:
        raw = AutoConfig.from_pretrained(folder, local_files_only=True).to_dict()
    except Exception as error:  # of many classes, some of them the hub library's own
        raise ValueError(f"{path}: transformers refuses it ({_one_line(error)}); fetch or correct the file.") from error
    return config_from_dict(raw, max_position=max_position)


def config_from_dict(raw: Mapping[str, Any], *, max_position: int | None = None) -> ModelConfig:
    """`ModelConfig` of a Llama, Qwen2, Qwen3 or Gemma 3 text configuration in transformers' names.

    Args:
        raw: all fields; rotary parameters as `rope_parameters`, or as `rope_theta` and `rope_scaling`.
        max_position: rows of the rotary tables; None means `max_position_embeddings`.

    Raises:
        ValueError: another architecture, a number that makes no sense, or `max_position` beyond the model's context.
        NotImplementedError: a feature that the decoder does not have.
    """
    kind = _architecture(raw["model_type"])
    check_architecture(kind)
    _refuse_features(raw)
    _check_sizes({name: raw.get(name) for name in _SIZES if name not in _OPTIONAL or raw.get(name) is not None})
    context = raw["max_position_embeddings"]
    max_position = checked_max_position(max_position, context)
    head_dim = raw.get("head_dim") or raw["hidden_size"] // raw["num_attention_heads"]
    check_size("head_dim", head_dim, "head_dim")
    sizes = {"head_dim": head_dim, "context": context, "max_position": max_position}
    gemma = kind == "gemma3"
    parameters = _rotary_parameters(raw, "full_attention" if gemma else None)
    rotary, attention_factor = rotary_from_parameters(parameters, **sizes)
    local_rotary = None
    if gemma:
        local_rotary, _ = rotary_from_parameters(_rotary_parameters(raw, "sliding_attention"), **sizes)
    return ModelConfig(
        architecture=kind,
        vocab_size=raw["vocab_size"],
        layers=raw["num_hidden_layers"],
        hidden_size=raw["hidden_size"],
        mlp_size=raw["intermediate_size"],
        q_heads=raw["num_attention_heads"],
        kv_heads=raw.get("num_key_value_heads") or raw["num_attention_heads"],
        head_dim=head_dim,
        norm_eps=positive_number("rms_norm_eps", raw.get("rms_norm_eps")),
        rotary=rotary,
        max_position=max_position,
        attention_factor=attention_factor,
        tied_embeddings=bool(raw.get("tie_word_embeddings")),
        qkv_bias=kind == "qwen2" or bool(raw.get("attention_bias")),
        output_bias=kind != "qwen2" and bool(raw.get("attention_bias")),
        qk_norm=kind in ("qwen3", "gemma3"),
        windows=_windows(raw),
        local_rotary=local_rotary,
        query_scale=positive_number("query_pre_attn_scalar", raw["query_pre_attn_scalar"]) ** -0.5
        if raw.get("query_pre_attn_scalar", head_dim) != head_dim
        else None,
        embedding_scale=raw["hidden_size"] ** 0.5 if gemma else 1.0,
        activation="gelu_tanh" if gemma else "silu",
        post_norms=gemma,
    )


def read_decoder(folder: Path, config: ModelConfig, *, dtype: object, mesh: jax.sharding.Mesh | None = None) -> Decoder:
    """Reads all weights of a directory, or on a mesh those parts that this process's devices hold.

    Raises:
        ValueError: no safetensors, a shard that the index names is not there, a truncated or damaged file, or tensors
            that do not fit.
    """
    tensors: dict[str, StoredTensor] = {}
    for path in _weight_files(folder):
        try:
            with safe_open(path, framework="np") as file:
                for key in file.keys():  # noqa: SIM118  (not a mapping)
                    tensors[key] = StoredTensor(
                        tuple(file.get_slice(key).get_shape()), _reader(path, key, _offset(config, key))
                    )
        except SafetensorError as error:
            raise ValueError(f"{path}: truncated or damaged ({_one_line(error)}); fetch the file again.") from error
    ignored = _BUFFERS + ("|" + NAMES["head"] if config.tied_embeddings else "")
    names = _GEMMA_NAMES if config.post_norms else NAMES
    return assemble(config, tensors, names, source=str(folder), dtype=dtype, ignored=ignored, mesh=mesh)


def read_tokenizer(folder: Path) -> Any:
    """transformers' tokenizer of a directory, or None where it has no tokenizer files.

    Raises:
        ValueError: files that are damaged, or that transformers makes no tokenizer of.
    """
    paths = [folder / name for name in _TOKENIZER_FILES if (folder / name).is_file()]
    if not paths:
        return None
    for path in paths:
        if path.suffix == ".json":
            _read_json(path)  # names the damaged one, which transformers does not
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # of many classes, the tokenizer library's being plain `Exception`
        names = ", ".join(str(path) for path in paths)
        raise ValueError(f"{names}: no tokenizer can be made of it ({_one_line(error)}); fetch it again.") from error


def _check_sizes(raw: Mapping[str, Any]) -> None:
    for name, field in _SIZES.items():
        if name in raw:
            check_size(name, raw[name], field)


def _architecture(model_type: Any) -> Any:
    """`ModelConfig.architecture` of a model type; Gemma 3 with images has another type than its text part alone."""
    names = {"gemma3_text": "gemma3", "gemma3": "gemma3 with images"}
    return names.get(model_type, model_type) if isinstance(model_type, str) else model_type


def _refuse_features(raw: Mapping[str, Any]) -> None:
    gemma = raw["model_type"] == "gemma3_text"
    name, known = ("hidden_activation", ("gelu_pytorch_tanh",)) if gemma else ("hidden_act", ("silu", "swish"))
    if raw.get(name) not in known:
        raise NotImplementedError(f"{name}={raw.get(name)!r} is not supported: expected {known[0]!r}.")
    for name in ("attn_logit_softcapping", "final_logit_softcapping", "use_bidirectional_attention"):
        if raw.get(name):
            raise NotImplementedError(f"{name}={raw[name]!r} is not supported: expected a model without.")
    if raw.get("mlp_bias"):
        raise NotImplementedError("mlp_bias=True is not supported: expected a model without biases in its MLP.")
    if raw.get("quantization_config"):
        method = raw["quantization_config"].get("quant_method", "unknown")
        raise NotImplementedError(
            f"quantization_config ({method}) is not supported: use the model's bfloat16 weights, or a GGUF file."
        )


def _rotary_parameters(raw: Mapping[str, Any], layer_type: str | None = None) -> dict[str, Any]:
    parameters = dict(raw.get("rope_parameters") or raw.get("rope_scaling") or {})
    if layer_type is not None:
        return dict(parameters[layer_type])
    for name in ("rope_theta", "partial_rotary_factor", "original_max_position_embeddings"):
        if parameters.get(name) is None and raw.get(name) is not None:
            parameters[name] = raw[name]
    return parameters


def _windows(raw: Mapping[str, Any]) -> tuple[int | None, ...]:
    if not raw.get("use_sliding_window", raw["model_type"] == "gemma3_text") or not raw.get("sliding_window"):
        return ()
    layers = range(raw["num_hidden_layers"])
    check_size("sliding_window", raw["sliding_window"])
    kinds = raw.get("layer_types")
    if kinds is None:
        sliding = [layer >= raw["max_window_layers"] for layer in layers]
    elif len(kinds) != len(layers):
        raise ValueError(f"layer_types has {len(kinds)} entries: expected one for each of {len(layers)} layers.")
    else:
        sliding = [kinds[layer] == "sliding_attention" for layer in layers]
    return tuple(raw["sliding_window"] if slides else None for slides in sliding)


def _weight_files(folder: Path) -> list[Path]:
    if (folder / _INDEX).is_file():
        shards = _read_json(folder / _INDEX).get("weight_map")
        if not isinstance(shards, dict):
            raise ValueError(f"{folder / _INDEX}: has no weight_map, expected one; fetch the file again.")
        paths = [folder / name for name in sorted(set(shards.values()))]
        absent = [path.name for path in paths if not path.is_file()]
        if absent:
            raise ValueError(
                f"source={str(folder)!r} lacks {', '.join(absent)}, which {_INDEX} names: copy the missing shards."
            )
        return paths
    if (folder / "model.safetensors").is_file():
        return [folder / "model.safetensors"]
    raise ValueError(
        f"source={str(folder)!r} has neither model.safetensors nor {_INDEX}: convert the weights to safetensors."
    )


def _offset(config: ModelConfig, key: str) -> int:
    """What is added to a tensor: Gemma's norms multiply by one more than is stored."""
    return int(config.architecture == "gemma3" and key.endswith("norm.weight"))


def _reader(path: Path, key: str, offset: int):
    def read(index: tuple[slice, ...]) -> np.ndarray:
        with safe_open(path, framework="np") as file:
            x = file.get_slice(key)[index]
            return x.astype(np.float32) + offset if offset else x

    return read


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:  # not JSON, or not UTF-8
        raise ValueError(f"{path}: is not JSON ({error}); fetch the file again.") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path}: holds a {type(content).__name__}, expected a JSON object; fetch the file again.")
    return content


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200].rstrip(".") or type(error).__name__
