"""Text of tokens as they arrive: characters split over tokens stay whole, and stop texts are never shown."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"


class TextStream:
    """Turns the tokens of one sequence into pieces of text that concatenate to the text of all of them.

    Attributes:
        stopped: a stop text has come; nothing more will.
    """

    def __init__(self, tokenizer: Any, *, stop: Sequence[str] = (), context: Sequence[int] = ()):
        """
        Args:
            tokenizer: transformers' object.
            stop: texts that end the stream; neither they nor what follows is returned.
            context: tokens before the first one, of which nothing is returned. Some tokenizers drop a leading space at
                the start of a text and only there.

        Raises:
            ValueError: an empty stop text.
        """
        if not all(stop):
            raise ValueError("stop has an empty text: expected texts of at least one character.")
        self.stopped = False
        self._tokenizer, self._stop = tokenizer, tuple(stop)
        # The window that is decoded begins with the last piece's tokens, for the sake of what they do to the next.
        self._window, self._shown = list(context), len(context)
        self._held = ""

    def push(self, token: int) -> str:
        """Text that is certain once `token` has come; often empty."""
        self._window.append(token)
        text = self._new_text()
        if text.endswith(_INCOMPLETE):
            return ""  # perhaps the first bytes of a character
        if text:
            self._window = self._window[self._shown :]
        self._shown = len(self._window)
        return self._release(text)

    def finish(self) -> str:
        """What was held back, when no more tokens come. Bytes that are no text stay replacement characters."""
        text = self._new_text()
        self._window, self._shown = [], 0
        text = self._release(text) + self._held
        self._held = ""
        return text

    def _new_text(self) -> str:
        return self._decode(self._window)[len(self._decode(self._window[: self._shown])) :]

    def _decode(self, tokens: Sequence[int]) -> str:
        return self._tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)

    def _release(self, text: str) -> str:
        """Everything held and new that can be no part of a stop text."""
        if self.stopped:
            return ""
        self._held += text
        found = [at for at in (self._held.find(stop) for stop in self._stop) if at >= 0]
        if found:
            self.stopped = True
            text, self._held = self._held[: min(found)], ""
            return text
        keep = max((_overlap(self._held, stop) for stop in self._stop), default=0)
        text, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return text


def _overlap(text: str, stop: str) -> int:
    """Characters at the end of `text` that a stop text begins with."""
    longest = min(len(text), len(stop) - 1)
    return next((size for size in range(longest, 0, -1) if text.endswith(stop[:size])), 0)
