"""oscar-jax: a 2-bit KV cache whose transforms are calibrated on the attention they serve (OSCAR, arXiv 2605.17757).

    import oscar_jax as oscar

    model = oscar.load_model("smollm2-135m")
    codes, manifest = oscar.load_artifact("artifact", model=model.identity)
    print(oscar.complete(model, "Why is the sky blue?", codes=codes).text)

The names below are the public ones; each is imported when first used, so that importing the package imports no jax.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from calib.artifact import save as save_artifact
    from oscar_jax.cache import KVCache, advance, append, attend, demote, init_cache, step_attention
    from oscar_jax.cache_settings import CacheConfig
    from oscar_jax.calibrate import calibrate as calibrate_model
    from oscar_jax.evaluate import evaluate as evaluate_model
    from oscar_jax.generate import complete, stream
    from oscar_jax.layer_plan import load as load_artifact
    from oscar_jax.models import load as load_model
    from oscar_jax.sampling import Sampling
    from oscar_jax.step import cache_config, make_step, prefill
    from pallas_kernels.attention import AttentionSpec
    from pallas_kernels.tiers import Tiers
    from pallas_kernels.transform_code import TransformCode, TransformCodes, bits_per_element

_SOURCES = {
    "AttentionSpec": "pallas_kernels.attention",
    "CacheConfig": "oscar_jax.cache_settings",
    "KVCache": "oscar_jax.cache",
    "Sampling": "oscar_jax.sampling",
    "Tiers": "pallas_kernels.tiers",
    "TransformCode": "pallas_kernels.transform_code",
    "TransformCodes": "pallas_kernels.transform_code",
    "advance": "oscar_jax.cache",
    "append": "oscar_jax.cache",
    "attend": "oscar_jax.cache",
    "bits_per_element": "pallas_kernels.transform_code",
    "cache_config": "oscar_jax.step",
    "calibrate_model": "oscar_jax.calibrate:calibrate",
    "complete": "oscar_jax.generate",
    "demote": "oscar_jax.cache",
    "evaluate_model": "oscar_jax.evaluate:evaluate",
    "init_cache": "oscar_jax.cache",
    "load_artifact": "oscar_jax.layer_plan:load",
    "load_model": "oscar_jax.models:load",
    "make_step": "oscar_jax.step",
    "prefill": "oscar_jax.step",
    "save_artifact": "calib.artifact:save",
    "step_attention": "oscar_jax.cache",
    "stream": "oscar_jax.generate",
}

__all__ = [
    "AttentionSpec",
    "CacheConfig",
    "KVCache",
    "Sampling",
    "Tiers",
    "TransformCode",
    "TransformCodes",
    "advance",
    "append",
    "attend",
    "bits_per_element",
    "cache_config",
    "calibrate_model",
    "complete",
    "demote",
    "evaluate_model",
    "init_cache",
    "load_artifact",
    "load_model",
    "make_step",
    "prefill",
    "save_artifact",
    "step_attention",
    "stream",
]


def __getattr__(name: str) -> Any:
    if name not in _SOURCES:
        raise AttributeError(f"module 'oscar_jax' has no attribute {name!r}")
    module, _, attribute = _SOURCES[name].partition(":")
    return getattr(importlib.import_module(module), attribute or name)


def __dir__() -> list[str]:
    return sorted(__all__)
