"""The vectors: small, reproducible, right by definitions that share no code with their maker."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from oscar_jax.parity import cases
from pallas_kernels.transform_code import TransformCode, TransformCodes
from tests.pallas_kernels import attention_definition as definition

FOLDER = Path(__file__).parents[1] / "vectors"
PATHS = sorted(FOLDER.glob("*.npz"))


def test_there_are_vectors_of_every_operation_in_less_than_5_mb():
    assert {cases.read(path).operation for path in PATHS} == set(cases.OPERATIONS)
    assert sum(path.stat().st_size for path in PATHS) < 5e6


def test_the_standalone_checker_accepts_them():
    done = subprocess.run(
        [sys.executable, FOLDER / "check.py"], capture_output=True, text=True, check=True, timeout=120
    )
    assert done.stdout.count(" ok\n") == 11
    assert len(done.stdout.splitlines()) == len(PATHS)


@pytest.mark.parametrize(("name", "array"), [("out.slots", "codec-levels-d-64"), ("out.scale", "codec-naive-d-64")])
def test_the_standalone_checker_notices_one_changed_bit(name, array, tmp_path):
    with np.load(FOLDER / f"{array}.npz") as file:
        arrays = {key: np.array(file[key]) for key in file.files}
    arrays[name].view(np.uint8)[-1, 0] ^= 1
    np.savez(tmp_path / "a.npz", **arrays)  # type: ignore[arg-type]
    done = subprocess.run(
        [sys.executable, FOLDER / "check.py", tmp_path], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode != 0
    assert "AssertionError" in done.stderr


def test_the_standalone_checker_needs_numpy_alone():
    code = (
        f"import sys, runpy; runpy.run_path({str(FOLDER / 'check.py')!r}); print(set(sys.modules) & {{'torch', 'jax'}})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.endswith("set()\n")


@pytest.mark.parametrize("path", [p for p in PATHS if p.stem.startswith("attention")], ids=lambda path: path.stem)
def test_attention_vectors_follow_the_definition(path):
    """Numpy, one query at a time, from the stored rows of the file."""
    case = cases.read(path)
    meta, arrays = case.meta, case.inputs
    tiers = SimpleNamespace(**dict(zip(("sink", "recent", "group", "page"), meta["tiers"], strict=True)))
    codes = _codes(case)
    for b, (start, count) in enumerate(zip(arrays["starts"], arrays["counts"], strict=True)):
        if not count:
            assert not case.expected["out"][b].any()
            continue
        total = int(start + count)
        rows = {}
        for side, new, code in (("key", "k", codes.key), ("value", "v", codes.value)):
            plain = np.zeros((total, *arrays[new].shape[2:]))
            ring = arrays[f"recent_{new}"].shape[1]
            for j in range(total):
                if j >= start:
                    plain[j] = arrays[new][b, j - start]
                elif j < tiers.sink:
                    plain[j] = arrays[f"sink_{new}"][b, j]
                elif j >= start - ring:
                    plain[j] = arrays[f"recent_{new}"][b, j % ring]
            hats = np.zeros_like(plain)
            turns = definition.bucket_rotations(codes, tiers, total, plain.shape[-1])
            for j in range(tiers.sink, definition.history_end(total - 1, tiers)):
                page, place = divmod(j - tiers.sink, tiers.page)
                at = arrays["page_indices"][b, page], slice(None), place
                stored = {n: x[at][None] for n, x in cases.part(arrays, f"pages.{side}").items()}
                slots = np.concatenate([stored["slots"] >> shift & 3 for shift in (0, 2, 4, 6)], -1)
                hat = definition.decode(code, 0, slots, stored["scale"], stored.get("offset"))[0]
                hats[j] = hat @ turns[j] if side == "key" else hat
            rows |= {new: plain, f"{new}_hat": hats}
        out = definition.attention(
            arrays["q"][b, :count], rows["k"], rows["v"], rows["k_hat"], rows["v_hat"], tiers=tiers,
            scale=meta["scale"], softcap=meta["softcap"], window=meta["window"], sink_logits=arrays.get("sink_logits"),
        )  # fmt: skip
        np.testing.assert_allclose(case.expected["out"][b, :count], out, rtol=1e-11, atol=1e-12)


def _codes(case):
    from pallas_kernels.rope import Rotary

    meta = case.meta["codes"]
    sides = [
        TransformCode.from_arrays(
            {name: x[None] for name, x in cases.part(case.inputs, f"codes.{side}").items()}, **meta[side]
        )
        for side in ("key", "value")
    ]
    turn = meta["rotary"]
    rotary = turn and Rotary(tuple(turn["inverse_frequencies"]), turn["rotary_dim"], turn["pairing"])
    return TransformCodes(sides[0], sides[1], rotary, meta["bucket"])


def test_attention_inputs_are_poisoned_where_nothing_is_stored():
    arrays = cases.read(FOLDER / "attention-decode.npz").inputs
    assert np.isnan(arrays["recent_k"]).any()
    assert np.isnan(arrays["pages.key.scale"].astype(np.float32)).any()
    assert (arrays["page_indices"] < 0).any()


def test_a_fresh_run_of_the_generator_says_the_same(tmp_path):
    """One file of each operation, up to what other threads and instructions round differently; alone, bit for bit."""
    pytest.importorskip("torch", reason="the generator is PyTorch")
    spec = importlib.util.spec_from_file_location("generate_vectors", FOLDER / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    generate = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(generate)
    makers = generate.all_cases()
    assert len(makers) == len(PATHS)
    for index in (0, 1, 10, 12, 14, 15, 17, 23, 24):
        case = makers[index]()
        generate.write(case, tmp_path / "a.npz")
        with np.load(tmp_path / "a.npz") as new, np.load(FOLDER / generate.file_name(case)) as old:
            assert set(new.files) == set(old.files)
            for name in old.files:
                if name == "meta":
                    assert json.loads(str(new[name])).keys() == json.loads(str(old[name])).keys()
                elif old[name].dtype.kind == "f":
                    largest = np.abs(old[name][np.isfinite(old[name])]).max(initial=0)
                    rounding = 1e-3 if old[name].dtype == np.float16 else 1e-6
                    np.testing.assert_allclose(new[name], old[name], rtol=rounding, atol=rounding * largest)
                else:
                    assert new[name].shape == old[name].shape
                    assert (new[name] != old[name]).sum() <= 1  # a near-tie


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"no archive", "not a vector file"),
        (b"", "not a vector file"),
        ((FOLDER / "packing-every-byte.npz").read_bytes()[:600], "not a vector file"),
        ({"x": np.zeros(1)}, "not a vector file"),
        ({"meta": np.array('{"format": 1}')}, "not a vector file"),
        ({"meta": np.array('{"format": 2, "operation": "codec", "case": "x", "bfloat16": []}')}, "format 2"),
    ],
)
def test_other_files_are_refused(content, message, tmp_path):
    path = tmp_path / "a.npz"
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        np.savez(path, **content)
    with pytest.raises(ValueError, match=message):
        cases.read(path)
    with pytest.raises(ValueError, match=r"no \.npz file"):
        cases.read_all(tmp_path / "nothing")
