"""What rounding one layer alone costs, and `calibrate --average-bits`: a size for each layer from that.

Each layer is rounded alone in each size, the others plain; its cost is the KL of the next token. Costs of layers are
taken to add up.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from calib import fit
from calib.manifest import Manifest
from calib.recipes import get as get_recipe
from oscar_jax import calibrate, corpus, evaluate, layer_plan, one_pass
from oscar_jax.models import LoadedModel
from pallas_kernels.tiers import Tiers
from pallas_kernels.transform_code import TransformCodes

SIZES = (0.5, 1.0, 2.0)  # N as a multiple of D; staying plain is always a choice
WINDOW = 1024  # calibration tokens that the layers are measured on
TIERS = Tiers(sink=16, recent=64)


def layer_costs(
    model: LoadedModel, codes: Mapping[int, TransformCodes], windows: np.ndarray, *, progress: bool = True
) -> dict[int, list[float]]:
    """`LayerPlan.costs`: one forward pass over `windows` int `[windows, tokens]` for each layer and size."""
    layers = model.config.layers
    options = [one_pass.PLAIN, *(one_pass.from_codes(each) for each in codes.values())]
    alone = np.eye(layers, dtype=np.int32)
    arms = {
        f"{layer} {size}": one_pass.mixed(options, alone[layer] * (1 + number))
        for number, size in enumerate(codes)
        for layer in range(layers)
    }
    scores = evaluate.score_one_pass(model, arms, windows, tiers=TIERS, progress=progress)
    return {size: [float(scores[f"{layer} {size}"].kl.mean()) for layer in range(layers)] for size in codes}


def plan_layers(
    model: LoadedModel,
    text: corpus.TokenText,
    recipe: str,
    average_bits: float,
    *,
    sizes: Sequence[float] = SIZES,
    **options: Any,
) -> tuple[layer_plan.LayerPlan, Manifest]:
    """A size for each layer, from what each one costs on the first tokens of the text: one pass a layer and size.

    Args:
        average_bits: most bits of a history element, mean over layers, scales counted.
        sizes: N as multiples of D, rounded to multiples of 8; up to 1, or 2 or 3.
        options: of `calibrate`, without `slots`.

    Raises:
        ValueError: as `calibrate`; a recipe that takes no more than D slots, an average out of range.
    """
    of_recipe = get_recipe(recipe)
    options = {"sequence": None, "bucket": calibrate.BUCKET, "max_position": None, "value_metric": "output"} | options
    progress = options.setdefault("progress", True)
    dim = model.config.head_dim
    slots = [round(size * dim / 8) * 8 for size in sizes]
    # What cannot be met need not wait for a calibration.
    for each in slots:
        fit.slot_counts(of_recipe, dim, each)
    # As `TransformCode.row_bits` will be.
    scales = sum(16 * (1 + (side.kind == "minmax")) for side in (of_recipe.key, of_recipe.value))
    layer_plan.check_average(average_bits, (4 * min(slots) + scales) / (2 * dim))
    measured = calibrate.measure(model, text, [of_recipe], **options)
    codes = {each: measured.fit(of_recipe, slots=each) for each in slots}
    window = text.tokens[None, : min(WINDOW, model.config.max_position)]
    costs = layer_costs(model, codes, window, progress=progress)
    plan = layer_plan.choose(codes, costs, average_bits)
    return plan, measured.manifest(model, text, of_recipe, options["value_metric"])


def run(args: argparse.Namespace, model: LoadedModel, text: corpus.TokenText) -> int:
    """`oscar-jax calibrate --average-bits`."""
    begin = time.perf_counter()
    plan, of_recipe = plan_layers(
        model, text, args.recipe[0], args.average_bits, sequence=args.sequence, bucket=args.bucket,
        max_position=args.max_position, value_metric=args.value_metric, sizes=args.sizes or SIZES,
    )  # fmt: skip
    report = layer_plan.save(Path(args.out), plan, of_recipe)
    report |= {"artifact": args.out, "text": text.description, "seconds": time.perf_counter() - begin}
    if args.json:
        print(json.dumps(report))
        return 0
    print(f"calibrated {model.identity.model_id} on {text.description} in {report['seconds']:.0f} s")
    for size in dict.fromkeys(plan.slots):
        layers = [layer for layer, each in enumerate(plan.slots) if each == size]
        name = "plain" if size is None else f"{size} slots"
        print(f"  {name}: {len(layers)} layers ({', '.join(map(str, layers))})")
    print(f"  {report['bits_per_element']:.3f} bits an element of history")
    return 0
