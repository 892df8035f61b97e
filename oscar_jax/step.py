"""One step of a decoder over a three-tier cache, the only way this package runs a model with one.

Generation, evaluation and the demo share it:

    config = cache_config(model.config, max_length=4096)
    step = make_step(model.decoder, config, codes)
    logits, cache = prefill(step, step.init(), [prompt])        # [B, V], after each prompt's last token
    logits, cache = step(cache, tokens, counts)                  # tokens [B, T]

A step donates the cache it gets and never the weights: use the cache it returns, and only that.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import ArrayLike

from oscar_jax import sharding
from oscar_jax.cache import SPECS, KVCache, advance, begin_step, init_cache
from oscar_jax.cache_check import check_cache
from oscar_jax.cache_settings import CacheConfig
from oscar_jax.layer_codes import LayerCodes, for_kernels
from oscar_jax.models import Decoder, ModelConfig
from pallas_kernels.attention import AttentionSpec
from pallas_kernels.tiers import Tiers
from pallas_kernels.transform_code import TransformCodes

Output = Literal["last", "all", "hidden"]
Prefill = Literal["by-position", "chunk-exact"]

CHUNKS = (32, 256)
"""Token counts of prefill calls, each one compilation; the last tokens of a prompt are padded to the next of them."""


def cache_config(
    model: ModelConfig,
    *,
    max_length: int,
    tiers: Tiers | None = None,
    plain_dtype: str | None = None,
    prefill: Prefill = "by-position",
    **options: Any,
) -> CacheConfig:
    """The `CacheConfig` of a model.

    Args:
        max_length: longest sequence in tokens.
        tiers: windows; None for the default ones.
        plain_dtype: of sinks and recents; None is the dtype of the model's weights, which `make_step` fills in.
        prefill: "by-position", what a query reads is what decoding would read there, whatever the chunks; or
            "chunk-exact", the tokens of one call see each other plainly, as in the reference implementation, so that
            results depend on the chunks and a prompt in one piece is read without loss.
        options: other fields of `CacheConfig`: `batch`, `step_tokens`, `pages`, `implementation`,
            `unroll_layers`, `mesh`.

    Raises:
        ValueError: as `CacheConfig`, or an unknown `prefill`.
        NotImplementedError: no implementation here takes the model.
    """
    if prefill not in get_args(Prefill):
        raise ValueError(f"prefill={prefill!r}: expected 'by-position' or 'chunk-exact'.")
    return CacheConfig(
        layers=model.layers,
        q_heads=model.q_heads,
        kv_heads=model.kv_heads,
        head_dim=model.head_dim,
        max_length=max_length,
        attention=AttentionSpec(model.softmax_scale, exact_chunk=prefill == "chunk-exact"),
        tiers=tiers or Tiers(),
        plain_dtype=plain_dtype,
        windows=model.windows if any(window is not None for window in model.windows) else None,
        **options,
    )


@dataclasses.dataclass(frozen=True, eq=False)
class Step:
    """See `make_step`."""

    decoder: Decoder
    config: CacheConfig
    codes: TransformCodes | LayerCodes | None
    checked: bool = False

    def init(self) -> KVCache:
        """An empty cache."""
        return init_cache(self.config, self.codes)

    def __call__(
        self, cache: KVCache, tokens: ArrayLike, counts: ArrayLike | None = None, *, output: Output = "last"
    ) -> tuple[jax.Array, KVCache]:
        """Stores the tokens of a step and returns what the model says after them.

        Args:
            cache: donated, its arrays are gone afterwards. `lengths + counts` must stay within `config.max_length`,
                which is not checked here.
            tokens: int `[B, T]`. Each T is one compilation. A row is real up to its count; the rest is never seen and
                may hold anything.
            counts: int `[B]` in 0..T; None means T for every row. A row of count 0 keeps its part of the cache.
            output: "last" for logits `[B, V]` after each row's last real token (meaningless for a count of 0), "all"
                for logits `[B, T, V]`, as verification of drafted tokens needs, "hidden" for hidden states
                `[B, T, E]`, of which `decoder.logits` makes logits block by block.

        Returns:
            The output, at least float32 for logits, and the new cache. `advance(cache, -rejected)` takes tokens back.

        Raises:
            ValueError: wrong shapes, or in checked mode a damaged cache (sequence, layer, head and position are named).
        """
        tokens = _int32(tokens)
        batch = self.config.batch
        if tokens.ndim != 2 or tokens.shape[0] != batch or not tokens.shape[1]:
            raise ValueError(f"tokens of shape {tokens.shape}: expected [{batch}, T], one row for each sequence.")
        counts = np.full(batch, tokens.shape[1], np.int32) if counts is None else counts
        if np.shape(counts) != (batch,):
            raise ValueError(f"counts of shape {np.shape(counts)}: expected [{batch}], one for each sequence.")
        result, cache = _run(self.decoder, self.codes, cache, tokens, _int32(counts), config=self.config, output=output)
        if self.checked:
            check_cache(cache, self.config, self.codes)
        return result, cache


def make_step(
    decoder: Decoder, config: CacheConfig, codes: TransformCodes | LayerCodes | None = None, *, checked: bool = False
) -> Step:
    """A decoder and its transform codes as one callable over a cache; `Step.__call__` says how to call it.

    Codes are put on the device first, and with a mesh in the config weights and codes on it, unless they are there.

    Args:
        decoder: the model.
        config: from `cache_config`.
        codes: transform codes of this model; None for a cache that stays plain.
        checked: verify page tables and stored scales after every call (reads them back, slow).

    Raises:
        ValueError: a cache of another model's shape.
        NotImplementedError: the one implementation that the config names does not take decode steps of this cache.
    """
    model = decoder.config
    fields = ("layers", "q_heads", "kv_heads", "head_dim")
    wrong = [f"{name}={getattr(config, name)}" for name in fields if getattr(config, name) != getattr(model, name)]
    if wrong:
        expected = ", ".join(f"{name}={getattr(model, name)}" for name in fields)
        raise ValueError(f"config has {', '.join(wrong)}: this model has {expected}; use cache_config(decoder.config).")
    if config.plain_dtype is None:
        config = dataclasses.replace(config, plain_dtype=decoder.dtype.name)
    codes = for_kernels(config, codes)
    if config.mesh is None:
        codes = jax.device_put(codes)  # arrays of the host would travel with every call
    else:
        decoder = sharding.place_decoder(decoder, config.mesh)
        if codes is not None:
            codes = sharding.place_codes(codes, config.mesh, kv_heads=config.stored_heads)
    step = Step(decoder, config, codes, checked)
    if isinstance(config.implementation, str) and config.implementation != "xla":
        _check_taken(step)
    return step


def _check_taken(step: Step) -> None:
    """Raises NotImplementedError for what the kernels asked for do not take, not first when a request runs."""
    config = step.config
    tokens, counts = (jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((config.batch, 1), (config.batch,)))
    run = functools.partial(_run, config=config, output="hidden")
    jax.eval_shape(run, step.decoder, step.codes, jax.eval_shape(step.init), tokens, counts)


def prefill(
    step: Step,
    cache: KVCache,
    prompts: Sequence[Sequence[int]],
    *,
    chunks: Sequence[int] = CHUNKS,
    progress: Callable[[int], object] | None = None,
) -> tuple[jax.Array, KVCache]:
    """Stores prompts of any lengths, chunk by chunk.

    Args:
        cache: donated.
        prompts: token ids, one sequence for each row of the batch; an empty one leaves its row alone.
        chunks: allowed tokens a call.
        progress: called after each chunk with the tokens by which the longest prompt has advanced.

    Returns:
        Logits `[B, V]` after each prompt's last token (zeros for an empty one), and the new cache.

    Raises:
        ValueError: no tokens at all, another number of prompts than the batch, or one that the cache has no room for.
    """
    lengths = np.asarray([len(prompt) for prompt in prompts], np.int32)
    if len(prompts) != step.config.batch or not lengths.any():
        raise ValueError(f"prompts of {lengths.tolist()} tokens: expected {step.config.batch} prompts, not all empty.")
    room = step.config.max_length - sharding.on_host(cache.lengths)
    if (lengths > room).any():
        row = int(np.argmax(lengths > room))
        raise ValueError(
            f"prompts: number {row} has {lengths[row]} tokens and the cache has room for {room[row]}; shorten it or "
            f"use a larger max_length than {step.config.max_length}."
        )
    tokens = np.zeros((len(prompts), lengths.max() + max(chunks)), np.int32)
    for row, prompt in zip(tokens, prompts, strict=True):
        row[: len(prompt)] = prompt
    logits: Any = np.zeros((), np.float32)
    start = 0
    while start < lengths.max():
        left = lengths.max() - start
        size = min((chunk for chunk in chunks if chunk >= left), default=max(chunks))
        counts = np.clip(lengths - start, 0, size)
        last, cache = step(cache, tokens[:, start : start + size], counts)
        ends = ((counts > 0) & (lengths <= start + size))[:, None]
        logits = jnp.where(ends, last, logits)
        start += size
        if progress is not None:
            jax.block_until_ready(logits)
            progress(int(counts.max()))
    return logits, cache


def _int32(x: ArrayLike) -> jax.Array | np.ndarray:
    """Numbers of the host stay there until the call, as those of several processes must."""
    return x.astype(jnp.int32) if isinstance(x, jax.Array) else np.asarray(x, np.int32)


@functools.partial(jax.jit, static_argnames=("config", "output"), donate_argnames="cache")
def _run(
    decoder: Decoder,
    codes: TransformCodes | LayerCodes | None,
    cache: KVCache,
    tokens: jax.Array,
    counts: jax.Array,
    *,
    config: CacheConfig,
    output: Output,
) -> tuple[jax.Array, KVCache]:
    tokens, counts = sharding.constrained(config.mesh, (tokens, counts), sharding.ROWS)
    positions = cache.lengths[:, None] + jnp.arange(tokens.shape[1])
    cache, attend = begin_step(cache, config, codes, counts, tokens=tokens.shape[1])
    hidden, cache, _ = decoder(tokens, positions, attend, cache, unroll=config.unroll_layers)
    cache = sharding.constrained(config.mesh, advance(cache, counts), SPECS)
    if output == "hidden":
        return hidden, cache
    if output == "last":
        last = jnp.maximum(counts - 1, 0)
        hidden = jnp.take_along_axis(hidden, last[:, None, None], axis=1)[:, 0]
    return decoder.logits(hidden), cache
