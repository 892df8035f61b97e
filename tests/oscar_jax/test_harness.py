"""The command `lm-eval` on task files of our own, offline; running them needs lm-eval, which CI does not install."""

import errno
import importlib.util
import json
import math
import subprocess
import sys

import pytest

from calib import artifact
from oscar_jax import calibrate as calibration
from oscar_jax import cli, corpus, harness
from oscar_jax import report as reports

pytestmark = [
    pytest.mark.filterwarnings("ignore::calib.fit.ThinStatisticsWarning"),
    pytest.mark.filterwarnings("ignore::calib.fit.BucketCoverageWarning"),
]

_COMMON = """
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
metadata: {{version: 1}}
"""
_TASKS = {
    "stub_generate": """
output_type: generate_until
doc_to_text: "{{q}}"
doc_to_target: "{{a}}"
generation_kwargs: {until: ["~"], do_sample: true, temperature: 1.0, max_gen_toks: 8}
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
""",
    "stub_choice": """
output_type: multiple_choice
doc_to_text: "{{q}}"
doc_to_choice: "{{choices}}"
doc_to_target: 0
metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]
""",
    "stub_rolling": """
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{q}}{{a}}"
metric_list: [{metric: byte_perplexity, aggregation: weighted_perplexity, higher_is_better: false}]
""",
}


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("lm_eval") is None, reason="lm-eval is not installed: pip install 'oscar-jax[lm-eval]'"
)
def test_both_arms_answer_all_kinds_of_tasks(tiny, tiny_folder, tiny_text, tmp_path):
    """In a process of its own: the harness and what it imports warn of their own future."""
    docs = [{"q": "some prompt " * (3 + n), "a": "x", "choices": ["x", " yes", "no"]} for n in range(4)]
    data = tmp_path / "docs.jsonl"
    data.write_text("\n".join(json.dumps(doc) for doc in docs))
    for name, text in _TASKS.items():
        (tmp_path / f"{name}.yaml").write_text(f"task: {name}" + _COMMON.format(data=data) + text)
    text = corpus.calibration_text(calibration.encoder(tiny), 400, files=[tiny_text / "calibration.txt"])
    codes, manifest = calibration.calibrate(tiny, text, ["default"], sequence=400, progress=False)["default"]
    artifact.save(tmp_path / "codes", codes, manifest)
    command = [
        sys.executable,
        "-m",
        "oscar_jax.cli",
        "lm-eval",
        "--model",
        tiny_folder,
        "--artifact",
        tmp_path / "codes",
    ]
    command += ["--tasks", ",".join(_TASKS), "--include-path", tmp_path, "--seeds", "0,1", "--rows", "2", "--json"]
    command += ["--max-tokens", "8", "--max-length", "256", "--sink", "8", "--recent", "32"]
    done = subprocess.run(list(map(str, command)), check=True, capture_output=True, text=True)
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["tasks"].keys() == _TASKS.keys()
    for metrics in found["tasks"].values():
        for arms in metrics.values():
            assert [*arms] == ["bf16", "default"]
            assert all(len(arm["by_seed"]) == 2 for arm in arms.values())
    counts = found["answers"]["stub_generate"]
    assert {arm["generated"] for arm in counts.values()} == {8}
    assert all(0 < arm["truncated"] <= 8 and arm["tokens_mean"] <= 8 for arm in counts.values())
    arms = found["tasks"]["stub_rolling"]["byte_perplexity,none"]
    bits = [math.log(arms[name]["mean"]) for name in ("default", "bf16")]
    assert bits[0] == pytest.approx(bits[1], rel=0.03)


_COMMAND = ["lm-eval", "--model", "no-such", "--artifact", "no-such", "--tasks", "x", "--json", "--out"]


@pytest.mark.parametrize(
    ("out", "message"),
    [(".", "--out .: that is a folder"), (f"{__file__}/x.json", f"{__file__} is a file; expected a folder")],
)
def test_a_place_that_cannot_be_written_is_refused_before_anything_runs(monkeypatch, capsys, out, message):
    monkeypatch.setattr(harness, "load", lambda name: pytest.fail("loaded"))
    assert cli.main([*_COMMAND, out]) == 2
    assert message in capsys.readouterr().err


def test_a_report_that_cannot_be_written_is_printed_nevertheless(tiny, tmp_path, monkeypatch, capsys):
    def full(path, text):
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    monkeypatch.setattr(harness, "require_lm_eval", lambda: None)
    monkeypatch.setattr(harness, "load", lambda name: tiny)
    score = {"mean": 0.5, "standard_error": None, "by_seed": [0.5]}
    tasks = {"x": {"acc,none": {"bf16": score, "default": score}}}
    monkeypatch.setattr(harness, "load_arms", lambda *_, **__: {"default": None})
    monkeypatch.setattr(harness, "compare", lambda *_, **__: {"tasks": tasks, "answers": {}})
    monkeypatch.setattr(reports, "write_text", full)
    assert cli.main([*_COMMAND, str(tmp_path / "report.json")]) != 0
    printed = capsys.readouterr()
    found = json.loads(printed.out.splitlines()[-1])
    assert found["settings"]["max_tokens"] > 0
    assert found["artifacts"] == {"default": "no-such"}
    assert "  default (no-such)  " in printed.err
    assert "No space left on device" in printed.err
