"""`oscar-jax parity`: what it compares, what it prints, and that a wrong implementation fails."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from oscar_jax import cli, parity
from oscar_jax.parity import cases, rules

pytest.importorskip("torch", reason="half of the implementations are PyTorch")

VECTORS = {path.stem: path for path in parity.VECTORS.glob("*.npz")}


def read(name):
    return cases.read(VECTORS[name])


def test_json_has_a_verdict_for_every_row_and_a_reason_for_what_did_not_run(capsys):
    code = cli.main(["parity", "--implementations", "torch,triton", "--seeds", "1", "--json"])
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert code == 0
    assert report["passed"] is True
    fields = {"implementation", "operation", "case", "max_error", "relative_error", "slots_equal", "passed"}
    assert all(set(row) == fields for row in report["rows"])
    ran = {(row["implementation"], row["operation"]) for row in report["rows"]}
    assert {("torch", operation) for operation in cases.OPERATIONS} <= ran
    assert {("triton", operation) for operation in ("codec", "clip", "attention")} <= ran
    assert any("seed 1" in row["case"] for row in report["rows"])
    reasons = {(skip["implementation"], skip["operation"]): skip["reason"] for skip in report["skipped"]}
    assert "error feedback" in reasons["triton", "codec"]
    assert all(skip["reason"] for skip in report["skipped"])


def test_xla_and_interpreted_pallas_agree_on_some_vectors():
    """The whole matrix takes minutes: this is one file of each operation."""
    names = ("packing-every-byte", "codec-levels-d-64", "demotion-pages-default", "attention-decode-reference-codes")
    rows, skips = parity.compare([read(name) for name in names], seeds=0, only=("xla", "pallas-triton", "pallas-tpu"))
    assert [row for row in rows if not row.passed] == []
    ran = {(row.implementation, row.operation) for row in rows}
    assert ("xla", "codec") in ran
    assert {(f"pallas-{kind}", name) for kind in ("triton", "tpu") for name in ("attention", "demotion")} <= ran
    assert not [skip for skip in skips if skip.case]


def test_an_implementation_that_crashes_fails_its_row_and_the_others_are_judged(capsys):
    case, good = read("codec-naive-d-64"), read("packing-every-byte")
    bad = dataclasses.replace(case, inputs={name: x for name, x in case.inputs.items() if name != "x"})
    rows, _ = parity.compare([bad, good], seeds=0, only=("torch",))
    assert [(row.operation, row.passed) for row in rows] == [("codec", False), ("packing", True)]
    assert "torch codec naive, D=64: KeyError('x')" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["packing-every-byte", "codec-naive-d-64", "rotations-d-64", "attention-decode"])
def test_no_output_is_no_agreement(name):
    assert not rules.judge(read(name), {}).passed


def test_the_table_shows_the_matrix_every_row_and_reasons(capsys):
    assert cli.main(["parity", "--implementations", "torch", "--seeds", "0"]) == 0
    out = capsys.readouterr().out
    header, *lines = out.splitlines()
    assert header.split() == list(cases.OPERATIONS)
    torch_line = next(line for line in lines if line.startswith("torch"))
    assert torch_line.split()[1:] == ["1/1", "9/9", "2/2", "2/2", "3/3", "6/6", "1/1", "1/1"]
    assert "FAIL" not in out
    assert "25 of 25 passed" in out


def test_an_unknown_implementation_or_an_empty_folder_is_one_sentence(capsys, tmp_path):
    assert cli.main(["parity", "--implementations", "jax"]) == 2
    assert "expected some of xla, pallas-triton" in capsys.readouterr().err
    assert cli.main(["parity", "--vectors", str(tmp_path)]) == 2
    assert "no .npz file" in capsys.readouterr().err


def perturbed(case, name, change):
    outputs = {key: np.array(x) for key, x in case.expected.items()}
    outputs[name] = change(outputs[name])
    return outputs


def flip_first_byte(x):
    x = np.array(x)
    x.reshape(-1)[-1] ^= 1
    return x


@pytest.mark.parametrize(
    ("name", "array", "change"),
    [
        ("packing-every-byte", "packed", flip_first_byte),
        ("clip-d-128-ratio-0-92", "rank.slots", flip_first_byte),
        ("clip-d-128-ratio-0-92", "bisect.zero", lambda x: np.nextafter(x, np.float32(9))),
        ("demotion-history-end", "history_end", lambda x: x + 1),
        ("demotion-pages-default", "pages.key.slots", flip_first_byte),
        ("demotion-pages-default", "pages.value.scale", lambda x: (x * 1.01).astype(x.dtype)),
        ("rotations-d-64", "rotation", lambda x: x + 1e-6),
        ("calibration-two-layers-ragged", "moments.weighted_key", lambda x: x * (1 + 1e-10)),
        ("calibration-two-layers-ragged", "oscar-head.key.rotation", lambda x: x[..., ::-1, :]),
        ("attention-decode", "out", lambda x: x + 1e-4),
        ("attention-bfloat16-windows", "out", lambda x: x * 1.05),
        ("model-tiny-llama", "logits", lambda x: x + 1e-8),
        ("model-tiny-llama", "key.slots", flip_first_byte),
    ],
)
def test_a_wrong_output_fails_and_the_right_one_passes(name, array, change):
    case = read(name)
    assert rules.judge(case, {key: np.array(x) for key, x in case.expected.items()}).passed
    assert not rules.judge(case, perturbed(case, array, change)).passed


@pytest.mark.parametrize("kind", ["levels", "naive", "rotation-static", "feedback"])
def test_a_wrong_code_fails(kind):
    case = read(f"codec-{kind}-d-64")
    wanted = {name: case.expected[name] for name in ("slots", "scale", "offset") if name in case.expected}
    right = {f"y.{name}": x for name, x in wanted.items()} | wanted | {"x_hat": case.expected["x_hat"]}
    assert rules.judge(case, right).passed
    far = np.array(wanted["slots"])
    far[8:] ^= 0b11
    # With feedback only the error counts, and slots that are all wrong have much more of it.
    assert not rules.judge(case, right | {"slots": far}).passed
    assert not rules.judge(case, right | {"y.slots": far}).passed
    assert not rules.judge(case, right | {"x_hat": case.expected["x_hat"] * 1.001}).passed


def test_a_near_tie_may_go_either_way_and_a_clear_case_may_not():
    case = read("codec-naive-d-64")
    code = rules.TransformCode.from_arrays(cases.part(case.inputs, "code"), **case.meta["code"])
    y = np.zeros((1, 2, 64)) + np.linspace(0, 3, 64)
    y[..., 20] = 1.5 + 1e-5  # the threshold between levels 1 and 2, from above
    slots = np.floor(y / 1.0 + 0.5).astype(np.uint8)
    rows = {"slots": np.bitwise_or.reduce(slots.reshape(1, 2, 4, 16) << np.array([0, 2, 4, 6])[:, None], axis=2)}
    rows |= {"scale": np.ones((1, 2), np.float16), "offset": np.zeros((1, 2), np.float16)}

    def lowered(coordinate):
        other = slots.copy()
        other[0, 0, coordinate] -= 1
        packed = np.bitwise_or.reduce(other.reshape(1, 2, 4, 16) << np.array([0, 2, 4, 6])[:, None], axis=2)
        return rows | {"slots": packed}

    assert rules.near_ties(code, y, rows, rows)
    assert rules.near_ties(code, y, lowered(20), rows)
    assert not rules.near_ties(code, y, lowered(40), rows)
    assert not rules.near_ties(code, y, rows | {"scale": np.full((1, 2), 1.002, np.float16)}, rows)
    assert rules.near_ties(code, y, rows | {"scale": np.full((1, 2), 1.001, np.float16)}, rows)


def test_vectors_are_where_the_command_looks():
    assert Path(parity.VECTORS) == Path(__file__).parents[1] / "vectors"
