"""Writes the test vectors: `python tests/vectors/generate.py [FOLDER]`. Needs PyTorch and numpy.

Seeds, threads and instructions are fixed; another processor may still sum in another order and change last bits.
`README.md` beside this file describes the format, `check.py` reads it without PyTorch.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np

# Read when PyTorch is imported: other instructions sum in another order.
os.environ |= {"ATEN_CPU_CAPABILITY": "avx2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"}
import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from triton_ref import cases
from triton_ref.cases import Case
from triton_ref.states import Shape
from triton_ref.tiers import Tiers

TIERS = Tiers(4, 8, 4, 16)
SERVED = Tiers(64, 256, 8, 128)


def all_cases() -> list[Callable[[], Case]]:
    """What makes each case."""
    make = functools.partial
    small = {"head_dim": 64, "kv_heads": 2, "bucket": 32}
    ragged = Shape((0, 3, 37, 110), tiers=TIERS)
    exact = {"degenerate": False, "kv_heads": 1}
    return [
        make(cases.packing_case),
        *(make(cases.codec_case, kind) for kind in cases.KINDS),
        make(cases.codec_case, "levels", head_dim=96, **exact),
        make(cases.codec_case, "rotation-rank", head_dim=128, **exact),
        make(cases.codec_case, "levels", head_dim=128, **exact),
        make(cases.clip_case),
        make(cases.clip_case, head_dim=64, ratio=0.96),
        make(cases.rotation_case, head_dim=64),
        make(cases.rotation_case, head_dim=96),
        make(cases.tiers_case),
        make(cases.demotion_case, "default", bucket=32),
        make(cases.demotion_case, "reference", bucket=None),
        make(cases.attention_case, "decode", ragged, "default", **small),
        make(cases.attention_case, "decode, reference codes", ragged, "reference", **small, seed=1),
        make(
            cases.attention_case, "four tokens, window, soft-cap, learnt sinks",
            Shape((0, 12, 90), tokens=4, counts=(4, 1, 3), q_heads=3, window=40, softcap=3.0, sinks=True, tiers=TIERS),
            ("default", "reference"), head_dim=96, kv_heads=1, bucket=32, seed=2,
        ),
        make(
            cases.attention_case, "float16 windows", dataclasses.replace(ragged, dtype=torch.float16), "default",
            **small, seed=3,
        ),
        make(
            cases.attention_case, "bfloat16 windows", dataclasses.replace(ragged, dtype=torch.bfloat16, q_heads=8),
            "default", **small, seed=4,
        ),
        make(
            cases.attention_case, "served windows",
            Shape((319, 320, 700), tiers=SERVED, dtype=torch.bfloat16, q_heads=7), "default", head_dim=128, kv_heads=1,
            bucket=256, seed=5,
        ),
        make(cases.calibration_case),
        make(cases.model_case),
    ]  # fmt: skip


def write(case: Case, path: Path) -> None:
    """One compressed `.npz`: `meta` (JSON), inputs as `in.<name>`, expected outputs as `out.<name>`."""
    arrays, narrow = {}, []
    for prefix, tensors in (("in", case.inputs), ("out", case.expected)):
        for name, tensor in tensors.items():
            if tensor.dtype == torch.bfloat16:
                narrow.append(f"{prefix}.{name}")
                tensor = tensor.view(torch.uint16)
            arrays[f"{prefix}.{name}"] = tensor.numpy()
    meta = {"format": cases.FORMAT, "operation": case.operation, "case": case.name, "bfloat16": narrow, **case.meta}
    np.savez_compressed(path, meta=np.array(json.dumps(meta)), **arrays)


def file_name(case: Case) -> str:
    return re.sub("[^a-z0-9]+", "-", f"{case.operation} {case.name}".lower()).strip("-") + ".npz"


def main(folder: Path) -> None:
    torch.set_num_threads(2)
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("*.npz"):
        old.unlink()
    for make in all_cases():
        case = make()
        write(case, folder / file_name(case))
    total = sum(path.stat().st_size for path in folder.glob("*.npz"))
    print(f"{len(list(folder.glob('*.npz')))} files, {total / 1e6:.2f} MB in {folder}")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent)
