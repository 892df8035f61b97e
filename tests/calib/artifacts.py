"""An artifact of small codes, and what the tests of artifacts do with it."""

import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp

from calib import artifact
from calib.identity import ModelIdentity, TextIdentity
from calib.manifest import SIDES, Manifest
from tests.pallas_kernels import codes as seeded

ROOT = Path(__file__).parents[2]
MODEL = ModelIdentity("tiny", "llama", "c" * 64, "7" * 64)
MANIFEST = Manifest(
    recipe="default",
    model=MODEL,
    text=TextIdentity("novels", "e" * 64, 16384),
    value_metric="output-projection",
    statistics_sink=16,
    statistics_recent=64,
    max_position=6144,
    covered_positions=2048,
)


def codes(key="levels", value="levels-uniform", **changes):
    return seeded.transform_codes(key, value, **({"layers": 4, "head_dim": 16, "bucket": 256} | changes))


def assert_same_codes(got, wanted):
    assert jax.tree.structure(got) == jax.tree.structure(wanted)
    for (path, leaf), other in zip(jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_array_equal(leaf, other, err_msg=jax.tree_util.keystr(path), strict=True)


def in_child(script, *arguments, devices=1, **options):
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
    }
    command = [sys.executable, "-W", "error", "-c", script, *map(str, arguments)]
    return subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120, check=False, **options
    )


def steps(path):
    return sorted(child.name for child in path.iterdir())


def rewrite(path, change_manifest=None, change_arrays=None):
    """A new step of the artifact with its content changed, as Orbax would store it, sealed anew."""
    _, manifest = artifact.load(path)
    arrays = {side: getattr(artifact.load(path)[0], side).arrays() for side in SIDES}
    tree = manifest.to_json()
    for change, content in ((change_manifest, tree), (change_arrays, arrays)):
        if change is not None:
            change(content)
    with artifact._manager(path) as manager:
        manager.save(
            1,
            args=ocp.args.Composite(
                arrays=ocp.args.StandardSave(arrays), manifest=ocp.args.JsonSave(artifact._sealed(tree))
            ),
        )


def change(path, value):
    def apply(tree):
        *parents, last = path.split(".")
        for name in parents:
            tree = tree[name]
        tree[last] = value

    return apply


def snapshot(folder):
    return {str(path.relative_to(folder)): path.is_file() and path.read_bytes() for path in folder.rglob("*")}
