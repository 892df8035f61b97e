"""A whole decode step of Qwen3-8B compiled for one v6e that is not there; prints what its arguments take as JSON.

`python -m tests.oscar_jax.tpu_step [layers]`. No TPU has run it.
"""

import json
import os
import sys

from pallas_kernels import tpu_compile

os.environ.update(tpu_compile.ENVIRONMENT)
CHIP, BATCH, CONTEXT = "v6e", 4, 32768


def qwen3_8b(layers: int):
    from oscar_jax.models.config import ModelConfig
    from pallas_kernels.rope import Rotary

    return ModelConfig(
        architecture="qwen3", vocab_size=151936, layers=layers, hidden_size=4096, mlp_size=12288, q_heads=32,
        kv_heads=8, head_dim=128, norm_eps=1e-6, rotary=Rotary.standard(128, 1e6), max_position=CONTEXT, qk_norm=True,
    )  # fmt: skip


def compiled_step(layers: int) -> dict:
    import jax
    import jax.numpy as jnp

    from oscar_jax import step
    from oscar_jax.cache import expected_bits, init_cache
    from oscar_jax.models.decoder import Decoder, parameter_shapes
    from pallas_kernels.rope import Rotary
    from pallas_kernels.transform_code import TransformCodes

    model = qwen3_8b(layers)
    weights = {
        name: jax.ShapeDtypeStruct((layers, *kind.shape) if name.startswith("layers.") else kind.shape, jnp.bfloat16)
        for name, kind in parameter_shapes(model).items()
    }
    decoder = jax.eval_shape(lambda weights: Decoder(model, weights), weights)
    side = tpu_compile.code_shapes("levels", kv_heads=model.kv_heads, head_dim=model.head_dim, layers=layers)
    codes = TransformCodes(side, side, Rotary.standard(128, 1e6), 2048, "float16")
    with tpu_compile.absent(CHIP):
        config = step.cache_config(
            model, max_length=CONTEXT, batch=BATCH, plain_dtype="bfloat16", implementation="tpu"
        )  # fmt: skip
        cache = jax.eval_shape(lambda: init_cache(config, codes))

    def run(cache, decoder, codes, tokens, counts):
        return step._run(decoder, codes, cache, tokens, counts, config=config, output="last")

    tokens, counts = (jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((BATCH, 1), (BATCH,)))
    memory = tpu_compile.compile_for(CHIP, run, cache, decoder, codes, tokens, counts, donate=(0,)).memory_analysis()
    assert memory is not None  # as it is for every compiled TPU program
    held = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves((decoder, codes, tokens, counts)))
    elements = 2 * layers * BATCH * CONTEXT * model.kv_heads * model.head_dim
    return {
        "arguments": memory.argument_size_in_bytes,
        "aliased": memory.alias_size_in_bytes,
        "temporary": memory.temp_size_in_bytes,
        "cache": sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(cache)),
        "others": held,
        "bits_an_element": 8 * memory.alias_size_in_bytes / elements,
        "expected_bits": expected_bits(config, codes, CONTEXT),
    }


if __name__ == "__main__":
    print(json.dumps(compiled_step(int(sys.argv[1]) if len(sys.argv) > 1 else 36)))
