"""A Hugging Face directory with a tiny random Llama and a byte tokenizer, made without torch."""

import json

import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 257,
    "max_position_embeddings": 768,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "tie_word_embeddings": True,
    "bos_token_id": None,
    "eos_token_id": 256,
}


def write(folder, *, seed=0, **changes):
    """Writes the model; `changes` are fields of its config. One token is one byte."""
    folder.mkdir(parents=True, exist_ok=True)
    config = CONFIG | changes
    rng = np.random.default_rng(seed)
    hidden, mlp, dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    q, k = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim

    def matrix(outputs, inputs):
        return (rng.normal(size=(outputs, inputs)) * 1.5 / np.sqrt(inputs)).astype(np.float32)

    weights = {"model.embed_tokens.weight": matrix(config["vocab_size"], hidden) * 4}
    weights["model.norm.weight"] = np.ones(hidden, np.float32)
    for layer in range(config["num_hidden_layers"]):
        shapes = {
            "self_attn.q_proj": (q, hidden),
            "self_attn.k_proj": (k, hidden),
            "self_attn.v_proj": (k, hidden),
            "self_attn.o_proj": (hidden, q),
            "mlp.gate_proj": (mlp, hidden),
            "mlp.up_proj": (mlp, hidden),
            "mlp.down_proj": (hidden, mlp),
        }
        for name, shape in shapes.items():
            weights[f"model.layers.{layer}.{name}.weight"] = matrix(*shape)
        for name in ("input_layernorm", "post_attention_layernorm"):
            weights[f"model.layers.{layer}.{name}.weight"] = np.ones(hidden, np.float32)
    save_file(weights, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {character: index for index, character in enumerate(alphabet)} | {"<end>": 256}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<end>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<end>", "model_max_length": 768}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def text(words=4000, seed=0):
    """Words drawn by a seed; some repeat often, as in a language."""
    rng = np.random.default_rng(seed)
    lexicon = ["".join(rng.choice(list("abcdefghij"), size=rng.integers(2, 8))) for _ in range(60)]
    return " ".join(rng.choice(lexicon, size=words, p=np.arange(60, 0, -1) / np.arange(61).sum()))
