"""Loading: logits equal transformers' on saved random models, every fault named, identity."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import transformers

from oscar_jax import download, models
from oscar_jax.models.gguf_tokenizer import tokenizer_from_metadata
from oscar_jax.models.hf import config_from_dict
from oscar_jax.models.rope_scaling import rotary_from_parameters
from oscar_jax.sharding import make_mesh
from tests import tiny_model

_SIZES = {
    "vocab_size": 130,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
_CASES = {
    "llama-llama3-tied": ("Llama", {"rope_parameters": _LLAMA3, "tie_word_embeddings": True}),
    "llama-untied-biased": ("Llama", {"tie_word_embeddings": False, "attention_bias": True}),
    "llama-linear": ("Llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.5}}),
    "llama-yarn": ("Llama", {"rope_parameters": _YARN}),
    "qwen2-bias": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen2-sliding": ("Qwen2", {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}),
    "qwen2-yarn-mscale": ("Qwen2", {"rope_parameters": _YARN | {"mscale": 0.7, "mscale_all_dim": 0.9}}),
    "gemma3": (
        "Gemma3",
        {"head_dim": 16, "query_pre_attn_scalar": 20, "sliding_window": 9, "num_hidden_layers": 7},
    ),
    "qwen3-head-dim": ("Qwen3", {"head_dim": 16, "tie_word_embeddings": False}),
}


def _torch():
    return pytest.importorskip("torch", reason="torch is not installed: nothing to compare with")


def _reference(family: str, **changes):
    """A random transformers model with norms, biases and query-key norms away from their initial ones and zeros."""
    torch = _torch()
    torch.manual_seed(0)
    config_class = getattr(transformers, f"{family}TextConfig" if family == "Gemma3" else f"{family}Config")
    config = config_class(**(_SIZES | changes), initializer_range=0.15)
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("bias", "norm.weight", "layernorm.weight")):
                parameter.add_(0.3 * torch.randn_like(parameter))
    return model


def _logits(model: models.LoadedModel, tokens: np.ndarray) -> np.ndarray:
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    hidden, _, _ = model.decoder(jnp.asarray(tokens), positions, models.plain_attention(model.config), None)
    return np.asarray(model.decoder.logits(hidden))


def _reference_logits(model, tokens: np.ndarray) -> np.ndarray:
    torch = _torch()
    with torch.no_grad():
        return model(torch.from_numpy(tokens)).logits.float().numpy()


def _assert_same_logits(folder: Path, reference, length: int = 96) -> models.LoadedModel:
    tokens = np.random.default_rng(0).integers(0, _SIZES["vocab_size"], (2, length))
    loaded = models.load(folder)
    expected = _reference_logits(reference, tokens)
    assert np.std(expected) > 0.3  # a model whose logits are nearly constant would agree with anything
    np.testing.assert_allclose(_logits(loaded, tokens), expected, rtol=0, atol=1e-3)
    return loaded


@pytest.mark.parametrize("case", _CASES)
def test_logits_equal_transformers(case, tmp_path):
    family, changes = _CASES[case]
    reference = _reference(family, **changes)
    reference.save_pretrained(tmp_path)
    loaded = _assert_same_logits(tmp_path, reference)
    assert loaded.config.architecture == family.lower()
    assert loaded.tokenizer is None
    assert loaded.identity.tokenizer_hash is None
    assert loaded.identity.config_hash == loaded.config.config_hash()


def test_sharded_checkpoint_and_missing_shard(tmp_path):
    reference = _reference("Qwen3", head_dim=16)
    reference.save_pretrained(tmp_path, max_shard_size="40KB")
    shards = sorted(tmp_path.glob("model-*.safetensors"))
    assert len(shards) > 2
    _assert_same_logits(tmp_path, reference)
    shards[1].unlink()
    with pytest.raises(ValueError, match=rf"lacks {shards[1].name}, which model.safetensors.index.json names"):
        models.load(tmp_path)


def test_bfloat16_checkpoint_is_widened_exactly(tmp_path):
    reference = _reference("Llama").to(_torch().bfloat16)
    reference.save_pretrained(tmp_path)
    query = models.load(tmp_path).decoder.layers.query[1]
    expected = reference.model.layers[1].self_attn.q_proj.weight.detach().float().numpy().T
    np.testing.assert_array_equal(query, expected)


def test_all_missing_unknown_and_misshapen_tensors_are_in_one_error(tmp_path):
    from safetensors.numpy import load_file, save_file

    _reference("Llama", tie_word_embeddings=False).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.norm.weight"], tensors["model.layers.1.mlp.up_proj.weight"]
    tensors["model.layers.0.self_attn.q_norm.weight"] = np.ones(8, np.float32)
    tensors["model.layers.2.mlp.up_proj.weight"] = np.ones((80, 48), np.float32)
    tensors["lm_head.weight"] = np.ones((131, 48), np.float32)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match="do not fit its configuration") as caught:
        models.load(tmp_path)
    message = str(caught.value)
    assert "2 missing: model.layers.1.mlp.up_proj.weight, model.norm.weight" in message
    assert "2 unknown: model.layers.0.self_attn.q_norm.weight, model.layers.2.mlp.up_proj.weight" in message
    assert "1 of the wrong shape: lm_head.weight [131, 48] instead of [130, 48]" in message


def test_tied_model_may_store_its_head_and_old_buffers(tmp_path):
    from safetensors.numpy import load_file, save_file

    reference = _reference("Llama", tie_word_embeddings=True)
    reference.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(4, np.float32)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    _assert_same_logits(tmp_path, reference, length=8)


def _config_json(folder: Path, **changes) -> None:
    raw = transformers.LlamaConfig(**_SIZES).to_dict() | changes
    (folder / "config.json").write_text(json.dumps(raw))


@pytest.mark.parametrize(
    ("changes", "kind", "message"),
    [
        (
            {"model_type": "mixtral"},
            ValueError,
            "architecture 'mixtral' is not supported: expected one of llama, qwen2",
        ),
        ({"model_type": None}, ValueError, "architecture None is not supported"),
        ({"model_type": ["llama"]}, ValueError, r"architecture \['llama'\] is not supported"),
        ({"model_type": "gemma3"}, ValueError, "architecture 'gemma3 with images' is not supported"),
        ({"hidden_act": "gelu"}, NotImplementedError, "hidden_act='gelu' is not supported: expected 'silu'"),
        ({"mlp_bias": True}, NotImplementedError, "mlp_bias=True is not supported"),
        ({"quantization_config": {"quant_method": "awq"}}, NotImplementedError, r"quantization_config \(awq\)"),
        (
            {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
            NotImplementedError,
            "rope_type 'dynamic' .NTK frequencies that change with the length. is not supported",
        ),
        (
            {"rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1e4}},
            NotImplementedError,
            "rope_type 'mrope' .multi-axis rotary positions. is not supported",
        ),
    ],
)
def test_unsupported_models_are_refused_by_name(changes, kind, message, tmp_path):
    _config_json(tmp_path, **changes)
    with pytest.raises(kind, match=message) as caught:
        models.load(tmp_path)
    assert str(caught.value).count(". ") == 0  # one sentence


_LINEAR = {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rope_parameters": _LINEAR | {"factor": 0}}, "^factor=0: expected a finite number above 0"),
        ({"rope_parameters": _LINEAR | {"factor": "x"}}, "^factor='x': expected a finite number"),
        ({"rope_parameters": _LINEAR | {"rope_theta": 0}}, "^rope_theta=0: expected a finite number above 1"),
        ({"rope_parameters": {}, "rope_theta": 0}, "^rope_theta=0(.0)?: expected a finite number above 1"),
        ({"rope_parameters": _LINEAR | {"rope_theta": 10**400}}, "^rope_theta=10+: expected a finite number above 1"),
        ({"rope_parameters": _LINEAR | {"partial_rotary_factor": 1e9}}, "^partial_rotary_factor=1000000000.0: exp"),
        ({"rope_parameters": _LLAMA3 | {"low_freq_factor": 4}}, "^low_freq_factor=4: expected less than high_freq_fa"),
        ({"rope_parameters": _YARN | {"beta_slow": -1}}, "^beta_slow=-1: expected a finite number above 0"),
        ({"num_hidden_layers": 10**9}, "^num_hidden_layers=1000000000: expected a whole number from 1 to 10000"),
        ({"num_hidden_layers": 1e9}, "^num_hidden_layers=1000000000.0: expected a whole number"),
        ({"head_dim": 10**9}, "^head_dim=1000000000: expected a whole number from 1 to 65536"),
        ({"max_position_embeddings": 10**9}, "^max_position=1000000000: expected a whole number from 1 to 16777216"),
        ({"head_dim": None, "hidden_size": 1 << 30}, "^head_dim=268435456: expected a whole number from 1 to 65536"),
        ({"num_attention_heads": 0}, "^num_attention_heads=0: expected a whole number from 1"),
        ({"num_attention_heads": -2}, "^num_attention_heads=-2: expected a whole number from 1"),
        ({"rms_norm_eps": -1.0}, "^rms_norm_eps=-1.0: expected a finite number above 0"),
        (
            {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": -3, "max_window_layers": 0},
            "^sliding_window=-3: expected a whole number from 1",
        ),
        ({"model_type": "qwen2", "num_hidden_layers": 10**9}, "^num_hidden_layers=1000000000: expected"),
    ],
)
def test_numbers_that_make_no_sense_are_named_at_once(changes, message, tmp_path):
    path = tiny_model.write(tmp_path) / "config.json"
    path.write_text(json.dumps(tiny_model.CONFIG | changes))
    with pytest.raises(ValueError, match=message) as caught:
        models.load(tmp_path)
    assert "\n" not in str(caught.value)


def test_missing_sources_say_what_is_expected(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match=r"does not exist: expected a Hugging Face model directory, a \.gguf file"):
        models.load(tmp_path / "nowhere")
    with pytest.raises(ValueError, match=r"a folder with neither a config\.json nor exactly one \.gguf file"):
        models.load(tmp_path)
    _config_json(tmp_path)
    with pytest.raises(ValueError, match=r"has neither model\.safetensors nor model\.safetensors\.index\.json"):
        models.load(tmp_path)
    monkeypatch.setenv("OSCAR_JAX_CACHE", str(tmp_path / "empty"))
    with pytest.raises(ValueError, match="is not downloaded yet: run `oscar-jax download smollm2-135m`"):
        models.load("smollm2-135m")
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUX" + bytes(60))
    with pytest.raises(ValueError, match="is no GGUF file"):
        models.load(broken)
    with pytest.raises(ValueError, match="source='wiki-summaries' is a text and no model"):
        models.load("wiki-summaries")


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("model.safetensors", b"", "truncated or damaged"),
        ("model.safetensors", 100, "truncated or damaged"),
        ("model.safetensors", -100, "truncated or damaged"),
        ("config.json", b"[1]", "holds a list, expected a JSON object"),
        ("config.json", 20, "is not JSON"),
        ("config.json", b"[" * 200_000, "is not JSON"),
        ("config.json", b"\xff\x00\x13", "is not JSON"),
        ("tokenizer.json", 200, "is not JSON"),
        ("tokenizer.json", b'{"a": 1}', "no tokenizer can be made of it"),
        ("tokenizer_config.json", b"\xff", "is not JSON"),
    ],
)
def test_damaged_files_are_named(file, content, message, tmp_path):
    """`content` replaces the file's; a number is where it is cut."""
    path = tiny_model.write(tmp_path) / file
    path.write_bytes(path.read_bytes()[:content] if isinstance(content, int) else content)
    with pytest.raises(ValueError, match=message) as caught:
        models.load(tmp_path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_configuration_that_transformers_refuses_is_named(tmp_path):
    tiny_model.write(tmp_path, head_dim=17)
    with pytest.raises(ValueError, match=r"config\.json: transformers refuses it .*head_dim.*=17") as caught:
        models.load(tmp_path)
    assert "\n" not in str(caught.value)


def test_an_index_without_a_weight_map_is_named(tmp_path):
    tiny_model.write(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(ValueError, match=r"model\.safetensors\.index\.json: has no weight_map"):
        models.load(tmp_path)


@pytest.mark.parametrize("share", [0.0001, 0.001, 0.01, 0.5, 0.999])
def test_a_truncated_gguf_is_named(share, tmp_path):
    path = tmp_path / "model.gguf"
    _small_gguf(path, _reference("Llama"))
    whole = path.read_bytes()
    path.write_bytes(whole[: 4 + int(share * len(whole))])
    with pytest.raises(ValueError, match=r"model\.gguf' is truncated or damaged, or of an unknown GGUF version"):
        models.load(path)


def test_max_position_bounds_the_tables_and_not_the_hash(tmp_path):
    _reference("Llama").save_pretrained(tmp_path)
    short, full = models.load(tmp_path, max_position=32), models.load(tmp_path)
    assert short.decoder.cos[...].shape == (32, 4)
    assert full.decoder.cos[...].shape == (256, 4)
    assert short.identity == full.identity
    with pytest.raises(ValueError, match="max_position=257: expected 1 to 256, the context of the model"):
        models.load(tmp_path, max_position=257)


def test_tokenizer_comes_along_and_is_hashed(tmp_path):
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    _reference("Llama").save_pretrained(tmp_path)
    hashes = []
    for vocab in ({"a": 0, "b": 1}, {"a": 1, "b": 0}):
        fast = transformers.PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel(vocab, unk_token="a")))
        fast.save_pretrained(tmp_path)
        loaded = models.load(tmp_path)
        assert loaded.tokenizer.convert_tokens_to_ids("b") == vocab["b"]
        hashes.append(loaded.identity.tokenizer_hash)
        loaded.tokenizer("a", truncation=True, max_length=1)
        assert models.LoadedModel.build(loaded.decoder, loaded.tokenizer, "x").identity.tokenizer_hash == hashes[-1]
    assert hashes[0] != hashes[1]


@pytest.mark.parametrize("max_position", [64, 256])
def test_longrope_uses_the_long_factors_beyond_the_original_context(max_position):
    factors = {"short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [2.0, 3.0, 4.0, 5.0]}
    parameters = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 64, **factors}
    _torch()  # transformers computes its frequencies with it
    config = transformers.LlamaConfig(**(_SIZES | {"rope_parameters": parameters, "head_dim": 8}))
    expected, factor = transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS["longrope"](config, seq_len=max_position)
    rotary, attention_factor = rotary_from_parameters(parameters, head_dim=8, context=256, max_position=max_position)
    np.testing.assert_allclose(rotary.inverse_frequencies, expected.numpy(), rtol=1e-6)
    assert attention_factor == pytest.approx(factor)


def test_partial_rotary_and_old_spelling_of_the_parameters():
    raw = transformers.LlamaConfig(**_SIZES).to_dict()
    del raw["rope_parameters"]
    raw |= {"rope_theta": 1e4, "rope_scaling": {"type": "linear", "factor": 2.0}, "partial_rotary_factor": 0.5}
    rotary = config_from_dict(raw).rotary
    assert rotary.rotary_dim == 4
    np.testing.assert_allclose(rotary.inverse_frequencies, [0.5, 0.005])


def _small_gguf(path: Path, reference, **metadata: object) -> None:
    """Writes a transformers model as llama.cpp's converter would: q and k rows reordered in a llama model."""
    gguf = pytest.importorskip("gguf")
    architecture = {"gemma3_text": "gemma3"}.get(reference.config.model_type, reference.config.model_type)
    writer = gguf.GGUFWriter(path, architecture)
    config = reference.config
    writer.add_context_length(config.max_position_embeddings)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    gemma = architecture == "gemma3"
    rope_parameters = config.rope_parameters["full_attention"] if gemma else config.rope_parameters
    writer.add_rope_freq_base(rope_parameters["rope_theta"])
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    for key, value in metadata.items():
        add = {str: writer.add_string, int: writer.add_uint32, float: writer.add_float32}[type(value)]
        add(f"{architecture}.{key.replace('__', '.')}", value)
    from oscar_jax.models import gguf as ours
    from oscar_jax.models import hf

    names = hf._GEMMA_NAMES if gemma else hf.NAMES
    theirs = {pattern: ours.NAMES[name] for name, pattern in names.items()}
    for key, tensor in reference.state_dict().items():
        if key == "lm_head.weight" and config.tie_word_embeddings:
            continue
        parts = key.split(".")
        layer = next((part for part in parts if part.isdigit()), None)
        name = theirs[".".join("{layer}" if part == layer else part for part in parts)].format(layer=layer)
        x = tensor.float().numpy()
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(parts[-2])
        if architecture == "llama" and heads:
            x = x.reshape(heads, 2, -1, *x.shape[1:]).swapaxes(1, 2).reshape(x.shape)
        writer.add_tensor(name, np.ascontiguousarray(x + (gemma and key.endswith("norm.weight"))))
    if rope_parameters["rope_type"] == "llama3":
        plain = 1 / rope_parameters["rope_theta"] ** (np.arange(0, head_dim, 2) / head_dim)
        scaled = transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS["llama3"](config)[0].numpy()
        writer.add_tensor("rope_freqs.weight", (plain / scaled).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize(
    ("family", "changes", "metadata"),
    [
        ("Llama", {"rope_parameters": _LLAMA3, "tie_word_embeddings": True}, {}),
        ("Llama", {"attention_bias": True, "head_dim": 12}, {}),
        (
            "Qwen2",
            {"rope_parameters": _YARN},
            {
                "rope__scaling__type": "yarn",
                "rope__scaling__factor": 4.0,
                "rope__scaling__original_context_length": 64,
            },
        ),
        ("Qwen3", {"head_dim": 16}, {}),
        (
            "Gemma3",
            {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 9, "num_hidden_layers": 7},
            {"attention__sliding_window": 9},
        ),
    ],
)
def test_gguf_logits_equal_transformers(family, changes, metadata, tmp_path):
    reference = _reference(family, **changes)
    _small_gguf(tmp_path / "model.gguf", reference, **metadata)
    _assert_same_logits(tmp_path / "model.gguf", reference)


@pytest.mark.parametrize("family", ["Llama", "Gemma3"])
def test_gguf_and_directory_of_one_model_have_one_config_hash(family, tmp_path):
    gemma = family == "Gemma3"
    options = {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 9} if gemma else {}
    reference = _reference(family, **options)
    reference.save_pretrained(tmp_path / "folder")
    _small_gguf(tmp_path / "model.gguf", reference, **({"attention__sliding_window": 9} if gemma else {}))
    hashes = {models.load(tmp_path / name).identity.config_hash for name in ("folder", "model.gguf")}
    assert len(hashes) == 1


@pytest.mark.parametrize("name", ["folder", "model.gguf"])
def test_a_mesh_gets_the_weights_of_one_device(name, tmp_path):
    reference = _reference("Llama", attention_bias=True)
    reference.save_pretrained(tmp_path / "folder")
    _small_gguf(tmp_path / "model.gguf", reference)
    expected = models.load(tmp_path / name).decoder
    decoder = models.load(tmp_path / name, mesh=make_mesh(data=2, tensor=2)).decoder
    for got, leaf in zip(jax.tree.leaves(decoder), jax.tree.leaves(expected), strict=True):
        assert len(got.sharding.device_set) == 4
        np.testing.assert_array_equal(got, leaf)
    sizes = {shard.data.shape for shard in decoder.layers.query[...].addressable_shards}
    assert sizes == {(2, 48, 24)}  # three of six heads of size 8


def test_gguf_features_are_refused_by_name(tmp_path):
    reference = _reference("Llama")
    _small_gguf(tmp_path / "moe.gguf", reference, expert_count=8)
    with pytest.raises(NotImplementedError, match=r"GGUF metadata llama\.expert_count=8 is not supported"):
        models.load(tmp_path / "moe.gguf")
    _small_gguf(tmp_path / "capped.gguf", reference, final_logit_softcapping=30.0)
    with pytest.raises(NotImplementedError, match=r"GGUF metadata llama\.final_logit_softcapping=30\.0 is not supp"):
        models.load(tmp_path / "capped.gguf")
    _small_gguf(tmp_path / "longrope.gguf", reference, rope__scaling__type="longrope")
    with pytest.raises(NotImplementedError, match=r"GGUF rope\.scaling\.type 'longrope' is not supported"):
        models.load(tmp_path / "longrope.gguf")
    reference.config.model_type = "gemma2"
    _small_gguf(tmp_path / "gemma.gguf", reference)
    with pytest.raises(ValueError, match="architecture 'gemma2' is not supported: expected one of llama, qwen2, qwen3"):
        models.load(tmp_path / "gemma.gguf")


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"rope__scaling__type": "linear", "rope__scaling__factor": 0.0}, "^factor=0.0: expected a finite number"),
        ({"rope__dimension_count": 0}, "^GGUF metadata llama.rope.dimension_count=0: expected a whole number from 1"),
    ],
)
def test_gguf_numbers_that_make_no_sense_are_named(metadata, message, tmp_path):
    _small_gguf(tmp_path / "model.gguf", _reference("Llama"), **metadata)
    with pytest.raises(ValueError, match=message):
        models.load(tmp_path / "model.gguf")


def _sentence_piece_metadata(**changes: object) -> dict[str, object]:
    """Two letters, what they merge to, runs of newlines, and all bytes; the score says which merge comes first."""
    bytes_ = [f"<0x{value:02X}>" for value in range(256)]
    normal = ["\u2581", "a", "b", "ab", "\u2581a", "\u2581ab", "ba"]
    tokens = ["<unk>", "<bos>", *bytes_, "\n\n", *normal]
    scores = [-1000.0] * 259 + [-9.0, -9.0, -9.0, -2.0, -3.0, -1.0, -4.0]
    types = [3, 3, *[6] * 256, 4, *[1] * 7]
    metadata: dict[str, object] = {"model": "llama", "add_space_prefix": False, "tokens": tokens, "scores": scores}
    metadata |= {"token_type": types, "unknown_token_id": 0, "bos_token_id": 1, "add_bos_token": True}
    return {f"tokenizer.ggml.{key}": value for key, value in (metadata | changes).items()}


def test_sentence_piece_merges_by_score_and_falls_back_to_bytes():
    tokenizer = tokenizer_from_metadata(_sentence_piece_metadata().get)

    def pieces(text: str) -> list[str]:
        return tokenizer.convert_ids_to_tokens(tokenizer(text, add_special_tokens=False)["input_ids"])

    assert pieces("ab ab") == ["ab", "\u2581ab"]  # "ab" before "_a", although the latter stands further left
    assert pieces("bab") == ["b", "ab"]
    assert pieces("a\n\n\na") == ["a", "\n\n", "<0x0A>", "a"]
    assert pieces("\u00e9") == ["<0xC3>", "<0xA9>"]
    assert tokenizer("a")["input_ids"] == [1, 260]
    text = "ab  ba\n\n\u4e2d a "
    assert tokenizer.decode(tokenizer(text)["input_ids"], skip_special_tokens=True) == text
    with pytest.raises(NotImplementedError, match=r"tokenizer\.ggml\.model='llama' is not supported"):
        tokenizer_from_metadata(_sentence_piece_metadata(add_space_prefix=True).get)


_TEXTS = [
    "The capital of France is Paris.",
    "def f(x):\n    return x ** 2 + 1234567.89  # naïve café\n\n\tif x:\n\t\tpass\n",
    "Ünïcödé 中文字符 русский 🎉👩‍👩‍👧 \u00a0\u2003end",
    "<|im_start|>user\nhi<|im_end|>\n<|endoftext|> don't they're I'LL",
    "trailing   spaces   \n\n\n  indented\r\nwindows",
    "",
]


@pytest.fixture(scope="module")
def smollm2() -> models.LoadedModel:
    if download.find("smollm2-135m") is None:
        pytest.skip("smollm2-135m is not downloaded: run `oscar-jax download smollm2-135m`")
    return models.load("smollm2-135m", max_position=2048)


@pytest.mark.slow
def test_smollm2_logits_equal_transformers(smollm2):
    from oscar_jax.models import hf
    from oscar_jax.models.decoder import parameter_shapes

    torch, config, decoder = _torch(), smollm2.config, smollm2.decoder
    assert (config.layers, config.q_heads, config.kv_heads, config.head_dim) == (30, 9, 3, 64)
    reference = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=config.mlp_size,
            num_hidden_layers=config.layers,
            num_attention_heads=config.q_heads,
            num_key_value_heads=config.kv_heads,
            rms_norm_eps=config.norm_eps,
            rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
            tie_word_embeddings=True,
        )
    ).eval()
    state = {}
    for name, kind in parameter_shapes(config).items():
        stacked = decoder
        for part in name.split("."):
            stacked = getattr(stacked, part)
        stacked = np.asarray(stacked[...])
        for layer in range(config.layers) if name.startswith("layers.") else (None,):
            x = stacked if layer is None else stacked[layer]
            state[hf.NAMES[name].format(layer=layer)] = torch.tensor(x.T if kind.matrix else x)
    assert reference.load_state_dict(state, strict=False).unexpected_keys == []
    tokens = np.asarray([smollm2.tokenizer("".join(_TEXTS))["input_ids"]])
    np.testing.assert_allclose(_logits(smollm2, tokens), _reference_logits(reference, tokens), rtol=0, atol=1e-3)
    prompt = np.asarray([smollm2.tokenizer("The capital of France is")["input_ids"]])
    assert smollm2.tokenizer.decode(int(_logits(smollm2, prompt)[0, -1].argmax())) == " Paris"


@pytest.mark.slow
def test_smollm2_tokenizer_equals_transformers_conversion(smollm2):
    _torch()  # transformers reads GGUF files with it
    path = download.find("smollm2-135m")
    assert path is not None
    theirs = transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name, local_files_only=True)
    ours = smollm2.tokenizer
    for text in _TEXTS:
        assert ours(text)["input_ids"] == theirs(text)["input_ids"]
        assert ours.decode(ours(text)["input_ids"]) == text
    messages = [{"role": "user", "content": "What is 2 + 2?"}]
    chat = ours.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert chat == theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    for name in ("bos_token_id", "eos_token_id", "unk_token_id", "pad_token_id"):
        assert getattr(ours, name) == getattr(theirs, name)
    # The original tokenizer splits digits before spaces, and spaces by themselves are then one token.
    assert [ours.decode(i) for i in ours("x =   12")["input_ids"]] == ["x", " =", "   ", "1", "2"]


@pytest.mark.slow
def test_loading_gguf_needs_no_torch(smollm2):
    code = (
        "import sys; sys.modules['torch'] = None; from oscar_jax import models; "
        "print(models.load(sys.argv[1], max_position=64).tokenizer('for 12 naïve  cafés')['input_ids'])"
    )
    path, root = download.find("smollm2-135m"), Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code, str(path)], check=True, cwd=root, capture_output=True, text=True)
    assert json.loads(done.stdout) == smollm2.tokenizer("for 12 naïve  cafés")["input_ids"]
