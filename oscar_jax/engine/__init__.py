"""Many requests from one process: a paged allocator with prefix sharing, a scheduler, and the loop that runs them.

    from oscar_jax.engine import Engine, Request, Shapes

    engine = Engine(model.decoder, codes, max_length=4096, shapes=Shapes.of(16))
    engine.warm_up()
    print(engine.complete([Request(prompt, max_tokens=64) for prompt in prompts]))

`pool`, `prefix_tree`, `allocator`, `request`, `drafts` and `scheduler` are plain Python and import no jax; the names
below are imported when first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from oscar_jax.engine.allocator import Allocator
    from oscar_jax.engine.drafts import PromptLookup
    from oscar_jax.engine.engine import Engine, EngineStats
    from oscar_jax.engine.model_drafts import draft_model
    from oscar_jax.engine.pool import OutOfPages
    from oscar_jax.engine.request import Output, Request
    from oscar_jax.engine.scheduler import Shapes

_SOURCES = {
    "Allocator": "allocator",
    "Engine": "engine",
    "EngineStats": "engine",
    "OutOfPages": "pool",
    "Output": "request",
    "PromptLookup": "drafts",
    "Request": "request",
    "Shapes": "scheduler",
    "draft_model": "model_drafts",
}

__all__ = [
    "Allocator",
    "Engine",
    "EngineStats",
    "OutOfPages",
    "Output",
    "PromptLookup",
    "Request",
    "Shapes",
    "draft_model",
]


def __getattr__(name: str) -> Any:
    if name not in _SOURCES:
        raise AttributeError(f"module 'oscar_jax.engine' has no attribute {name!r}")
    return getattr(importlib.import_module(f"oscar_jax.engine.{_SOURCES[name]}"), name)
