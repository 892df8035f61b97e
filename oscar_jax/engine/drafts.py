"""Guesses at the next tokens, to be verified several a step. A wrong guess costs time, never a token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class Drafter(Protocol):
    """Guesses for one sequence; `draft_model` makes those of a smaller model."""

    def propose(self, tokens: Sequence[int], count: int) -> list[int]:
        """At most `count` tokens that may follow; `tokens` are all so far and only ever grow."""
        ...


class PromptLookup:
    """What followed the last tokens the last time they occurred in the same sequence.

    Quoting, editing and code repeat earlier text; there several tokens a step are right. Costs one dictionary entry
    a token and length.
    """

    def __init__(self, longest: int = 3, shortest: int = 2):
        """
        Args:
            longest, shortest: lengths of the runs of tokens looked for, longer ones first.

        Raises:
            ValueError: lengths out of order.
        """
        if not 1 <= shortest <= longest:
            raise ValueError(f"shortest={shortest}, longest={longest}: expected 1 <= shortest <= longest.")
        self._lengths = range(longest, shortest - 1, -1)
        self._followed: dict[tuple[int, ...], int] = {}  # a run to the position after it
        self._seen = 0

    def propose(self, tokens: Sequence[int], count: int) -> list[int]:
        """See `Drafter`."""
        for end in range(self._seen + 1, len(tokens)):  # a run that ends with the last token has not been followed
            for length in self._lengths:
                if length <= end:
                    self._followed[tuple(tokens[end - length : end])] = end
        self._seen = max(self._seen, len(tokens) - 1)
        for length in self._lengths:
            if length <= len(tokens):
                place = self._followed.get(tuple(tokens[len(tokens) - length :]))
                if place is not None:
                    return list(tokens[place : place + count])
        return []
