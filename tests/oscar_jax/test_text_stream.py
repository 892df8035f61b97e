"""Streaming: pieces concatenate to the text, characters stay whole, stop texts never show."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oscar_jax.text_stream import TextStream
from tests.oscar_jax.byte_tokenizer import EOS, byte_tokenizer

TOKENIZER = byte_tokenizer()


def pieces(text: str | list[int], **options) -> tuple[list[str], TextStream]:
    tokens = TOKENIZER(text)["input_ids"] if isinstance(text, str) else text
    stream = TextStream(TOKENIZER, **options)
    found = [stream.push(token) for token in tokens if not stream.stopped]
    return [*found, stream.finish()], stream


def test_emoji_split_across_tokens_appear_whole():
    text = "é 😀👨\u200d👩\u200d👧 ok"
    found, _ = pieces(text)
    assert "".join(found) == text
    assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in found)
    assert [piece for piece in found if piece][:4] == ["é", " ", "😀", "👨"]


@settings(max_examples=60, deadline=None)
@given(st.text(alphabet=st.sampled_from("ab é€😀\n\N{REPLACEMENT CHARACTER}"), max_size=12))
def test_pieces_concatenate_to_the_text(text):
    assert "".join(pieces(text)[0]) == text


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 256), max_size=16))
def test_any_bytes_come_out_as_the_tokenizer_decodes_them_all(tokens):
    whole = TOKENIZER.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    assert "".join(pieces(tokens)[0]) == whole


def test_unfinished_character_comes_out_at_the_end():
    tokens = TOKENIZER("a😀")["input_ids"][:-1]
    found, _ = pieces(tokens)
    assert found == ["a", "", "", "", "\N{REPLACEMENT CHARACTER}"]


@pytest.mark.parametrize(
    ("text", "stop", "shown"),
    [
        ("one\n\ntwo", ["\n\n"], "one"),
        ("one\ntwo", ["\n\n"], "one\ntwo"),
        ("one\n", ["\n\n"], "one\n"),  # a beginning of it at the very end is text
        ("aaab", ["aab"], "a"),
        ("abcd", ["cd", "bc"], "a"),
        ("x😀y", ["😀"], "x"),
        ("END", ["END"], ""),
    ],
)
def test_stop_texts_end_the_stream_and_never_show(text, stop, shown):
    found, stream = pieces(text, stop=stop)
    assert "".join(found) == shown
    assert stream.stopped == any(s in text for s in stop)


def test_only_what_may_begin_a_stop_text_waits():
    assert pieces("a<b<|", stop=["<|x"])[0] == ["a", "", "<b", "", "", "<|"]


def test_special_tokens_have_no_text():
    eos = TOKENIZER.get_vocab()[EOS]
    assert eos == 256
    assert "".join(pieces([*TOKENIZER("hi")["input_ids"], eos, *TOKENIZER("ho")["input_ids"]])[0]) == "hiho"


def test_context_is_not_repeated():
    context = TOKENIZER("before ")["input_ids"]
    assert "".join(pieces("after", context=context)[0]) == "after"


def test_empty_stop_text_is_refused():
    with pytest.raises(ValueError, match="stop has an empty text"):
        TextStream(TOKENIZER, stop=["x", ""])
