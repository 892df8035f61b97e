"""A whole decode step of Qwen3-8B compiled for TPUs that are not there; prints what its arguments take as JSON.

`python -m tests.oscar_jax.tpu_step [--chip v6e] [--tensor 1] [--layers 36]`. No TPU has run it.
"""

import argparse
import json
import math
import os

from pallas_kernels import tpu_compile

os.environ.update(tpu_compile.ENVIRONMENT)
BATCH, CONTEXT = 4, 32768


def qwen3_8b(layers: int):
    from oscar_jax.models.config import ModelConfig
    from pallas_kernels.rope import Rotary

    return ModelConfig(
        architecture="qwen3", vocab_size=151936, layers=layers, hidden_size=4096, mlp_size=12288, q_heads=32,
        kv_heads=8, head_dim=128, norm_eps=1e-6, rotary=Rotary.standard(128, 1e6), max_position=CONTEXT, qk_norm=True,
    )  # fmt: skip


def compiled_step(chip: str, *, tensor: int, layers: int) -> dict:
    """Bytes of the compiled step on each chip; its heads and weights are divided over `tensor` of them."""
    import jax
    import jax.numpy as jnp

    from oscar_jax import sharding, step
    from oscar_jax.cache import SPECS, expected_bits, init_cache
    from oscar_jax.models.decoder import Decoder, parameter_shapes
    from pallas_kernels.rope import Rotary
    from pallas_kernels.transform_code import TransformCodes

    mesh = sharding.make_mesh(tensor=tensor, devices=tpu_compile.described(chip))

    def on_mesh(shapes, specs):
        places = jax.tree.broadcast(sharding.named(mesh, specs), shapes)
        return jax.tree.map(lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), shapes, places)

    model = qwen3_8b(layers)
    weights = {
        name: jax.ShapeDtypeStruct((layers, *kind.shape) if name.startswith("layers.") else kind.shape, jnp.bfloat16)
        for name, kind in parameter_shapes(model).items()
    }
    decoder = jax.eval_shape(lambda weights: Decoder(model, weights), weights)
    decoder = on_mesh(decoder, sharding.decoder_specs(decoder, mesh))
    side = tpu_compile.code_shapes("levels", kv_heads=model.kv_heads, head_dim=model.head_dim, layers=layers)
    codes = on_mesh(TransformCodes(side, side, Rotary.standard(128, 1e6), 2048, "float16"), sharding.CODES)
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):  # dispatch takes the TPU's kernels to be available
        config = step.cache_config(
            model, max_length=CONTEXT, batch=BATCH, plain_dtype="bfloat16", implementation="tpu", mesh=mesh
        )  # fmt: skip
        cache = on_mesh(jax.eval_shape(lambda: init_cache(config, codes)), SPECS)
        tokens, counts = (
            on_mesh(jax.ShapeDtypeStruct(shape, jnp.int32), sharding.ROWS) for shape in ((BATCH, 1), (BATCH,))
        )
        traced = step._run.trace(decoder, codes, cache, tokens, counts, config=config, output="last")
        compiled = traced.lower(lowering_platforms=("tpu",)).compile()
    memory, text = compiled.memory_analysis(), compiled.as_text()
    assert memory is not None  # as it is for every compiled TPU program
    assert text is not None

    def held(*trees) -> int:
        """Bytes on one chip."""
        return sum(x.dtype.itemsize * math.prod(x.sharding.shard_shape(x.shape)) for x in jax.tree.leaves(trees))

    elements = 2 * layers * BATCH * CONTEXT * model.kv_heads * model.head_dim // tensor
    return {
        "command": f"python -m tests.oscar_jax.tpu_step --chip {chip} --tensor {tensor} --layers {layers}",
        "model": "Qwen3-8B shapes", "batch": BATCH, "context": CONTEXT, "jax": jax.__version__,
        "arguments": memory.argument_size_in_bytes,
        "aliased": memory.alias_size_in_bytes,
        "temporary": memory.temp_size_in_bytes,
        "cache": held(cache),
        "others": held(decoder, codes, tokens, counts),
        "bits_an_element": 8 * memory.alias_size_in_bytes / elements,
        "expected_bits": expected_bits(config, codes, CONTEXT),
        "collectives": {
            name: text.count(f" {name}(") + text.count(f" {name}-start(")
            for name in ("all-reduce", "all-gather", "all-to-all", "collective-permute")
        },
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chip", choices=tpu_compile.TOPOLOGIES, default="v6e")
    parser.add_argument("--tensor", type=int, default=1)
    parser.add_argument("--layers", type=int, default=36)
    args = parser.parse_args()
    print(json.dumps(compiled_step(args.chip, tensor=args.tensor, layers=args.layers)))


if __name__ == "__main__":
    main()
