"""Texts for calibration and for held-out evaluation, counted in tokens.

Four sources need no data of one's own: summaries of Wikipedia articles and a long narrative, the King James Bible (both
packages, see `download`), the topics of Python's own documentation (`pydoc_data`), and the code of its library. The
articles are split by a hash of their title, so calibration and held-out text never share one, on any machine. All
sources but the narrative are ordered by such a hash: their own order is by subject, and the first few thousand tokens
would be all about one.

A share of the summaries is written as tokenized corpora are (`as_tokenized_corpus`). This is openly the dress of the
texts that benchmarks use, WikiText and Penn Treebank above all: a model attends otherwise in it, and without any of it
calibration missed it, though not its subjects (docs/quality.md). The text itself is of the articles, not a benchmark's.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import re
import sysconfig
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Literal

import numpy as np

from calib.identity import TextIdentity
from oscar_jax import download

Encode = Callable[[str], Sequence[int]]
"""A tokenizer without special tokens: text in, token ids out."""

Split = Literal["calibration", "heldout"]

_SEPARATOR = "\n\n"
_HELDOUT_SIXTEENTHS = 4
# Short prose, other such prose as tokenized corpora have it, technical text, long prose, code; a quarter of long prose
# takes a novel from 1.5 to 1.2 times the KL of its own text and WikiText no further away (docs/quality.md). The subset
# is the mixture the recipes were chosen on.
_SHARES = (0.2, 0.25, 0.15, 0.25, 0.15)
_SUBSET_SHARES = (0.75, 0.25)
_MODULE_CHARACTERS = 8192  # about one calibration sequence: more modules, and attention that reaches far back in each
# A prefix of this many characters a token is tokenized first; a text with longer tokens is tokenized whole.
_CHARACTERS_PER_TOKEN = 16
_CUT_MARGIN = 64
_RARE = 3  # a word that occurs less often is not written, as in WikiText-2
_SECTIONS = 8
# What stands alone: punctuation, but for what joins two parts of a word or number; and a full stop at the end of a
# sentence, unless a single letter is before it (an initial, U.S.).
_MARKS = re.compile(r"[^\w\s.,'-]|,(?!\d)|(?<!\d),|'(?!\w)|(?<!\w)'|(?<!\b\w)\.(?=\s+[A-Z\"'(]|\s*$)")
_JOINTS = re.compile(r"(?<=\w)-(?=\w)|(?<=\d)[,.](?=\d)")
_APOSTROPHES = re.compile(r"(?<=\w)'(?=\w)")


@dataclasses.dataclass(frozen=True)
class TokenText:
    """Token ids and where they come from.

    Attributes:
      tokens: int32 [n].
      sha256: hash of the ids as little-endian int32, hexadecimal: the identity of the text as the model saw it.
      description: sources and their token counts, for people.
    """

    tokens: np.ndarray
    sha256: str
    description: str

    @classmethod
    def of(cls, tokens: Sequence[int] | np.ndarray, description: str) -> TokenText:
        ids = np.asarray(tokens, dtype=np.int32)
        digest = hashlib.sha256(ids.astype("<i4").tobytes()).hexdigest()
        return cls(tokens=ids, sha256=digest, description=description)

    @property
    def identity(self) -> TextIdentity:
        """What an artifact remembers of this text."""
        return TextIdentity(description=self.description, sha256=self.sha256, tokens=len(self.tokens))


def wiki_summaries(split: Split, path: str | os.PathLike[str] | None = None) -> list[str]:
    """Articles of one split, each `title\\n\\nsummary`, in the order of their title's sha256.

    Args:
      split: "calibration" (three quarters of the articles) or "heldout" (the rest).
      path: the JSON file `{title: {"extract": text, ...}}`; fetched if None.

    Raises:
      ValueError: unknown split.
      OSError: the file had to be fetched and could not be (see `download.fetch`).
    """
    if split not in ("calibration", "heldout"):
        raise ValueError(f"split: {split!r} is unknown; it is 'calibration' or 'heldout'")
    file = Path(path) if path is not None else download.fetch("wiki-summaries")
    articles = json.loads(file.read_text(encoding="utf-8"))
    chosen = [title for title in articles if _is_heldout(title) == (split == "heldout")]
    return [f"{title}{_SEPARATOR}{articles[title]['extract'].strip()}" for title in sorted(chosen, key=_digest)]


def as_tokenized_corpus(articles: Sequence[str]) -> str:
    """Articles written as WikiText is, its marks and its gaps, in one text.

    Punctuation stands alone, as do an apostrophe and what follows it; joints inside words and numbers become ` @-@ `,
    ` @,@ ` and ` @.@ `; whatever occurs fewer than three times in the articles is `<unk>`. A title is a heading
    ` = Title = `; seven articles of eight are sections, ` = = Title = = `, of the one before them, so that texts are
    long.

    Args:
      articles: each `title\\n\\nsummary`.
    """
    lines = [[_spaced(line) for line in article.split("\n") if line.strip()] for article in articles if article.strip()]
    counts = Counter(word for article in lines for line in article for word in line)
    written = []
    for i, article in enumerate(lines):
        title, *body = (" ".join(word if counts[word] >= _RARE else "<unk>" for word in line) for line in article)
        mark = "= =" if i % _SECTIONS else "="
        written += [f"{mark} {title} {mark}", "", *body, ""]
    return "".join(f" {line} \n" if line else " \n" for line in written)


def long_prose(path: str | os.PathLike[str] | None = None) -> str:
    """The King James Bible from its beginning, four million characters: what one attends to may be far back.

    Args:
      path: a Python file, which is not run: the text is its first string in triple quotes; fetched if None.

    Raises:
      OSError: the file had to be fetched and could not be (see `download.fetch`).
    """
    file = Path(path) if path is not None else download.fetch("king-james-bible")
    return file.read_text(encoding="utf-8").split('"""')[1].strip()


def python_topics() -> list[str]:
    """The topics of Python's `help()`, prose with code, by their name's sha256; other Pythons have other texts."""
    from pydoc_data.topics import topics

    return [topics[name].strip() for name in sorted(topics, key=_digest)]


def python_library() -> list[str]:
    """Beginnings of the modules of Python's library, by their name's sha256; other Pythons have other texts."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"), key=lambda file: _digest(file.stem))
    texts = (file.read_text(encoding="utf-8", errors="replace")[:_MODULE_CHARACTERS].strip() for file in files)
    return [text for text in texts if text]


def read_text(path: str | os.PathLike[str]) -> str:
    """A text file.

    Raises:
      FileNotFoundError: nothing there.
      ValueError: a folder, an empty file, or not UTF-8 (the message names the first bad byte).
    """
    file = Path(path)
    if not file.exists():
        raise FileNotFoundError(f"text: {file} does not exist; give a UTF-8 text file")
    if file.is_dir():
        raise ValueError(f"text: {file} is a folder; give a UTF-8 text file")
    try:
        text = file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        bad = error.object[error.start]
        raise ValueError(
            f"text: {file} is not UTF-8 (byte 0x{bad:02x} at position {error.start}); convert it with iconv"
        ) from None
    if not text.strip():
        raise ValueError(f"text: {file} is empty; give a file with some text")
    return text


def take(texts: Iterable[str], encode: Encode, tokens: int) -> np.ndarray:
    """The first `tokens` ids of the texts joined by blank lines, int32; fewer if they end before. Reads no further."""
    ids: list[int] = []
    for text in texts:
        if len(ids) >= tokens:
            break
        ids.extend(encode(text + _SEPARATOR))
    return np.asarray(ids[:tokens], dtype=np.int32)


def encode_span(text: str, encode: Encode, *, offset: int = 0, tokens: int) -> np.ndarray:
    """Ids `[offset, offset + tokens)` of one text, int32; fewer if it ends before.

    A long text is tokenized only as far as needed. Tokens near the cut could differ from those of the whole text, so
    some more are made and dropped.
    """
    end = offset + tokens
    reach = _CHARACTERS_PER_TOKEN * (end + _CUT_MARGIN)
    ids = encode(text[:reach])
    if reach < len(text) and len(ids) < end + _CUT_MARGIN:
        ids = encode(text)
    return np.asarray(ids[offset:end], dtype=np.int32)


def calibration_text(
    encode: Encode,
    tokens: int,
    *,
    files: Sequence[str | os.PathLike[str]] = (),
    subset: bool = False,
    wiki_path: Path | None = None,
    prose_path: Path | None = None,
) -> TokenText:
    """Text to calibrate on: the files in equal parts, else the default mixture.

    Without files it is .20 Wikipedia summaries, .25 others of them written as tokenized corpora are
    (`as_tokenized_corpus`), .15 Python topics, .25 long prose and .15 Python's library; a Python without its library's
    source files does without.

    Args:
      encode: the model's tokenizer, without special tokens.
      tokens: budget; the result is shorter only where the sources are.
      files: text files; a file too short for its part leaves the rest to those after it.
      subset: without files, only three parts of summaries to one of topics: less to fetch, as in the demo.
      wiki_path, prose_path: files of the summaries and of `long_prose` if not in the cache.

    Raises:
      ValueError: `tokens` below 1, or a file that is empty or not UTF-8.
      FileNotFoundError: a file is missing.
      OSError: as `download.fetch`.
    """
    _check_budget(tokens)
    if files:
        parts = [(str(file), _part_of_file(read_text(file), encode)) for file in files]
        shares = (1 / len(parts),) * len(parts)
    else:
        articles = wiki_summaries("calibration", wiki_path)
        half = len(articles) // 2
        plain, others = (articles, []) if subset else (articles[:half], articles[half:])
        parts = [
            ("Wikipedia summaries", lambda count: take(plain, encode, count)),
            ("Python topics", lambda count: take(python_topics(), encode, count)),
        ]
        shares = _SUBSET_SHARES
        if not subset:
            written = as_tokenized_corpus(others)
            label = "Wikipedia summaries written as tokenized corpora are"
            parts.insert(1, (label, lambda count: encode_span(written, encode, tokens=count)))
            prose = long_prose(prose_path)
            parts.append(("the King James Bible", lambda count: encode_span(prose, encode, tokens=count)))
            if modules := python_library():
                parts.append(("Python's library", lambda count: take(modules, encode, count)))
            shares = _SHARES[: len(parts)]
    pieces, notes, left = [], [], tokens
    for i, (label, part) in enumerate(parts):
        piece = part(round(left * shares[i] / sum(shares[i:])))
        left -= len(piece)
        pieces.append(piece)
        notes.append(f"{len(piece)} tokens of {label}")
    return TokenText.of(np.concatenate(pieces), " + ".join(notes))


def heldout_text(
    encode: Encode,
    tokens: int,
    *,
    file: str | os.PathLike[str] | None = None,
    offset: int = 0,
    minimum: int = 1,
    wiki_path: Path | None = None,
) -> TokenText:
    """Text to evaluate on: ids `[offset, offset + tokens)` of a file, else of the held-out Wikipedia summaries.

    Args:
      encode: the model's tokenizer, without special tokens.
      tokens: how many to return; fewer if the text ends before.
      file: a text file instead of the summaries.
      offset: tokens to pass over.
      minimum: the fewest that are of use, for example one window.
      wiki_path: the summaries' file if not in the cache.

    Raises:
      ValueError: `tokens` below 1 or `minimum`, `offset` below 0, a text with fewer than `minimum` tokens, or a file
        that is empty or not UTF-8.
      FileNotFoundError: the file is missing.
    """
    _check_budget(tokens)
    if offset < 0:
        raise ValueError(f"offset: got {offset}, expected 0 or more tokens")
    if tokens < minimum:
        raise ValueError(f"tokens: got {tokens}, {minimum} are needed for one window; give more, or a shorter window")
    if file is not None:
        label, ids = str(file), encode_span(read_text(file), encode, offset=offset, tokens=tokens)
    else:
        label = "held-out Wikipedia summaries"
        ids = take(wiki_summaries("heldout", wiki_path), encode, offset + tokens)[offset:]
    if len(ids) < minimum:
        raise ValueError(
            f"text: {label} has {len(ids)} tokens from token {offset} on, {minimum} are needed for one window; "
            "give a longer text or a shorter window"
        )
    start = f" from token {offset}" if offset else ""
    return TokenText.of(ids, f"{len(ids)} tokens of {label}{start}")


def _spaced(line: str) -> list[str]:
    line = _MARKS.sub(r" \g<0> ", line)
    line = _JOINTS.sub(r" @\g<0>@ ", line)
    return _APOSTROPHES.sub(" '", line).split()


def _part_of_file(text: str, encode: Encode) -> Callable[[int], np.ndarray]:
    return lambda count: encode_span(text, encode, tokens=count)


def _check_budget(tokens: int) -> None:
    if tokens < 1:
        raise ValueError(f"tokens: got {tokens}, expected at least 1")


def _digest(title: str) -> bytes:
    return hashlib.sha256(title.encode("utf-8")).digest()


def _is_heldout(title: str) -> bool:
    # The last digit decides, since the order is by the first ones: neither split favours a range of the order.
    return _digest(title)[-1] % 16 < _HELDOUT_SIXTEENTHS
