"""The decoder of the Llama, Qwen2, Qwen3 and Gemma 3 families, with attention left to the caller.

Weights are stacked over layers and scanned, so compile time does not grow with depth. A `Decoder` is a pytree: pass it
to `jax.jit` as an ordinary argument that is not donated, and donate the attention state:

    @partial(jax.jit, donate_argnames="cache")
    def step(decoder, tokens, positions, cache):
        hidden, cache, _ = decoder(tokens, positions, attend, cache)
        return decoder.logits(hidden[:, -1]), cache
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from oscar_jax.models.attention import Attend, Attends, runs
from oscar_jax.models.config import ModelConfig
from pallas_kernels import rope


class ParameterShape(NamedTuple):
    """Shape of one weight. A matrix is `[inputs, outputs]` here and `[outputs, inputs]` in every checkpoint."""

    shape: tuple[int, ...]
    matrix: bool

    @property
    def stored(self) -> tuple[int, ...]:
        """Its shape in a checkpoint."""
        return self.shape[::-1] if self.matrix else self.shape


def parameter_shapes(config: ModelConfig) -> dict[str, ParameterShape]:
    """Weights that a model of this config has; names that start with "layers." exist once a layer."""
    hidden, mlp, vocab = config.hidden_size, config.mlp_size, config.vocab_size
    query, key = config.q_heads * config.head_dim, config.kv_heads * config.head_dim

    def matrix(inputs: int, outputs: int) -> ParameterShape:
        return ParameterShape((inputs, outputs), True)

    def vector(size: int) -> ParameterShape:
        return ParameterShape((size,), False)

    shapes = {
        "embedding": ParameterShape((vocab, hidden), False),
        "layers.attention_norm": vector(hidden),
        "layers.query": matrix(hidden, query),
        "layers.key": matrix(hidden, key),
        "layers.value": matrix(hidden, key),
        "layers.output": matrix(query, hidden),
        "layers.mlp_norm": vector(hidden),
        "layers.gate": matrix(hidden, mlp),
        "layers.up": matrix(hidden, mlp),
        "layers.down": matrix(mlp, hidden),
        "final_norm": vector(hidden),
    }
    if config.qkv_bias:
        shapes |= {
            "layers.query_bias": vector(query),
            "layers.key_bias": vector(key),
            "layers.value_bias": vector(key),
        }
    if config.output_bias:
        shapes["layers.output_bias"] = vector(hidden)
    if config.qk_norm:
        shapes |= {"layers.query_norm": vector(config.head_dim), "layers.key_norm": vector(config.head_dim)}
    if config.post_norms:
        shapes |= {"layers.attention_post_norm": vector(hidden), "layers.mlp_post_norm": vector(hidden)}
    if not config.tied_embeddings:
        shapes["head"] = matrix(hidden, vocab)
    return shapes


class RotaryTable(nnx.Variable):
    """Cosines or sines by position: an array of the model that is no weight."""


class Block(nnx.Module):
    """One layer's weights, or all layers' stacked on a leading axis (`Decoder.layers`). Heads are adjacent columns."""

    def __init__(self, config: ModelConfig, weights: Mapping[str, jax.Array]):
        def optional(name: str) -> nnx.Param | None:
            return nnx.Param(weights[name]) if name in weights else None

        self.head_dim, self.eps, self.activation = config.head_dim, config.norm_eps, config.activation
        self.attention_norm = nnx.Param(weights["attention_norm"])
        self.query, self.query_bias = nnx.Param(weights["query"]), optional("query_bias")
        self.key, self.key_bias = nnx.Param(weights["key"]), optional("key_bias")
        self.value, self.value_bias = nnx.Param(weights["value"]), optional("value_bias")
        self.query_norm, self.key_norm = optional("query_norm"), optional("key_norm")
        self.output, self.output_bias = nnx.Param(weights["output"]), optional("output_bias")
        self.attention_post_norm, self.mlp_post_norm = optional("attention_post_norm"), optional("mlp_post_norm")
        self.mlp_norm = nnx.Param(weights["mlp_norm"])
        self.gate, self.up, self.down = (nnx.Param(weights[name]) for name in ("gate", "up", "down"))

    def heads(self, x: jax.Array, cos: jax.Array, sin: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """q `[B, T, N, D]` and k, v `[B, T, K, D]` of the residual stream x `[B, T, E]`, q and k rotated."""
        x = rms_norm(x, self.attention_norm, self.eps)
        split = (*x.shape[:2], -1, self.head_dim)
        q = _project(x, self.query, self.query_bias).reshape(split)
        k = _project(x, self.key, self.key_bias).reshape(split)
        v = _project(x, self.value, self.value_bias).reshape(split)
        if self.query_norm is not None and self.key_norm is not None:
            q, k = rms_norm(q, self.query_norm, self.eps), rms_norm(k, self.key_norm, self.eps)
        return rope.rotate(q, cos, sin), rope.rotate(k, cos, sin), v

    def attended(self, x: jax.Array, out: jax.Array) -> jax.Array:
        """The residual stream `[B, T, E]` after attention's output `[B, T, N, D]` and the MLP."""
        out = out.astype(x.dtype).reshape(*x.shape[:2], -1)
        y = _project(out, self.output, self.output_bias)
        x = x + (y if self.attention_post_norm is None else rms_norm(y, self.attention_post_norm, self.eps))
        y = rms_norm(x, self.mlp_norm, self.eps)
        activate = jax.nn.silu if self.activation == "silu" else partial(jax.nn.gelu, approximate=True)
        y = _project(activate(_project(y, self.gate)) * _project(y, self.up), self.down)
        return x + (y if self.mlp_post_norm is None else rms_norm(y, self.mlp_post_norm, self.eps))


class Decoder(nnx.Module):
    """A decoder-only transformer. All weights have one dtype, and products of float32 are true float32 everywhere."""

    def __init__(self, config: ModelConfig, weights: Mapping[str, jax.Array]):
        """
        Args:
            config: the model.
            weights: an array for every name of `parameter_shapes(config)`, those of "layers." with a leading L.
        """
        self.config = config
        self.embedding = nnx.Param(weights["embedding"])
        self.layers = Block(
            config, {name.removeprefix("layers."): w for name, w in weights.items() if name.startswith("layers.")}
        )
        self.final_norm = nnx.Param(weights["final_norm"])
        self.head = None if config.tied_embeddings else nnx.Param(weights["head"])
        dtype = jnp.promote_types(weights["embedding"].dtype, jnp.float32)

        def tables(rotary: rope.Rotary) -> tuple[RotaryTable, RotaryTable]:
            cos, sin = rotary.table(config.max_position, np.float64)  # pyright: ignore[reportArgumentType]
            scaled = (jnp.asarray(config.attention_factor * table, dtype) for table in (cos, sin))
            return RotaryTable(next(scaled)), RotaryTable(next(scaled))

        self.cos, self.sin = tables(config.rotary)
        self.local_cos, self.local_sin = (None, None) if config.local_rotary is None else tables(config.local_rotary)

    @property
    def dtype(self) -> jnp.dtype:
        """Dtype of the weights, of the residual stream, and of the q, k, v that `attend` gets."""
        return self.embedding[...].dtype

    def __call__(
        self, tokens: jax.Array, positions: jax.Array, attend: Attends, state: Any, *, unroll: bool = False
    ) -> tuple[jax.Array, Any, Any]:
        """Runs all layers.

        Args:
            tokens: int `[B, T]` in `0 .. V-1`.
            positions: int `[B, T]` in `0 .. config.max_position - 1`. Values are not checked: tokens and positions out
                of range are clipped, so that padding may hold anything.
            attend: `attend(state, layer, q [B, T, N, D], k [B, T, K, D], v [B, T, K, D]) -> (out [B, T, N, D], state,
                extra)`, traced once; `layer` is an int32 scalar 0 .. L-1, q and k are rotated and not scaled. Or
                a list of `(count, attend)` for runs of layers that are not alike, each compiled by itself.
            state: pytree of arrays carried from layer to layer, of constant shapes and dtypes. Donate it under jit and
                it is updated in place.
            unroll: compile every layer by itself. In a loop XLA's GPU backend copies a layer's weights out of their
                stack before it multiplies by them; unrolled, most products read them where they lie.

        Returns:
            hidden `[B, T, E]` after the final norm; the last state; every layer's `extra`, stacked on a leading L.
        """

        def angles(*tables: RotaryTable) -> list[jax.Array]:
            return [jnp.take(table[...], positions, axis=0, mode="clip")[:, :, None] for table in tables]

        everywhere = angles(self.cos, self.sin)
        in_windows = None
        if self.local_cos is not None and self.local_sin is not None:
            in_windows = angles(self.local_cos, self.local_sin)
        local = np.asarray([window is not None for window in self.config.windows])

        def layer(attend: Attend, carry: tuple[jax.Array, Any], scanned: tuple[Block | None, jax.Array]):
            x, state = carry
            block, index = scanned
            if block is None:
                block = jax.tree.map(lambda weight: weight[index], self.layers)
            cos, sin = everywhere
            if in_windows is not None:
                own = jnp.asarray(local)[index]
                cos, sin = (jnp.where(own, ours, all) for ours, all in zip(in_windows, everywhere, strict=True))
            q, k, v = block.heads(x, cos, sin)
            out, state, extra = attend(state, index, q, k, v)
            return (block.attended(x, out), state), extra

        x = jnp.take(self.embedding[...], tokens, axis=0, mode="clip")
        if self.config.embedding_scale != 1:
            x = x * jnp.asarray(self.config.embedding_scale, x.dtype)
        carry, extras, first = (x, state), [], 0
        for count, attend_run in runs(attend, self.config.layers):
            indices = jnp.arange(first, first + count, dtype=jnp.int32)
            # A loop over a part of the layers would copy that part of the stacked weights before it runs.
            blocks = self.layers if count == self.config.layers else None
            carry, extra = jax.lax.scan(partial(layer, attend_run), carry, (blocks, indices), unroll=unroll)
            extras.append(extra)
            first += count
        x, state = carry
        extras = extras[0] if len(extras) == 1 else jax.tree.map(lambda *parts: jnp.concatenate(parts), *extras)
        return rms_norm(x, self.final_norm, self.config.norm_eps), state, extras

    def logits(self, hidden: jax.Array) -> jax.Array:
        """Logits `[..., V]`, at least float32, of hidden states `[..., E]`."""
        wide = jnp.promote_types(hidden.dtype, jnp.float32)
        if self.head is None:
            return jnp.einsum(
                "...e,ve->...v", hidden, self.embedding[...], precision="highest", preferred_element_type=wide
            )
        return jnp.einsum("...e,ev->...v", hidden, self.head[...], precision="highest", preferred_element_type=wide)

    def value_metric(self) -> np.ndarray:
        """Float64 `[L, K, D, D]` on the host: the mean of `W_o W_o^T` over the query heads of each KV head's group.

        W_o `[D, E]` is one query head's part of the output projection; the metric is the squared norm of a value error
        after it (`calib`, V of the default recipe).
        """
        config = self.config
        group = config.q_heads // config.kv_heads
        metric = np.empty((config.layers, config.kv_heads, config.head_dim, config.head_dim))
        for index, weights in enumerate(np.asarray(self.layers.output[...])):
            output = weights.astype(np.float64)
            # [K, D, G * E]: with a group's heads side by side, one product sums over both the group and E.
            output = output.reshape(config.kv_heads, group, config.head_dim, -1).swapaxes(1, 2)
            output = output.reshape(config.kv_heads, config.head_dim, -1)
            metric[index] = output @ output.swapaxes(1, 2) / group
        return metric


def rms_norm(x: jax.Array, weight: nnx.Param, eps: float) -> jax.Array:
    """`x / rms(x) * weight` over the last axis; the statistics are at least float32, the result has the dtype of x."""
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    normed = wide * jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + eps)
    return normed.astype(x.dtype) * weight[...]


def _project(x: jax.Array, weight: nnx.Param, bias: nnx.Param | None = None) -> jax.Array:
    # "highest" keeps float32 from becoming TF32 or bfloat16 passes; for bfloat16 operands it changes nothing.
    product = partial(jnp.matmul, precision="highest")
    if x.size == x.shape[-1]:
        y = jax.lax.platform_dependent(x, weight[...], cuda=partial(_product_of_one, product), default=product)
    else:
        y = product(x, weight[...])
    return y if bias is None else y + bias[...]


def _product_of_one(product: Callable[..., jax.Array], x: jax.Array, weight: jax.Array) -> jax.Array:
    """XLA's GPU backend would write out all products of one row with a matrix, then sum; of two it makes a matmul."""
    return product(jnp.pad(x, [(0, 0)] * (x.ndim - 2) + [(0, 1), (0, 0)]), weight)[..., :1, :]
