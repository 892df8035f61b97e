"""Two processes of this machine, joined by `jax.distributed`, against one."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys

import numpy as np

from calib import artifact
from oscar_jax.models import hf
from oscar_jax.models.decoder import parameter_shapes
from oscar_jax.sharding import make_mesh, weight_spec
from tests import tiny_model
from tests.oscar_jax.two_processes import CONFIG, decoded
from tests.pallas_kernels.codes import transform_codes


def test_two_processes_decode_what_one_does_and_read_their_parts_only(tmp_path):
    codes = transform_codes(bucket=16, layers=CONFIG.layers, kv_heads=CONFIG.kv_heads, head_dim=CONFIG.head_dim)
    tiny_model.write(tmp_path / "model")
    artifact.save(tmp_path / "artifact", codes, artifact.Manifest("default"))
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    environment = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.oscar_jax.two_processes", str(rank), str(port), str(tmp_path)],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment,
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        expected = decoded(hf.read_decoder(tmp_path / "model", CONFIG, dtype="float32"), codes)
        outputs = [process.communicate(timeout=300) for process in processes]
    finally:
        for process in processes:
            process.kill()  # if one failed, the other waits for it
    assert [process.returncode for process in processes] == [0, 0], outputs
    found = [json.loads(output.splitlines()[-1]) for output, _ in outputs]
    assert [each["tokens"] for each in found] == [expected] * 2
    assert [each["heads"] for each in found] == [[0], [1]]  # codes lie with their heads
    mesh = make_mesh(tensor=2)
    sizes = {}
    for name, kind in parameter_shapes(CONFIG).items():
        layers = CONFIG.layers if name.startswith("layers.") else 1
        divided = 2 if "tensor" in weight_spec(name, CONFIG, mesh) else 1
        sizes[name] = 4 * layers * int(np.prod(kind.shape)) // divided
    assert [each["read"]["bytes"] for each in found] == [sum(sizes.values())] * 2
    assert all(each["read"]["largest"] == sizes["embedding"] for each in found)  # a vocabulary of 257 is not divided
