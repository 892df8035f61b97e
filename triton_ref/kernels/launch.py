"""Whether Triton kernels can run where the tensors are, and how they are launched."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from triton.runtime.interpreter import InterpretedFunction

MIN_DOT = 16  # smallest extent of a `tl.dot` operand


def unavailable(kernel) -> str | None:
    """Why a kernel cannot run in this process; None where it can."""
    if isinstance(kernel, InterpretedFunction):
        return None
    if torch.cuda.is_available():
        return None
    asked = os.environ.get("TRITON_INTERPRET", "0") not in ("", "0")
    why = "was set after triton was imported" if asked else "is not set"
    return f"no GPU, and TRITON_INTERPRET=1 {why}, so that Triton's CPU interpreter is off"


def interpreted(kernel) -> bool:
    """Whether calls run in Triton's CPU interpreter, which computes bfloat16 wrongly and without an error."""
    return isinstance(kernel, InterpretedFunction)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silences numpy, on which Triton's interpreter runs, about rows with NaN and Inf: kernels are meant for them."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=RuntimeWarning)
        yield


def run(kernel: Any, grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
    """Launches a kernel."""
    with quiet():
        kernel[grid](*arguments, **options)


def block(size: int, least: int = 1) -> int:
    """The power of two that holds `size`."""
    return max(least, 1 << (size - 1).bit_length())
