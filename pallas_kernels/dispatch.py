"""Which implementation runs: one frozen table, tried in order; only `NotImplementedError` falls through."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from types import MappingProxyType
from typing import Any

# operation -> implementation -> "module:function", best first. A module is unavailable where it cannot be imported or
# its `unavailable()`, if it has one, gives a reason.
_TABLE = MappingProxyType(
    {
        "attention": MappingProxyType(
            {
                "triton": "pallas_kernels.attention.gpu:attend",
                "tpu": "pallas_kernels.attention.tpu:attend",
                "xla": "pallas_kernels.attention.xla:attend",
            }
        ),
        "write": MappingProxyType(
            {
                "triton": "pallas_kernels.write.triton:write",
                "tpu": "pallas_kernels.write.tpu:write",
                "xla": "pallas_kernels.write.xla:write",
            }
        ),
        "demote": MappingProxyType(
            {
                "triton": "pallas_kernels.write.triton:demote",
                "tpu": "pallas_kernels.write.tpu:demote",
                "xla": "pallas_kernels.write.xla:demote",
            }
        ),
        "demote_ahead": MappingProxyType({"triton": "pallas_kernels.write.triton:demote_ahead"}),
        "append": MappingProxyType({"triton": "pallas_kernels.write.triton_append:append"}),
    }
)


def implementations() -> tuple[str, ...]:
    """Names that `implementation=` takes."""
    return tuple(_TABLE["attention"])


def availability(operation: str = "attention") -> dict[str, str | None]:
    """For every implementation of an operation, best first, None where it runs here, else the reason why not."""
    reasons: dict[str, str | None] = {}
    for name in _TABLE[operation]:
        try:
            _load(operation, name)
            reasons[name] = None
        except (ImportError, NotImplementedError) as error:
            reasons[name] = str(error)
    return reasons


def preferred(implementation: str | Sequence[str] | None) -> str | None:
    """The implementation that a request tries first of those that run here; None where none does."""
    reasons = availability()
    names = tuple(reasons) if implementation is None else implementation
    names = (names,) if isinstance(names, str) else names
    return next((name for name in names if name in reasons and reasons[name] is None), None)


def call(operation: str, implementation: str | Sequence[str] | None, *args: Any, **kwargs: Any) -> Any:
    """Runs an operation with the first implementation that takes the case.

    Raises:
        ValueError: an unknown name.
        NotImplementedError: none takes it; the message has every reason.
    """
    if implementation is None:
        names: Sequence[str] = tuple(_TABLE[operation])
    else:
        names = (implementation,) if isinstance(implementation, str) else tuple(implementation)
    reasons = []
    for name in names:
        if name not in implementations():
            raise ValueError(f"implementation={name!r}: expected one of {', '.join(implementations())}, or None.")
        try:
            return _load(operation, name)(*args, **kwargs)
        except NotImplementedError as error:
            reasons.append(f"{name}: {error}")
    raise NotImplementedError(f"no implementation of {operation} takes this case ({'; '.join(reasons)}).")


def _load(operation: str, name: str) -> Callable[..., Any]:
    if name not in _TABLE[operation]:
        raise NotImplementedError("has none")
    path, _, function = _TABLE[operation][name].partition(":")
    try:
        module = importlib.import_module(path)
    except ImportError as error:
        raise NotImplementedError(f"cannot be imported here ({error})") from error
    if reason := getattr(module, "unavailable", lambda: None)():
        raise NotImplementedError(reason)
    return getattr(module, function)
