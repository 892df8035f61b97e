"""What is asked for, and what comes back. Token ids, no text."""

from __future__ import annotations

import dataclasses
import numbers
import operator
from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:  # that module imports jax
    from oscar_jax.sampling import Sampling

Finish = Literal["stop", "length", "cancelled"]


def token_ids(name: str, tokens: Iterable[Any]) -> tuple[int, ...]:
    """Token ids as Python's own whole numbers, which hash and compare alike wherever they came from.

    Raises:
        ValueError: anything else among them.
    """
    try:
        return tuple(operator.index(token) for token in tokens)
    except TypeError:
        raise ValueError(f"{name}={tokens!r:.60}: expected token ids, whole numbers.") from None


@dataclasses.dataclass(frozen=True)
class Request:
    """One prompt to be continued. Its tokens are copied, so that the caller may go on using their list.

    Attributes:
        prompt: token ids.
        max_tokens: most new tokens.
        sampling: an `oscar_jax.Sampling`; None is greedy.
        stop_tokens: the first of these ends it, and is its last token.
        stop_sequences: so does the first of these runs of new tokens.

    Raises:
        ValueError: an empty prompt or stop sequence, tokens that are no whole numbers, or `max_tokens` below 1.
    """

    prompt: Sequence[int]
    max_tokens: int = 256
    sampling: Sampling | None = None
    stop_tokens: Collection[int] = ()
    stop_sequences: Sequence[Sequence[int]] = ()

    def __post_init__(self):
        copies = {
            "prompt": token_ids("prompt", self.prompt),
            "stop_tokens": frozenset(token_ids("stop_tokens", self.stop_tokens)),
            "stop_sequences": tuple(token_ids("stop_sequences", stop) for stop in self.stop_sequences),
        }
        for name, copy in copies.items():
            object.__setattr__(self, name, copy)
        if not self.prompt:
            raise ValueError("prompt is empty: expected at least one token.")
        if not isinstance(self.max_tokens, numbers.Integral) or self.max_tokens < 1:
            raise ValueError(f"max_tokens={self.max_tokens!r}: expected at least 1, a whole number.")
        if not all(self.stop_sequences):
            raise ValueError("stop_sequences has an empty one: expected at least one token in each.")

    def finish(self, tokens: Sequence[int], start: int = 0) -> Finish | None:
        """Why it ends with the last of these tokens, or None if it goes on; new tokens are those from `start` on."""
        if tokens[-1] in self.stop_tokens:
            return "stop"
        new = len(tokens) - start
        if any(len(stop) <= new and tuple(tokens[-len(stop) :]) == stop for stop in self.stop_sequences):
            return "stop"
        return "length" if new >= self.max_tokens else None


@dataclasses.dataclass(frozen=True)
class Output:
    """New tokens of a request.

    Attributes:
        request: its id.
        tokens: new ones, an ending stop token included; none if it was cancelled.
        finish: why it has ended, None while it runs.
    """

    request: int
    tokens: list[int]
    finish: Finish | None


@dataclasses.dataclass(eq=False, slots=True)
class Progress:
    """A request on its way through the scheduler.

    Attributes:
        id: of the request.
        priority: lower ones go first; fixed when it is submitted.
        tokens: prompt and generated tokens, of which the allocator says how many are stored.
        drafter: guesses the next tokens, or None.
        row: of the device's batch, None while it waits.
        part: of the device, while it has a row.
        sequence: the id of the part's allocator, while it has a row.
        kept: length at which its tokens were last kept.
    """

    id: int
    request: Request
    priority: tuple[int, int]
    tokens: list[int]
    drafter: Any = None
    row: int | None = None
    part: int = -1
    sequence: int = -1
    kept: int = 0
