"""A real model through `evaluate` and `generate` with two implementations, on the device that is here.

`python benchmarks/model_on_device.py --model DIR|GGUF --artifact DIR --text FILE --out RESULTS.json` writes the arm's
KL with each implementation in chunks of 256 (prefill) and of 16 tokens (a decode step of several tokens), and the
greedy continuations of one prompt with the first place where they differ.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np

from calib import artifact
from oscar_jax import calibrate, corpus, evaluate, generate
from oscar_jax.models import LoadedModel, load
from oscar_jax.session import Session
from oscar_jax.step import cache_config, make_step
from pallas_kernels.tiers import Tiers
from pallas_kernels.transform_code import TransformCodes

CHUNKS = (256, 16)
TIE = 1e-4  # of the two largest logits: a first difference below it is one of rounding


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("model", "artifact", "text", "out"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--sequence", type=int, default=2048)
    parser.add_argument("--offset", type=int, default=0)
    parser.add_argument("--prompt-tokens", type=int, default=1024)
    parser.add_argument("--max-tokens", type=int, default=200)
    parser.add_argument("--implementations", nargs=2, default=["xla", "triton"], metavar=("REFERENCE", "OTHER"))
    args = parser.parse_args()
    model = load(args.model)
    codes, manifest = artifact.load(args.artifact)
    text = corpus.heldout_text(
        calibrate.encoder(model), args.tokens, file=args.text, offset=args.offset, minimum=args.sequence
    )
    result: dict[str, Any] = {
        "device": jax.devices()[0].device_kind,
        "recipe": manifest.recipe,
        "generate": compare_texts(model, codes, [int(x) for x in text.tokens[: args.prompt_tokens]], args),
    }
    write(args.out, result)
    for chunk in CHUNKS:
        for name in args.implementations:
            begin = time.perf_counter()
            report = evaluate.evaluate(
                model, {manifest.recipe: codes}, text, sequence=args.sequence, tiers=Tiers(), implementation=name,
                chunk=chunk, progress=False,
            )  # fmt: skip
            arms = {arm: {k: v for k, v in row.items() if k != "kl_by_position"} for arm, row in report["arms"].items()}
            result[f"evaluate {name}, chunks of {chunk}"] = report | {"arms": arms}
            kl = arms[manifest.recipe]["kl_mean"]
            print(f"{name}, chunks of {chunk}: KL {kl:.6f}, {time.perf_counter() - begin:.0f} s", flush=True)
            write(args.out, result)
    first, other = (
        [result[f"evaluate {name}, chunks of {c}"]["arms"][manifest.recipe]["kl_mean"] for c in CHUNKS]
        for name in args.implementations
    )
    result["kl_ratio"] = {str(c): b / a for c, a, b in zip(CHUNKS, first, other, strict=True)}
    write(args.out, result)
    print("ratio of KL by chunk:", result["kl_ratio"])


def compare_texts(model: LoadedModel, codes: TransformCodes, prompt: list[int], args: argparse.Namespace) -> dict:
    """Greedy continuations with both implementations; where they part, how far apart the two best logits are."""
    found: dict[str, Any] = {"prompt_tokens": len(prompt), "max_tokens": args.max_tokens}
    tokens = []
    for name in args.implementations:
        begin = time.perf_counter()
        pieces = generate.stream(
            model, prompt, codes=codes, plain_dtype="bfloat16", max_tokens=args.max_tokens, implementation=name
        )
        text = "".join(pieces)
        tokens.append(pieces.tokens)
        found[name] = {"text": text, "tokens": len(pieces.tokens), "seconds": time.perf_counter() - begin}
    a, b = tokens
    same = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    found["equal_tokens"], found["equal"] = same, a == b
    if a != b:
        length = -(-(len(prompt) + args.max_tokens) // Tiers().page) * Tiers().page
        config = cache_config(
            model.config, max_length=length, plain_dtype="bfloat16", implementation=args.implementations[0]
        )
        logits = np.asarray(
            Session(make_step(model.decoder, config, codes)).prefill([prompt + a[:same]])[0], np.float64
        )
        second, best = np.sort(logits)[-2:]
        found["logit_gap_where_they_part"] = best - second
        found["a_tie"] = bool(best - second < TIE)
    print(f"greedy: {same} of {args.max_tokens} tokens equal", found.get("logit_gap_where_they_part"), flush=True)
    return found


def write(path: str, result: dict[str, Any]) -> None:
    Path(path).write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
