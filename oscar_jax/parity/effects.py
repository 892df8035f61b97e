"""What each difference between the OSCAR reference and this project costs, on the activations of a real model.

`python -m oscar_jax.parity.effects [--json FILE]` prints the table of `docs/parity.md`. Numbers are relative errors of
attention's output, `|o - o_plain| / |o_plain|` over all queries, heads and the layers measured, o_plain from
unquantized rows; "apart" is the same distance from the first row's output.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

from oscar_jax import corpus
from oscar_jax.calibrate import calibrate, encoder
from oscar_jax.models import LoadedModel, load, plain_attention
from pallas_kernels.transform_code import TransformCodes as JaxCodes
from triton_ref import attention, codec, reference
from triton_ref.code import TransformCode, TransformCodes
from triton_ref.reference import REFERENCE, Semantics
from triton_ref.rope import Rotary
from triton_ref.tiers import Tiers

TIERS = Tiers(sink=16, recent=64, group=8)
TOKENS, PROMPT = 1024, 771  # not in step with the windows, so that counting recents from it differs
CALIBRATION_TOKENS = 4096
LAYER_STRIDE = 3
RECIPES = ("oscar-reference", "oscar-head", "oscar-paper", "default")


@dataclasses.dataclass(frozen=True)
class Variant:
    """A name, a recipe's codes, semantics, tokens a prefill chunk."""

    name: str
    recipe: str = "oscar-reference"
    semantics: Semantics = Semantics()  # noqa: RUF009
    chunk: int = 8192


WIDE = Semantics(parameters="zero-point", parameter_dtype=torch.float32)
VARIANTS = (
    Variant("this project's codec and tiers, the reference's rotations"),
    Variant("clip by writer: sorted in prefill, bisected in demotion", semantics=Semantics(clip="by-writer")),
    Variant("offset, fp32 parameters", semantics=Semantics(parameter_dtype=torch.float32)),
    Variant("zero point, fp32 parameters", semantics=WIDE),
    Variant("zero point, fp16 parameters", semantics=dataclasses.replace(WIDE, parameter_dtype=torch.float16)),
    Variant("zero point, bf16 parameters", semantics=dataclasses.replace(WIDE, parameter_dtype=torch.bfloat16)),
    Variant("BF16 tiers stored rotated", semantics=Semantics(frame="rotated")),
    Variant("recents counted from the prompt's end", semantics=Semantics(recents="from-prompt")),
    Variant("chunk-exact prefill, one chunk", semantics=Semantics(prefill="chunk-exact")),
    Variant("chunk-exact prefill, chunks of 256", semantics=Semantics(prefill="chunk-exact"), chunk=256),
    Variant("Lloyd-Max switch", semantics=dataclasses.replace(WIDE, codebook="lloyd-max")),
    Variant("groups of 32 channels", semantics=Semantics(group=32)),
    Variant("everything as in the reference", semantics=REFERENCE),
    Variant("everything as in the reference, chunks of 256", semantics=REFERENCE, chunk=256),
    Variant("a rotation for each KV head", "oscar-head"),
    Variant("the paper's value target, for the layer", "oscar-paper"),
    Variant("this project's default recipe", "default"),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--json", metavar="FILE")
    args = parser.parse_args()
    found = measure(load(args.model))
    print(f"{'variant':56} {'error':>8} {'decoded':>8} {'apart':>8}")
    for row in found["rows"]:
        print(f"{row['variant']:56} {row['error']:8.4f} {row['decoded_error']:8.4f} {row['apart']:8.4f}")
    if args.json:
        with open(args.json, "w") as file:
            json.dump(found, file, indent=1)


def measure(model: LoadedModel) -> dict[str, Any]:
    """`rows` of `variant`, `error` over all queries, `decoded_error` over those after the prompt, and `apart`."""
    encode = encoder(model)
    text = corpus.calibration_text(encode, CALIBRATION_TOKENS, subset=True)
    fitted = {name: codes for name, (codes, _) in calibrate(model, text, list(RECIPES)).items()}
    tokens = corpus.heldout_text(encode, tokens=TOKENS).tokens
    layers = range(0, model.config.layers, LAYER_STRIDE)
    activations = list(_layers(model, tokens, layers))
    exact = [_plain(*rows) for rows in activations]
    rows, base = [], exact
    for variant in VARIANTS:
        run = _serve(fitted[variant.recipe], variant)
        outputs = [run(layer, *qkv) for layer, qkv in zip(layers, activations, strict=True)]
        base = outputs if not rows else base
        rows.append(
            {
                "variant": variant.name,
                "error": _distance(outputs, exact, exact),
                "decoded_error": _distance(*([x[PROMPT:] for x in each] for each in (outputs, exact, exact))),
                "apart": _distance(outputs, base, exact),
            }
        )
    return {
        "model": model.identity.model_id, "text": "held-out Wikipedia summaries", "tokens": TOKENS, "prompt": PROMPT,
        "sink": TIERS.sink, "recent": TIERS.recent, "calibration_tokens": len(text.tokens), "layers": list(layers),
        "rows": rows,
    }  # fmt: skip


def _layers(model: LoadedModel, tokens: np.ndarray, layers: range) -> Iterator[tuple[torch.Tensor, ...]]:
    """q `[T, N, D]`, k, v `[T, K, D]` of each layer, fp32."""
    ids = jnp.asarray(tokens[None])
    positions = jnp.arange(len(tokens))[None]
    capture = jax.jit(lambda decoder: decoder(ids, positions, plain_attention(decoder.config, capture=True), None)[2])
    captured = [np.asarray(x) for x in capture(model.decoder)]
    for layer in layers:
        yield tuple(torch.from_numpy(np.array(x[layer, 0])) for x in captured)


def _plain(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    positions = torch.arange(len(q))
    return attention.attend(
        q, k, v, k, v, positions=positions, history_end=torch.zeros_like(positions), sink=0, scale=q.shape[-1] ** -0.5
    )


def _serve(codes: JaxCodes, variant: Variant) -> Callable[..., torch.Tensor]:
    """`run(layer, q, k, v) -> [T, N, D]`."""
    if codes.key.kind == "levels":
        return lambda layer, *rows: _serve_levels(_torch_codes(codes, layer), *rows)

    def run(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        key, value = (torch.from_numpy(np.array(side.encode[layer])) for side in (codes.key, codes.value))
        return reference.serve(
            q, k, v, (key, value), semantics=variant.semantics, tiers=TIERS, prompt=PROMPT, chunk=variant.chunk
        )

    return run


def _serve_levels(codes: TransformCodes, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    positions = torch.arange(len(q))
    k, v = k.bfloat16().float(), v.bfloat16().float()
    origins = codes.origins(positions, TIERS.sink)
    k_hat = codec.decode(codes.key, codec.encode(codes.key, codes.turn(k, -origins)))
    v_hat = codec.decode(codes.value, codec.encode(codes.value, v))
    return attention.attend(
        q, k, v, codes.turn(k_hat, origins), v_hat, positions=positions, history_end=TIERS.history_end(positions),
        sink=TIERS.sink, scale=q.shape[-1] ** -0.5,
    )  # fmt: skip


def _torch_codes(codes: JaxCodes, layer: int) -> TransformCodes:
    def side(code) -> TransformCode:
        arrays = {name: np.array(leaf[layer]) for name, leaf in code.arrays().items()}
        return TransformCode.from_arrays(arrays, kind=code.kind, clip=code.clip, clip_ratio=code.clip_ratio)

    rotary = codes.rotary and Rotary(codes.rotary.inverse_frequencies, codes.rotary.rotary_dim, codes.rotary.pairing)
    return TransformCodes(side(codes.key), side(codes.value), rotary, codes.bucket)


def _distance(a: list[torch.Tensor], b: list[torch.Tensor], unit: list[torch.Tensor]) -> float:
    difference = sum(float((x - y).double().square().sum()) for x, y in zip(a, b, strict=True))
    return (difference / sum(float(x.double().square().sum()) for x in unit)) ** 0.5


if __name__ == "__main__":
    main()
