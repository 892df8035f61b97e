"""`oscar-jax lm-eval`: tasks of lm-evaluation-harness with a 2-bit cache beside the plain one.

Both arms get the same prompts, seeds, concurrency and budget of tokens. Answers that the budget ended are counted
apart: a cache that makes a model ramble loses there first.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from calib.manifest import package_versions
from oscar_jax import report as reports
from oscar_jax.answering import Answerer
from oscar_jax.evaluate import BASELINE, artifacts, label, load_arms
from oscar_jax.layer_codes import LayerCodes
from oscar_jax.models import LoadedModel, load
from pallas_kernels.tiers import Tiers
from pallas_kernels.transform_code import TransformCodes


def compare(
    model: LoadedModel,
    arms: Mapping[str, TransformCodes | LayerCodes],
    tasks: Sequence[str],
    *,
    seeds: Sequence[int] = (0,),
    generation: str | None = None,
    include_path: str | None = None,
    limit: int | None = None,
    chat: bool = False,
    unsafe_code: bool = False,
    **options: Any,
) -> dict[str, Any]:
    """Runs tasks once for each arm and seed.

    Args:
        arms: transform codes by name; the plain cache runs first, as "bf16".
        tasks: names of the harness, or of files under `include_path`.
        generation: settings in the harness's form that override a task's, such as "do_sample=True,temperature=0.6".
        limit: documents of each task; None for all.
        chat: prompts through the model's chat template.
        unsafe_code: allow tasks that run the model's code.
        options: of `Answerer`.

    Returns:
        `tasks`: by task and metric, for each arm `mean` over seeds, `by_seed`, and `standard_error` of the mean over
        seeds (None for one seed). `answers`: by task and arm, over all seeds, `generated`, `truncated`, `prompts_cut`,
        `tokens_mean`, and by metric the mean of the documents without a truncated answer (`untruncated`).

    Raises:
        ValueError: lm-eval is not installed, a task is unknown, or as `Answerer`.
    """
    require_lm_eval()
    import lm_eval  # pyright: ignore[reportMissingImports]
    from lm_eval.tasks import TaskManager  # pyright: ignore[reportMissingImports]

    from oscar_jax.harness_model import OscarLM

    manager = TaskManager(include_path=include_path)
    unknown = [task for task in tasks if not manager.match_tasks([task])]
    if unknown:
        raise ValueError(f"tasks: {unknown[0]!r} is unknown to lm-eval; list them with `lm-eval ls tasks`.")
    metrics: dict[str, Any] = {}
    answers: dict[str, Any] = {}
    for arm, codes in {BASELINE: None, **arms}.items():
        lm = OscarLM(Answerer(model, codes, **options))
        for seed in seeds:
            lm.seed, lm.finished = seed, []
            found = lm_eval.simple_evaluate(
                model=lm,
                tasks=list(tasks),
                limit=limit,
                gen_kwargs=generation,
                apply_chat_template=chat,
                task_manager=manager,
                bootstrap_iters=0,
                random_seed=seed,
                confirm_run_unsafe_code=unsafe_code,
            )
            for task, values in found["results"].items():
                for metric, value in values.items():
                    if isinstance(value, int | float) and "stderr" not in metric and "," in metric:
                        metrics.setdefault(task, {}).setdefault(metric, {}).setdefault(arm, []).append(float(value))
            _count(answers, arm, lm.finished, found["samples"])
    return {
        "tasks": {
            task: {name: {arm: _over_seeds(each) for arm, each in of.items()} for name, of in by_metric.items()}
            for task, by_metric in metrics.items()
        },
        "answers": {
            task: {arm: _answers(counts) for arm, counts in by_arm.items()} for task, by_arm in answers.items()
        },
    }


def _over_seeds(values: list[float]) -> dict[str, Any]:
    error = float(np.std(values, ddof=1) / np.sqrt(len(values))) if len(values) > 1 else None
    return {"mean": float(np.mean(values)), "standard_error": error, "by_seed": values}


def _count(answers: dict[str, Any], arm: str, finished: Sequence[Any], samples: Mapping[str, Any]) -> None:
    """Adds one run's answers, and the scores of documents of which no answer was truncated."""
    for task in {each.task for each in finished}:
        counts = answers.setdefault(task, {}).setdefault(arm, {"finished": [], "scores": {}})
        own = [each for each in finished if each.task == task]
        counts["finished"] += own
        truncated = {each.document for each in own if each.truncated}
        for sample in samples.get(task, ()):
            for metric in sample.get("metrics", ()):
                value = sample.get(metric)
                if sample["doc_id"] not in truncated and isinstance(value, int | float):
                    name = f"{metric},{sample.get('filter', 'none')}"
                    counts["scores"].setdefault(name, []).append(float(value))


def _answers(counts: Mapping[str, Any]) -> dict[str, Any]:
    finished = counts["finished"]
    return {
        "generated": len(finished),
        "truncated": sum(each.truncated for each in finished),
        "prompts_cut": sum(each.prompt_cut > 0 for each in finished),
        "tokens_mean": float(np.mean([each.tokens for each in finished])),
        "untruncated": {name: float(np.mean(values)) for name, values in counts["scores"].items()},
    }


def require_lm_eval() -> None:
    """Raises ValueError where the harness is absent."""
    if importlib.util.find_spec("lm_eval") is None:
        raise ValueError("lm-eval is not installed; run pip install 'oscar-jax[lm-eval]'.")


def rows(found: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """The report for people, the header first; an arm of an artifact is followed by its path."""
    cells = [("task", "metric", "arm", "mean", "standard error", "untruncated", "truncated")]
    for task, metrics in found["tasks"].items():
        for metric, arms in metrics.items():
            for arm, value in arms.items():
                counts = found["answers"].get(task, {}).get(arm)
                error, rest = value["standard_error"], counts and counts["untruncated"].get(metric)
                cells.append(
                    (
                        task,
                        metric,
                        label(arm, found["artifacts"].get(arm)),
                        f"{value['mean']:.4f}",
                        "-" if error is None else f"{error:.4f}",
                        "-" if rest is None else f"{rest:.4f}",
                        f"{counts['truncated']} of {counts['generated']}" if counts else "-",
                    )
                )
    return cells


def run(args: argparse.Namespace) -> int:
    """`oscar-jax lm-eval`."""
    begin = time.perf_counter()
    if args.out:
        reports.require_place("--out", args.out, folder=False)
    require_lm_eval()
    model = load(args.model)
    max_length = args.max_length or model.config.max_position
    arms = load_arms(args.artifact, model, length=max_length)
    options = {
        "max_length": max_length,
        "max_tokens": args.max_tokens,
        "rows": args.rows,
        "tiers": Tiers(sink=args.sink, recent=args.recent),
        "plain_dtype": "bfloat16",
        "implementation": args.implementation,
    }
    found = compare(
        model, arms, args.tasks, seeds=args.seeds, generation=args.generation, include_path=args.include_path,
        limit=args.limit, chat=args.chat, unsafe_code=args.unsafe_code, **options,
    )  # fmt: skip
    settings = {name: options[name] for name in ("max_length", "max_tokens", "rows")}
    settings |= {"seeds": args.seeds, "generation": args.generation, "limit": args.limit, "chat": args.chat}
    settings |= {"sink": args.sink, "recent": args.recent}
    found |= {"model": model.identity.model_id, "settings": settings, "seconds": time.perf_counter() - begin}
    found["artifacts"] = artifacts(args, arms)
    found["versions"] = package_versions()
    print(reports.aligned(rows(found)), file=sys.stderr if args.json else sys.stdout)
    if args.json:  # before files: a full disk must not cost the run
        print(json.dumps(found))
    if args.out:
        reports.write_text(Path(args.out), json.dumps(found, indent=1) + "\n")
    return 0
