"""What the TPU's interpreter found in the kernel that it ran last, and tests that may wait forever in it."""

import os
import subprocess
import sys
from pathlib import Path

ALONE = "OSCAR_JAX_TEST_ALONE"  # in the environment of a process that runs one test
SECONDS = 300  # that a test may take; a minute on a busy machine


def found() -> bool:
    """Whether two accesses raced; needs `InterpretParams(detect_races=True)`. Nothing public of jax says so."""
    from jax._src.pallas.mosaic.interpret import interpret_pallas_call

    races = interpret_pallas_call.races
    assert races is not None, "nothing ran with the race detector"
    return races.races_found


def failure(test: str, seconds: float = SECONDS) -> str | None:
    """Runs a test in a process of its own; None if it passes, else why not.

    Args:
        test: its node id, from the repository's root.
    """
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-m", "", test]
    try:
        done = subprocess.run(
            command, timeout=seconds, capture_output=True, text=True, env=os.environ | {ALONE: "1"},
            cwd=Path(__file__).parents[2],
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return f"{test} has not ended after {seconds} s: does it wait for a copy that never starts?"
    return done.stdout + done.stderr if done.returncode else None
