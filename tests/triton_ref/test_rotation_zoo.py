"""RotationZoo files between the two frameworks: both read what either writes, bit for bit."""

from pathlib import Path

import numpy as np
import pytest

from calib import rotation_zoo as ours
from pallas_kernels.transform_code import TransformCodes
from tests.pallas_kernels.codes import transform_code

torch = pytest.importorskip("torch", reason="the reference's loader is PyTorch")

from triton_ref import linalg, rotation_zoo  # noqa: E402

ZOO = Path(__file__).parents[2].parent / "shared" / "data" / "rotation_zoo"
REAL = (
    ZOO / "qwen3-8b" / "k_rotation_qqt_r_h_pbr.pt",
    ZOO / "qwen3-8b" / "v_rotation_sst_r_h_pbr.pt",
    ZOO / "qwen3.5-4b-hadamard" / "k_rotation.pt",
)
LAYERS = (3, 7, 11)


def rotations(*lead, dim=32, seed=0):
    a = np.random.default_rng(seed).normal(size=(*lead, dim, dim))
    return linalg.reference_rotation(torch.from_numpy(a @ np.swapaxes(a, -1, -2))).float()


@pytest.mark.parametrize("heads", [None, 2], ids=["version 1", "version 2"])
def test_files_of_the_reference_round_trip(heads, tmp_path):
    matrices = rotations(len(LAYERS)) if heads is None else rotations(len(LAYERS), heads)
    eigenvalues = torch.arange(32).expand(len(LAYERS), 32).float() if heads is None else None
    options = {"objective": "qqt_r_h_pbr", "layer_ids": LAYERS, "eigenvalues": eigenvalues}
    rotation_zoo.save(tmp_path / "a.pt", matrices, **options)
    file = ours.read(tmp_path / "a.pt")
    assert (file.format_version, list(file.layers)) == (1 if heads is None else 2, list(LAYERS))
    ours.write(tmp_path / "b.pt", file)
    again = rotation_zoo.load(tmp_path / "b.pt", layer_ids=LAYERS, kv_heads=2)
    wanted = matrices if heads else matrices[:, None].expand(-1, 2, -1, -1)
    assert torch.equal(again, wanted)
    first, second = (torch.load(tmp_path / name, weights_only=True) for name in ("a.pt", "b.pt"))
    assert first.keys() == second.keys()
    for layer in LAYERS:
        assert first["layers"][layer].keys() == second["layers"][layer].keys()
        for name, value in first["layers"][layer].items():
            same = torch.equal(value, second["layers"][layer][name]) if name != "layer_id" else True
            assert same, (layer, name)


@pytest.mark.parametrize("per_head", [False, True])
def test_exported_codes_load_in_the_references_format(per_head, tmp_path):
    """Keys, dtypes and orientation: `x @ rotation` is what our encoder computes."""
    key, value = (transform_code("rotation-rank", layers=2, head_dim=64, seed=seed) for seed in (0, 1))
    codes = TransformCodes(key, value)
    files = ours.from_codes(codes, layer_ids=[4, 9])
    for code, file, name in zip((key, value), files, ("k.pt", "v.pt"), strict=True):
        ours.write(tmp_path / name, file)
        loaded = rotation_zoo.load(tmp_path / name, layer_ids=[4, 9], kv_heads=2)
        assert loaded.dtype == torch.float32
        x = torch.from_numpy(np.random.default_rng(2).normal(size=(5, 2, 64)).astype(np.float32))
        rotated = torch.einsum("tkd,kde->tke", x, loaded[0])
        encode = torch.from_numpy(np.array(code.encode))[0]
        assert torch.equal(rotated, torch.einsum("tkd,kde->tke", x, encode))
        assert torch.equal(loaded, torch.from_numpy(np.array(code.encode)))
    imported = ours.to_codes(*(ours.read(tmp_path / name) for name in ("k.pt", "v.pt")), kv_heads=2, clip=(0.96, 0.96))
    np.testing.assert_array_equal(imported.key.encode, key.encode)
    np.testing.assert_array_equal(imported.value.decode, value.decode)


@pytest.mark.parametrize("path", REAL, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_real_files_load_alike_and_round_trip_bit_equal(path, tmp_path):
    if not path.exists():
        pytest.skip(f"{path} is not here; the rotation files are development data")
    file = ours.read(path)
    layers = list(file.layers)
    loaded = rotation_zoo.load(path, layer_ids=layers, kv_heads=8)
    for layer, matrices in zip(layers, loaded, strict=True):
        for matrix in matrices:
            np.testing.assert_array_equal(matrix, file.layers[layer].rotation)
    ours.write(tmp_path / "again.pt", file)
    assert torch.equal(rotation_zoo.load(tmp_path / "again.pt", layer_ids=layers, kv_heads=8), loaded)


def test_what_the_loader_refuses(tmp_path):
    rotation_zoo.save(tmp_path / "a.pt", rotations(1, 3), objective="o", layer_ids=[0])
    with pytest.raises(ValueError, match="has 3 heads, expected 2"):
        rotation_zoo.load(tmp_path / "a.pt", layer_ids=[0], kv_heads=2)
    with pytest.raises(ValueError, match="no rotation for layer 5; the file has"):
        rotation_zoo.load(tmp_path / "a.pt", layer_ids=[5], kv_heads=3)
    torch.save({"format_version": 9}, tmp_path / "b.pt")
    with pytest.raises(ValueError, match="expected a dict with format_version"):
        rotation_zoo.load(tmp_path / "b.pt", layer_ids=[0], kv_heads=2)
