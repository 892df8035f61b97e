"""How many programs XLA has compiled in this process, so that a loop can show that it compiles none."""

from __future__ import annotations

import jax

_compiled = 0


def _listen(event: str, duration_secs: float, **kwargs: str | int) -> None:
    global _compiled
    del duration_secs, kwargs
    _compiled += event == "/jax/core/compile/backend_compile_duration"


jax.monitoring.register_event_duration_secs_listener(_listen)


def compilations() -> int:
    """Programs compiled since this module was imported."""
    return _compiled
