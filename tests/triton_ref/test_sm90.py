"""The reference's Triton kernels compile for Hopper without a GPU, and none spills."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="the reference is PyTorch")
pytest.importorskip("triton", reason="the kernels are Triton")


def test_kernels_compile_for_hopper_without_spills(tmp_path):
    """In a process of its own: here, Triton interprets."""
    root = Path(__file__).parents[2]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": str(root), "TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, Path(__file__).with_name("sm90_compile.py")],
        capture_output=True, text=True, env=environment, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    lines = done.stdout.splitlines()
    assert len(lines) == 7
    for line in lines:
        match = re.search(r"(\d+) registers, (\d+) spilled, (\d+) shared", line)
        assert match, line
        registers, spilled, shared = map(int, match.groups())
        assert spilled == 0, line
        assert registers <= 255
        assert shared < 100_000
