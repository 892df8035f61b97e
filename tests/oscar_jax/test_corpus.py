"""Texts: disjoint splits, budgets in tokens, and one sentence for every bad file."""

from __future__ import annotations

import hashlib
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from calib.identity import TextIdentity
from oscar_jax import corpus


def encode(text: str) -> list[int]:
    """A byte tokenizer, the same whatever surrounds a byte."""
    return list(text.encode("utf-8"))


@pytest.fixture
def wiki(tmp_path):
    path = tmp_path / "summaries.json"
    articles = {f"Title {i}": {"title": f"Title {i}", "extract": f" Summary of {i}. "} for i in range(400)}
    path.write_text(json.dumps(articles), encoding="utf-8")
    return path


@pytest.fixture
def prose(tmp_path):
    path = tmp_path / "prose.py"
    path.write_text('raise SystemExit\ntext = """\n' + "In the beginning. " * 500 + '\n"""\nmore = """no"""\n')
    return path


def test_splits_are_disjoint_and_complete(wiki):
    calibration = corpus.wiki_summaries("calibration", wiki)
    heldout = corpus.wiki_summaries("heldout", wiki)
    assert not set(calibration) & set(heldout)
    assert len(set(calibration) | set(heldout)) == 400
    assert 0.15 < len(heldout) / 400 < 0.35


def test_order_and_split_do_not_depend_on_the_order_of_the_file(wiki, tmp_path):
    articles = json.loads(wiki.read_text())
    turned = tmp_path / "turned.json"
    turned.write_text(json.dumps(dict(reversed(articles.items()))))
    for split in ("calibration", "heldout"):
        assert corpus.wiki_summaries(split, turned) == corpus.wiki_summaries(split, wiki)
    assert corpus.wiki_summaries("calibration", wiki) != sorted(corpus.wiki_summaries("calibration", wiki))


def test_one_more_article_moves_no_other(wiki, tmp_path):
    articles = json.loads(wiki.read_text())
    more = tmp_path / "more.json"
    more.write_text(json.dumps(articles | {"New": {"extract": "text"}}))
    for split in ("calibration", "heldout"):
        assert [
            text for text in corpus.wiki_summaries(split, more) if not text.startswith("New")
        ] == corpus.wiki_summaries(split, wiki)


def test_article_is_title_and_summary(wiki):
    assert "Title 7\n\nSummary of 7." in corpus.wiki_summaries("calibration", wiki) + corpus.wiki_summaries(
        "heldout", wiki
    )


def test_unknown_split(wiki):
    with pytest.raises(ValueError, match="split: 'test' is unknown"):
        corpus.wiki_summaries("test", wiki)  # pyright: ignore[reportArgumentType]


WRITTEN = {
    "The well-known (sea) lobster, it's said: 1,234 of 5.6 kg.": (
        "The well @-@ known ( sea ) lobster , it 's said : 1 @,@ 234 of 5 @.@ 6 kg ."
    ),
    "He cried \"stop it\". J. F. Doe's dogs' legs - 60\u00a0cm, 10%\u201320% - ran to the U.S. Army.": (
        "He cried \" stop it \" . J. F. Doe 's dogs ' legs - 60 cm , 10 % \u2013 20 % - ran to the U.S. Army ."
    ),
    "In 1,000,000 e.g. 'quoted' words; and no. 5 (1869\u20131871).": (
        "In 1 @,@ 000 @,@ 000 e.g. ' quoted ' words ; and no. 5 ( 1869 \u2013 1871 ) ."
    ),
}


@pytest.mark.parametrize("plain", WRITTEN)
def test_punctuation_of_a_tokenized_corpus_stands_alone(plain):
    """The marks of WikiText; it is written three times, so that no word is rare."""
    text = corpus.as_tokenized_corpus([f"A-b\n\n{plain}"] * 3)
    article = f" \n \n {WRITTEN[plain]} \n \n"
    assert text == f" = A @-@ b ={article} = = A @-@ b = ={article} = = A @-@ b = ={article}"


def test_rare_words_of_a_tokenized_corpus_are_unknown():
    text = corpus.as_tokenized_corpus(["One\n\nthe Cat.\n\nthe cat", "Two\n\nthe cat. Now", "Three\n\ncat"])
    assert text == (
        " = <unk> = \n \n the <unk> <unk> \n the cat \n \n = = <unk> = = \n \n the cat <unk> <unk> \n \n"
        " = = <unk> = = \n \n cat \n \n"
    )


def test_every_eighth_article_of_a_tokenized_corpus_begins_anew():
    lines = corpus.as_tokenized_corpus(["Same\n\nthing"] * 20).splitlines()
    headings = [line for line in lines if "=" in line]
    assert len(headings) == 20
    assert [i for i, line in enumerate(headings) if line == " = Same = "] == [0, 8, 16]


def test_python_topics_are_stable_and_long():
    topics = corpus.python_topics()
    assert topics == corpus.python_topics()
    assert sum(map(len, topics)) > 100_000
    assert all(topics)


def test_the_default_mixture_is_prose_short_and_long_documentation_and_code(wiki, prose):
    text = corpus.calibration_text(encode, 1000, wiki_path=wiki, prose_path=prose)
    articles = corpus.wiki_summaries("calibration", wiki)
    half = len(articles) // 2
    parts = [
        corpus.take(articles[:half], encode, 200),
        encode(corpus.as_tokenized_corpus(articles[half:]))[:250],
        corpus.take(corpus.python_topics(), encode, 150),
        encode("In the beginning. " * 500)[:250],
        corpus.take(corpus.python_library(), encode, 150),
    ]
    np.testing.assert_array_equal(text.tokens, np.concatenate(parts))
    assert text.description == (
        "200 tokens of Wikipedia summaries + 250 tokens of Wikipedia summaries written as tokenized corpora are + "
        "150 tokens of Python topics + 250 tokens of the King James Bible + 150 tokens of Python's library"
    )


def test_a_python_without_its_library_leaves_its_part_to_the_others(wiki, prose, monkeypatch):
    monkeypatch.setattr(corpus, "python_library", list)
    text = corpus.calibration_text(encode, 850, wiki_path=wiki, prose_path=prose)
    assert text.description == (
        "200 tokens of Wikipedia summaries + 250 tokens of Wikipedia summaries written as tokenized corpora are + "
        "150 tokens of Python topics + 250 tokens of the King James Bible"
    )


def test_modules_of_the_library_are_stable_short_and_many():
    modules = corpus.python_library()
    assert modules == corpus.python_library()
    assert len(modules) > 100
    assert max(map(len, modules)) <= 8192


def test_the_subset_is_three_to_one(wiki):
    text = corpus.calibration_text(encode, 1000, wiki_path=wiki, subset=True)
    assert len(text.tokens) == 1000
    assert text.tokens.dtype == np.int32
    assert text.description == "750 tokens of Wikipedia summaries + 250 tokens of Python topics"
    prose = corpus.take(corpus.wiki_summaries("calibration", wiki), encode, 750)
    np.testing.assert_array_equal(text.tokens[:750], prose)
    np.testing.assert_array_equal(text.tokens[750:], corpus.take(corpus.python_topics(), encode, 250))


def test_demo_mixture_is_six_thousand_and_two(wiki):
    text = corpus.calibration_text(encode, 8192, wiki_path=wiki, subset=True)
    assert text.description == "6144 tokens of Wikipedia summaries + 2048 tokens of Python topics"


def test_hash_is_that_of_the_ids(wiki):
    text = corpus.calibration_text(encode, 100, wiki_path=wiki, subset=True)
    assert text.sha256 == hashlib.sha256(text.tokens.astype("<i4").tobytes()).hexdigest()
    assert text.sha256 != corpus.calibration_text(encode, 101, wiki_path=wiki, subset=True).sha256
    assert text.identity == TextIdentity(text.description, text.sha256, 100)


def test_files_share_the_budget_and_a_short_one_leaves_its_rest(tmp_path):
    short, long = tmp_path / "short.txt", tmp_path / "long.txt"
    short.write_text("a" * 10)
    long.write_text("b" * 1000)
    text = corpus.calibration_text(encode, 100, files=[short, long])
    assert bytes(text.tokens.tolist()) == b"a" * 10 + b"b" * 90
    assert text.description == f"10 tokens of {short} + 90 tokens of {long}"


def test_short_files_give_what_they_have(tmp_path):
    path = tmp_path / "t.txt"
    path.write_text("abc")
    assert len(corpus.calibration_text(encode, 100, files=[path]).tokens) == 3


def test_heldout_shares_no_article_with_calibration(wiki):
    calibration = bytes(corpus.calibration_text(encode, 10**6, wiki_path=wiki, subset=True).tokens.tolist()).decode()
    heldout = bytes(corpus.heldout_text(encode, 10**6, wiki_path=wiki).tokens.tolist()).decode()
    articles = [line for line in heldout.split("\n\n") if line.startswith("Summary")]
    assert len(articles) > 50
    assert not [article for article in articles if article in calibration]


def test_heldout_offset_is_in_tokens(wiki, tmp_path):
    path = tmp_path / "t.txt"
    path.write_text("0123456789" * 10)
    text = corpus.heldout_text(encode, 5, file=path, offset=12)
    assert bytes(text.tokens.tolist()) == b"23456"
    assert text.description == f"5 tokens of {path} from token 12"
    whole = corpus.heldout_text(encode, 300, wiki_path=wiki).tokens
    np.testing.assert_array_equal(corpus.heldout_text(encode, 100, offset=200, wiki_path=wiki).tokens, whole[200:])


def test_fault_text_shorter_than_one_window(tmp_path):
    path = tmp_path / "t.txt"
    path.write_text("short")
    with pytest.raises(ValueError, match=r"has 5 tokens from token 0 on, 2048 are needed for one window"):
        corpus.heldout_text(encode, 4096, file=path, minimum=2048)
    with pytest.raises(ValueError, match="tokens: got 100, 2048 are needed for one window; give more"):
        corpus.heldout_text(encode, 100, file=path, minimum=2048)


@pytest.mark.parametrize(("tokens", "offset", "word"), [(0, 0, "tokens"), (-1, 0, "tokens"), (1, -1, "offset")])
def test_impossible_spans(tmp_path, tokens, offset, word):
    path = tmp_path / "t.txt"
    path.write_text("text")
    with pytest.raises(ValueError, match=f"^{word}: got -?\\d"):
        corpus.heldout_text(encode, tokens, file=path, offset=offset)


@settings(deadline=None)
@given(text=st.text(min_size=1, max_size=4000), offset=st.integers(0, 50), tokens=st.integers(1, 300))
def test_span_of_a_prefix_equals_the_span_of_the_whole(text, offset, tokens):
    expected = encode(text)[offset : offset + tokens]
    assert corpus.encode_span(text, encode, offset=offset, tokens=tokens).tolist() == expected


def test_span_is_right_where_tokens_are_longer_than_thought():
    def every_hundredth(text: str) -> list[int]:
        return [i % 1000 for i in range(len(text) // 100)]

    assert corpus.encode_span("x" * 100_000, every_hundredth, tokens=500).tolist() == list(range(500))


def test_span_reads_only_what_it_needs():
    seen = []

    def counting(text: str) -> list[int]:
        seen.append(len(text))
        return encode(text)

    corpus.encode_span("x" * 10_000_000, counting, tokens=100)
    assert sum(seen) < 10_000


def test_missing_file(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"text: .*none.txt does not exist"):
        corpus.read_text(tmp_path / "none.txt")


@pytest.mark.parametrize("content", ["", " \n\t\n"])
def test_fault_empty_text(tmp_path, content):
    path = tmp_path / "empty.txt"
    path.write_text(content)
    with pytest.raises(ValueError, match=r"empty.txt is empty"):
        corpus.read_text(path)


def test_text_that_is_not_utf8(tmp_path):
    path = tmp_path / "latin.txt"
    path.write_bytes("na\u00efve".encode("latin-1"))
    with pytest.raises(ValueError, match=r"not UTF-8 \(byte 0xef at position 2\)"):
        corpus.read_text(path)


def test_folder_as_text(tmp_path):
    with pytest.raises(ValueError, match="is a folder"):
        corpus.read_text(tmp_path)
