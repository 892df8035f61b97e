"""A model's whole decode step compiled for TPUs that are not there; prints what its arguments take as JSON.

`python -m tests.oscar_jax.tpu_step [--model qwen3-8b] [--chip v6e] [--tensor 1] [--batch 4] [--context 32768]`;
`--results benchmarks/results/tpu-step.json` compiles all `SETTINGS` and writes that file. No TPU has run any.
"""

import argparse
import dataclasses
import json
import math
import os
from pathlib import Path

from pallas_kernels import tpu_compile

os.environ.update(tpu_compile.ENVIRONMENT)


@dataclasses.dataclass(frozen=True)
class Setting:
    """What is compiled: a name of `models`, a name of `tpu_compile.TOPOLOGIES`, and sizes."""

    model: str = "qwen3-8b"
    chip: str = "v6e"
    tensor: int = 1  # chips that heads and weights are divided over
    batch: int = 4
    context: int = 32768

    @property
    def command(self) -> str:
        """That compiles this."""
        options = [f"--{name} {value}" for name, value in dataclasses.asdict(self).items()]
        return " ".join(["python -m tests.oscar_jax.tpu_step", *options])


SETTINGS = (
    Setting(),
    Setting(chip="v5e", tensor=4),
    Setting("llama-3.2-1b"),
    Setting("llama-3.2-1b", batch=16, context=4096),
    Setting("llama-3.2-1b", "v5e", tensor=4, batch=16, context=4096),
)
RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "tpu-step.json"


def models() -> dict:
    """Shapes of models by name."""
    from oscar_jax.models.config import ModelConfig
    from pallas_kernels.rope import Rotary

    return {
        "qwen3-8b": ModelConfig(
            architecture="qwen3", vocab_size=151936, layers=36, hidden_size=4096, mlp_size=12288, q_heads=32,
            kv_heads=8, head_dim=128, norm_eps=1e-6, rotary=Rotary.standard(128, 1e6), max_position=40960, qk_norm=True,
        ),
        "llama-3.2-1b": ModelConfig(
            architecture="llama", vocab_size=128256, layers=16, hidden_size=2048, mlp_size=8192, q_heads=32,
            kv_heads=8, head_dim=64, norm_eps=1e-5, rotary=Rotary.standard(64, 5e5), max_position=131072,
            tied_embeddings=True,
        ),
    }  # fmt: skip


def compiled_step(setting: Setting) -> dict:
    """Bytes of the compiled step on each chip."""
    import jax
    import jax.numpy as jnp

    from oscar_jax import sharding, step
    from oscar_jax.cache import SPECS, expected_bits, init_cache
    from oscar_jax.layer_codes import for_kernels
    from oscar_jax.models.decoder import Decoder, parameter_shapes
    from pallas_kernels.transform_code import TransformCodes

    model, batch, context = models()[setting.model], setting.batch, setting.context
    mesh = sharding.make_mesh(tensor=setting.tensor, devices=tpu_compile.described(setting.chip))

    def on_mesh(shapes, specs):
        places = jax.tree.broadcast(sharding.named(mesh, specs), shapes)
        return jax.tree.map(lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), shapes, places)

    weights = {
        name: jax.ShapeDtypeStruct((model.layers,) * name.startswith("layers.") + kind.shape, jnp.bfloat16)
        for name, kind in parameter_shapes(model).items()
    }
    decoder = jax.eval_shape(lambda weights: Decoder(model, weights), weights)
    decoder = on_mesh(decoder, sharding.decoder_specs(decoder, mesh))
    side = tpu_compile.code_shapes("levels", kv_heads=model.kv_heads, head_dim=model.head_dim, layers=model.layers)
    codes = TransformCodes(side, side, model.rotary, 2048, "float16")
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):  # dispatch takes the TPU's kernels to be available
        config = step.cache_config(
            model, max_length=context, batch=batch, plain_dtype="bfloat16", implementation="tpu", mesh=mesh
        )  # fmt: skip
        codes = on_mesh(jax.eval_shape(lambda codes: for_kernels(config, codes), codes), sharding.CODES)
        cache = on_mesh(jax.eval_shape(lambda: init_cache(config, codes)), SPECS)
        tokens, counts = (
            on_mesh(jax.ShapeDtypeStruct(shape, jnp.int32), sharding.ROWS) for shape in ((batch, 1), (batch,))
        )
        traced = step._run.trace(decoder, codes, cache, tokens, counts, config=config, output="last")
        compiled = traced.lower(lowering_platforms=("tpu",)).compile()
    memory, text = compiled.memory_analysis(), compiled.as_text()
    assert memory is not None  # as it is for every compiled TPU program
    assert text is not None

    def held(*trees) -> int:
        """Bytes on one chip."""
        return sum(x.dtype.itemsize * math.prod(x.sharding.shard_shape(x.shape)) for x in jax.tree.leaves(trees))

    elements = 2 * model.layers * batch * context * model.kv_heads * model.head_dim // setting.tensor
    return {
        "command": setting.command,
        "jax": jax.__version__,
        "arguments": memory.argument_size_in_bytes,
        "aliased": memory.alias_size_in_bytes,
        "temporary": memory.temp_size_in_bytes,
        "cache": held(cache),
        "others": held(decoder, codes, tokens, counts),
        "bits_an_element": 8 * memory.alias_size_in_bytes / elements,
        "expected_bits": expected_bits(config, codes, context),
        "padding": tpu_compile.padding(text),
        "collectives": {
            name: text.count(f" {name}(") + text.count(f" {name}-start(")
            for name in ("all-reduce", "all-gather", "all-to-all", "collective-permute")
        },
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for field in dataclasses.fields(Setting):
        choices = {"model": list(models()), "chip": list(tpu_compile.TOPOLOGIES)}.get(field.name)
        parser.add_argument(f"--{field.name}", type=type(field.default), choices=choices, default=field.default)
    parser.add_argument("--results", type=Path, help="compile all settings and write this file")
    arguments = vars(parser.parse_args())
    path = arguments.pop("results")
    if path is None:
        print(json.dumps(compiled_step(Setting(**arguments))))
        return
    what = "bytes on each chip of the compiled decode step (one token a sequence, cache donated); no TPU has run it"
    path.write_text(json.dumps({"what": what, "rows": [compiled_step(each) for each in SETTINGS]}, indent=1) + "\n")


if __name__ == "__main__":
    main()
