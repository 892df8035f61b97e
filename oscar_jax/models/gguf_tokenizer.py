"""A transformers fast tokenizer from GGUF metadata, without torch (transformers' own GGUF reader imports it).

Byte-level BPE, and SentencePiece's BPE without a space in front of the text (Gemma). Pre-tokenizers are those of the
models' original tokenizer files. transformers' GGUF conversion falls back to GPT-2's for `smollm`, which differs on
runs of spaces before digits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

_NORMAL, _CONTROL, _USER_DEFINED = 1, 3, 4
_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"  # how SentencePiece writes a space
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS_AND_SPACES = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def _split(digits: str) -> pre_tokenizers.PreTokenizer:
    pattern = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|" + digits + _WORDS_AND_SPACES
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def _gpt2() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False)


def _digits() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2()])


_PRE_TOKENIZERS: dict[str, Callable[[], pre_tokenizers.PreTokenizer]] = {
    "default": _gpt2,
    "gpt-2": _gpt2,
    "smollm": _digits,
    "qwen2": lambda: _split(r"\p{N}"),
    "deepseek-r1-qwen": lambda: _split(r"\p{N}"),
    "llama-bpe": lambda: _split(r"\p{N}{1,3}"),
    "llama3": lambda: _split(r"\p{N}{1,3}"),
}


def tokenizer_from_metadata(get: Callable[[str], Any]) -> Any:
    """The tokenizer of a GGUF file.

    Args:
        get: a metadata value by key, or None.

    Returns:
        `transformers.PreTrainedTokenizerFast` with special tokens and the chat template.

    Raises:
        NotImplementedError: another kind of tokenizer, or an unknown pre-tokenizer.
    """
    from transformers import PreTrainedTokenizerFast

    kind, pre = get("tokenizer.ggml.model"), get("tokenizer.ggml.pre") or "default"
    sentence_piece = kind == "llama" and get("tokenizer.ggml.add_space_prefix") is False
    if kind != "gpt2" and not sentence_piece:
        raise NotImplementedError(
            f"tokenizer.ggml.model={kind!r} is not supported: expected 'gpt2' (byte-level BPE), or 'llama' without "
            "add_space_prefix; use the model's Hugging Face directory."
        )
    if pre not in _PRE_TOKENIZERS:
        raise NotImplementedError(
            f"tokenizer.ggml.pre={pre!r} is not supported: expected one of {', '.join(_PRE_TOKENIZERS)}; use the "
            "model's Hugging Face directory."
        )
    tokens = get("tokenizer.ggml.tokens")
    special = {
        name: tokens[index]
        for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"))
        if (index := get(f"tokenizer.ggml.{key}_token_id")) is not None
    }
    types = get("tokenizer.ggml.token_type") or []
    if sentence_piece:
        backend = _sentence_piece(tokens, get("tokenizer.ggml.scores"), types, special.get("unk"))
    else:
        backend = _backend(tokens, get("tokenizer.ggml.merges"), pre)
    for token_type, is_special in ((_CONTROL, True), (_USER_DEFINED, False)):
        of_type = [t for t, kind in zip(tokens, types, strict=False) if kind == token_type]
        backend.add_tokens([AddedToken(token, normalized=False, special=is_special) for token in of_type])
    add_bos = get("tokenizer.ggml.add_bos_token")
    if "bos" in special and (pre in ("llama-bpe", "llama3") if add_bos is None else add_bos):
        index = get("tokenizer.ggml.bos_token_id")
        backend.post_processor = processors.TemplateProcessing(
            single=[special["bos"], "$A"],
            pair=[special["bos"], "$A", special["bos"], "$B"],
            special_tokens=[(special["bos"], index)],
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        chat_template=get("tokenizer.chat_template"),
        clean_up_tokenization_spaces=False,
        **{f"{name}_token": token for name, token in special.items()},
    )


def _sentence_piece(tokens: list[str], scores: list[float], types: list[int], unknown: str | None) -> Tokenizer:
    """SentencePiece's BPE: two pieces merge if that makes a token, those of the highest score first."""
    vocab = {token: index for index, token in enumerate(tokens)}
    merges: list[tuple[str, str]] = []
    for index in sorted(range(len(tokens)), key=lambda i: -scores[i]):
        token = tokens[index]
        if types[index] == _NORMAL:
            splits = [(token[:i], token[i:]) for i in range(1, len(token))]
            known = [split for split in splits if split[0] in vocab and split[1] in vocab]
            merges += sorted(known, key=lambda split: (vocab[split[0]], vocab[split[1]]))
    backend = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    backend.normalizer = normalizers.Replace(" ", _SPACE)
    backend.decoder = decoders.Sequence([decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()])
    return backend


def _backend(tokens: list[str], merges: list[str], pre: str) -> Tokenizer:
    vocab = {token: index for index, token in enumerate(tokens)}
    pairs = [(left, right) for left, right in (merge.split(" ") for merge in merges)]
    # Llama 3's tokenizer takes a whole word that is in the vocabulary before any merge.
    backend = Tokenizer(models.BPE(vocab=vocab, merges=pairs, ignore_merges=pre in ("llama-bpe", "llama3")))
    if pre in ("qwen2", "deepseek-r1-qwen"):
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = _PRE_TOKENIZERS[pre]()
    backend.decoder = decoders.ByteLevel()
    return backend
