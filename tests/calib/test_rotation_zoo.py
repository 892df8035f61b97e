"""RotationZoo files: real ones, round trips, and files that try to run code."""

import collections
import dataclasses
import errno
import os
import pickle
import struct
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest

from calib import restricted_pickle, rotation_zoo
from calib.rotation_zoo import LayerRotation, RotationFile
from tests.pallas_kernels import codes as seeded

ZOO = Path(__file__).parents[2].parent / "shared" / "data" / "rotation_zoo"
QWEN3 = (ZOO / "qwen3-8b" / "k_rotation_qqt_r_h_pbr.pt", ZOO / "qwen3-8b" / "v_rotation_sst_r_h_pbr.pt")
HADAMARD = ZOO / "qwen3.5-4b-hadamard" / "k_rotation.pt"
REAL = (*QWEN3, HADAMARD)


def real(path):
    if not path.exists():
        pytest.skip(f"{path} is not here; the rotation files are development data")
    return path


def rotations(*shape, seed=0):
    return np.linalg.qr(np.random.default_rng(seed).normal(size=(*shape, shape[-1])))[0].astype(np.float32)


def rotation_file(*, heads=None, layers=3, dim=16, seed=0, **changes):
    shape = (layers, dim) if heads is None else (layers, heads, dim)
    fields = {
        "format_version": 1 if heads is None else 2,
        "objective": "qqt_r_h_pbr",
        "source_grouping": "layer" if heads is None else "per_kv_head",
        "layers": {
            layer: LayerRotation(rotation, np.arange(dim, dtype=np.float32))
            for layer, rotation in enumerate(rotations(*shape, seed=seed))
        },
    }
    return RotationFile(**(fields | changes))


def assert_equal(got, wanted):
    assert (got.format_version, got.objective, got.source_grouping) == (
        wanted.format_version,
        wanted.objective,
        wanted.source_grouping,
    )
    assert (got.string_ids, got.extra, list(got.layers)) == (wanted.string_ids, wanted.extra, list(wanted.layers))
    for layer, entry in wanted.layers.items():
        np.testing.assert_array_equal(got.layers[layer].rotation, entry.rotation, strict=True)
        if entry.eigenvalues is None:
            assert got.layers[layer].eigenvalues is None
        else:
            np.testing.assert_array_equal(got.layers[layer].eigenvalues, entry.eigenvalues, strict=True)


def hadamard(dim):
    matrix = np.ones((1, 1))
    while len(matrix) < dim:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return matrix / np.sqrt(dim)


@pytest.mark.parametrize("path", REAL, ids=lambda path: path.stem)
def test_real_file_equals_torch(path):
    torch = pytest.importorskip("torch", reason="torch is the other reader")
    got, wanted = rotation_zoo.read(real(path)), torch.load(path, weights_only=True)
    assert (got.format_version, got.objective, got.source_grouping) == (1, wanted["objective"], "layer")
    assert list(got.layers) == list(wanted["layers"])
    for layer, entry in wanted["layers"].items():
        np.testing.assert_array_equal(got.layers[layer].rotation, entry["rotation"].numpy(), strict=True)
        np.testing.assert_array_equal(got.layers[layer].eigenvalues, entry["eigenvalues"].numpy(), strict=True)


@pytest.mark.parametrize("path", REAL, ids=lambda path: path.stem)
def test_real_file_round_trips_bit_equal(path, tmp_path):
    file = rotation_zoo.read(real(path))
    rotation_zoo.write(tmp_path / "a.pt", file)
    assert_equal(rotation_zoo.read(tmp_path / "a.pt"), file)


@pytest.mark.parametrize(("path", "sharper"), [(QWEN3[0], 15), (QWEN3[1], 1.1)], ids=["key", "value"])
def test_real_composition_is_u_h_p(path, sharper):
    """R = U H P_br with P[:, j] = e_pi(j), pi(j) = D - 1 - bit reversal of j, so U = R P^T H.

    U is orthogonal whatever was multiplied. That it is U, and not another product, shows in its columns: eigenvectors
    of keys after rotary positions stay near pairs of channels, while columns of a Hadamard product are spread out.
    """
    file = rotation_zoo.read(real(path))
    dim, bits = file.head_dim, file.head_dim.bit_length() - 1
    order = [dim - 1 - int(f"{j:0{bits}b}"[::-1], 2) for j in range(dim)]
    assert order[:8] == [127, 63, 95, 31, 111, 47, 79, 15]
    recovered = []
    for layer, entry in file.layers.items():
        u = entry.rotation.astype(np.float64) @ np.eye(dim)[:, order].T @ hadamard(dim)
        assert np.abs(u.T @ u - np.eye(dim)).max() < 1e-5, layer
        assert entry.eigenvalues is not None
        assert np.all(np.diff(entry.eigenvalues) >= 0), layer
        recovered.append(u)
    rotations = [entry.rotation for entry in file.layers.values()]
    assert np.mean(np.array(recovered) ** 4) > sharper * np.mean(np.array(rotations) ** 4)


def test_real_hadamard_file_is_the_hadamard_matrix():
    for entry in rotation_zoo.read(real(HADAMARD)).layers.values():
        np.testing.assert_allclose(entry.rotation, hadamard(256), atol=1e-7)


@pytest.mark.parametrize("heads", [None, 2])
def test_write_is_read_by_torch_bit_equal(heads, tmp_path):
    torch = pytest.importorskip("torch", reason="torch is the other reader")
    file = rotation_file(heads=heads, layers=2, extra={"tokens": 70_000, "note": "x", "ratio": 0.5, "none": None})
    rotation_zoo.write(tmp_path / "a.pt", file)
    got = torch.load(tmp_path / "a.pt", weights_only=True)
    expected = {"format_version": file.format_version, "objective": file.objective}
    expected |= {"source_grouping": file.source_grouping, **file.extra}
    assert {name: value for name, value in got.items() if name != "layers"} == expected
    assert list(got["layers"]) == [0, 1]
    for layer, entry in got["layers"].items():
        assert entry["layer_id"] == layer
        assert entry["rotation"].dtype == torch.float32
        assert entry["rotation"].is_contiguous()
        np.testing.assert_array_equal(entry["rotation"].numpy(), file.layers[layer].rotation, strict=True)


@pytest.mark.parametrize("string_ids", [False, True])
def test_reads_what_torch_writes(string_ids, tmp_path):
    """String ids, a transposed (non-contiguous) tensor, tensors that share a storage, and an OrderedDict of layers."""
    torch = pytest.importorskip("torch", reason="torch is the other writer")
    both = torch.from_numpy(rotations(2, 16))
    layers = {
        str(i) if string_ids else i: {"layer_id": i, "rotation": matrix}
        for i, matrix in enumerate((both[0].T, both[1]))
    }
    content = {"format_version": 1, "objective": "o", "source_grouping": "layer", "layers": layers}
    torch.save(content, tmp_path / "a.pt")
    got = rotation_zoo.read(tmp_path / "a.pt")
    assert got.string_ids == string_ids
    np.testing.assert_array_equal(got.layers[0].rotation, both[0].numpy().T)
    np.testing.assert_array_equal(got.layers[1].rotation, both[1].numpy())
    rotation_zoo.write(tmp_path / "b.pt", got)
    assert_equal(rotation_zoo.read(tmp_path / "b.pt"), got)
    torch.save(collections.OrderedDict(content), tmp_path / "c.pt")
    assert_equal(rotation_zoo.read(tmp_path / "c.pt"), got)


def test_write_is_deterministic_and_replaces(tmp_path):
    file = rotation_file(heads=2)
    rotation_zoo.write(tmp_path / "a.pt", rotation_file(heads=3))
    for name in ("a.pt", "b.pt"):
        rotation_zoo.write(tmp_path / name, file)
    assert (tmp_path / "a.pt").read_bytes() == (tmp_path / "b.pt").read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.pt", "b.pt"]


def test_write_to_an_impossible_path_is_one_sentence(tmp_path):
    with pytest.raises(
        OSError, match=r"missing/a\.pt: cannot be written \(No such file or directory\); choose another"
    ):
        rotation_zoo.write(tmp_path / "missing" / "a.pt", rotation_file())


def test_a_full_disk_asks_for_space(tmp_path, monkeypatch):
    def full(path, data):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(OSError, match=r"a\.pt: cannot be written \(No space left on device\); free some space"):
        rotation_zoo.write(tmp_path / "a.pt", rotation_file())


def test_fault_r6_load_v1_v2():
    """A per-layer file serves every head with one matrix, a per-head file each head with its own."""
    shared, own = rotation_file(), rotation_file(heads=2)
    codes = rotation_zoo.to_codes(shared, own, kv_heads=2, clip=(0.96, 1.0))
    codes.check()
    for layer in range(3):
        for head in range(2):
            for code, matrix in (
                (codes.key, shared.layers[layer].rotation),
                (codes.value, own.layers[layer].rotation[head]),
            ):
                np.testing.assert_array_equal(code.encode[layer, head], matrix)
                np.testing.assert_array_equal(code.decode[layer, head], matrix.T)
    assert (codes.key.kind, codes.key.clip, codes.key.clip_ratio) == ("minmax", "rank", 0.96)
    assert (codes.value.kind, codes.value.clip) == ("minmax", "none")
    assert not codes.key.mu.any()
    assert (codes.bucket, codes.rotary, codes.scale_dtype) == (None, None, "float16")
    key, value = rotation_zoo.from_codes(codes)
    assert (key.format_version, key.source_grouping) == (1, "layer")
    assert (value.format_version, value.source_grouping) == (2, "per_kv_head")
    for layer in range(3):
        np.testing.assert_array_equal(key.layers[layer].rotation, shared.layers[layer].rotation, strict=True)
        np.testing.assert_array_equal(value.layers[layer].rotation, own.layers[layer].rotation, strict=True)


def test_layer_ids_choose_and_order_layers():
    file = rotation_file(layers=4)
    file = RotationFile(1, "o", "layer", {3 + 4 * layer: entry for layer, entry in file.layers.items()})
    codes = rotation_zoo.to_codes(file, file, kv_heads=1, layer_ids=[15, 3])
    np.testing.assert_array_equal(codes.key.encode[:, 0], [file.layers[15].rotation, file.layers[3].rotation])
    key, _ = rotation_zoo.from_codes(codes, layer_ids=[15, 3])
    assert list(key.layers) == [15, 3]


def test_identity_files_hold_the_identity(tmp_path):
    eye = np.eye(16, dtype=np.float32)
    file = RotationFile("identity-v1", "identity", "identity", {0: LayerRotation(eye)})
    rotation_zoo.write(tmp_path / "a.pt", file)
    codes = rotation_zoo.to_codes(rotation_zoo.read(tmp_path / "a.pt"), file, kv_heads=2)
    np.testing.assert_array_equal(codes.key.encode, np.broadcast_to(eye, (1, 2, 16, 16)))
    with pytest.raises(ValueError, match=r"layer 0: .* not the identity"):
        rotation_zoo.write(tmp_path / "a.pt", RotationFile("identity-v1", "i", "i", {0: LayerRotation(-eye)}))


@pytest.mark.parametrize("value", [np.nan, 1.001, 0.0])
def test_matrices_that_are_not_orthogonal_are_refused_by_layer_and_head(value, tmp_path):
    file = rotation_file(heads=2)
    rotation_zoo.write(tmp_path / "a.pt", file)
    file.layers[1].rotation[1] *= value
    data = (tmp_path / "a.pt").read_bytes()
    good = rotation_file(heads=2).layers[1].rotation.tobytes()
    assert data.count(good) == 1
    members = dict(archive_members(tmp_path / "a.pt"))
    members = {name: file.layers[1].rotation.tobytes() if data == good else data for name, data in members.items()}
    write_archive(tmp_path / "a.pt", members)
    with pytest.raises(ValueError, match=r"a\.pt: layer 1, head 1: rotation is not orthogonal"):
        rotation_zoo.read(tmp_path / "a.pt")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format_version": 3}, "format_version 3 is unknown"),
        ({"format_version": 2}, r"rotation is float32\[16, 16\], format_version 2 has float32\[heads, 16, 16\]"),
        ({"layers": {}}, "no layers"),
        ({"layers": {0: LayerRotation(np.eye(16))}}, "rotation is float64"),
    ],
)
def test_files_that_contradict_themselves_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(rotation_file(), **changes).check()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"layers": {0: {"rotation": 1.0}}}, "layer 0: rotation is float, expected a float32 tensor"),
        ({"layers": {0: {}}}, "layer 0: has no rotation"),
        ({"layers": {0: {"layer_id": 1}}}, "layer 0: layer_id says 1"),
        ({"layers": {1: {"layer_id": True}}}, "layer 1: layer_id is of type bool, expected int"),
        ({"format_version": True}, "lacks one of format_version"),
        ({"layers": {"01": {}}}, "layer key '01' is not a layer number"),
        ({"layers": {-1: {}}}, "layer key -1 is not a layer number"),
        ({"layers": {0: []}}, "layer 0: expected a dict"),
        ({"layers": []}, "without a dict of layers"),
        ({"surprise": {}}, "unknown entry 'surprise' of type dict"),
        ({"objective": None}, "lacks one of format_version, objective, source_grouping"),
    ],
)
def test_other_contents_are_refused_by_name(content, message, tmp_path):
    whole = {"format_version": 1, "objective": "o", "source_grouping": "layer", "layers": {}} | content
    write_pickle(tmp_path / "a.pt", pickle.dumps(whole, protocol=2))
    with pytest.raises(ValueError, match=message) as caught:
        rotation_zoo.read(tmp_path / "a.pt")
    assert str(tmp_path / "a.pt") in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"kv_heads": 3}, "rotations of 2 heads, the model has kv_heads=3"),
        ({"clip": (0.0, 0.9)}, "clip=0.0 of key"),
        ({"clip": (0.9, 1.5)}, "clip=1.5 of value"),
        ({"layer_ids": [0, 7]}, "7 not in the files"),
        ({"value": rotation_file(heads=2, layers=2)}, "key has layers 0, 1, 2, value has 0, 1"),
        ({"value": rotation_file(heads=2, dim=32)}, "key has head size 16, value has 32"),
    ],
)
def test_to_codes_refuses_what_does_not_fit(arguments, message):
    arguments = {"value": rotation_file(heads=2), "kv_heads": 2} | arguments
    with pytest.raises(ValueError, match=message):
        rotation_zoo.to_codes(rotation_file(heads=2), **arguments)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("levels", "kind 'levels' and coordinates of other than 2 bits and a mean and a decode matrix"),
        ("rotation-static", "a static clip threshold"),
        ("feedback", "an error feedback metric"),
    ],
)
def test_from_codes_refuses_what_a_file_cannot_hold(kind, message):
    with pytest.raises(ValueError, match=rf"the value code has .*{message}.* export codes of the recipes hadamard"):
        rotation_zoo.from_codes(seeded.transform_codes("rotation-rank", kind))


# Hostile files. The payloads would create `MARK`; running in a child process also shows that nothing imports torch.

MARK = "executed"


class Call:
    def __init__(self, function, *arguments):
        self.pair = function, arguments

    def __reduce__(self):
        return self.pair


def archive_members(path):
    with zipfile.ZipFile(path) as archive:
        return [(name.split("/", 1)[1], archive.read(name)) for name in archive.namelist()]


def write_archive(path, members, *, compression=zipfile.ZIP_STORED, root="archive/"):
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, data in members.items():
            archive.writestr(root + name, data)


def write_pickle(path, code, **members):
    write_archive(path, {"data.pkl": code, "byteorder": b"little", "version": b"3\n"} | members)


def tensor(
    *,
    storage=b"ctorch\nFloatStorage\n",
    key=b"X\1\0\0\0000",
    numel=b"K\4",
    size=b"K\4\x85",
    stride=b"K\1\x85",
    offset=b"K\0",
):
    persistent = b"(X\7\0\0\0storage" + storage + key + b"X\3\0\0\0cpu" + numel + b"tQ"
    return (
        b"\x80\2ctorch._utils\n_rebuild_tensor_v2\n("
        + persistent
        + offset
        + size
        + stride
        + b"\x89ccollections\nOrderedDict\n)RtR."
    )


HOSTILE = {
    "os.system": (pickle.dumps(Call(os.system, f"touch {MARK}"), 2), "refers to 'posix.system'"),
    "eval": (pickle.dumps(Call(eval, f"open({MARK!r}, 'w')"), 2), "refers to '__builtin__.eval'"),
    "nested reduce": (
        pickle.dumps({"layers": [Call(getattr, Call(__import__, "os"), "system")]}, 2),
        "refers to '__builtin__.getattr'",
    ),
    "non-tensor global": (b"\x80\2cnumpy\nndarray\n.", "refers to 'numpy.ndarray'"),
    "other torch global": (b"\x80\2ctorch\nload\n.", "refers to 'torch.load'"),
    "attribute of an allowed global": (b"\x80\2ccollections\nOrderedDict.fromkeys\n.", "refers to 'collections.Ord"),
    "unknown constructor": (b"\x80\2X\2\0\0\0os)R.", "calls something other than"),
    "OrderedDict of something": (b"\x80\2ccollections\nOrderedDict\n]\x85R.", "calls something other than"),
    "BUILD": (b"\x80\2}}b.", r"opcode b'b' at byte 4 is not allowed"),
    "INST": (f"\x80\2(S'touch {MARK}'\nios\nsystem\n.".encode("latin1"), r"opcode b'S' at byte 3"),
    "NEWOBJ": (b"\x80\2ccollections\nOrderedDict\n)\x81.", r"opcode b'\\x81'"),
    "STACK_GLOBAL": (b"\x80\2X\5\0\0\0posixX\6\0\0\0system\x93.", r"opcode b'\\x93'"),
    "EXT1": (b"\x80\2\x82\1.", r"opcode b'\\x82'"),
    "protocol 4": (pickle.dumps({}, 4), "protocol 4, expected 2"),
    "huge memo index": (b"\x80\2j\xff\xff\xff\xff.", "memo entry 4294967295, which was never stored"),
    "huge string": (b"\x80\2X\xff\xff\xff\xffx.", "ends in the middle"),
    "huge integer": (b"\x80\2\x8a\xff" + b"\x7f" * 255 + b".", "integer of 255 bytes"),
    "huge pickle": (b"\x80\2" + b"}" * (1 << 20) + b".", "data.pkl has 1048579 bytes, expected at most 1048576"),
    "many marks": (b"\x80\2" + b"(" * 100 + b".", "more than 64 levels"),
    "dict key that hashes slowly": (b"\x80\2})" + b"q\0h\0\x86" * 64 + b"Ns.", "dict key of type tuple"),
    "truncated": (b"\x80\2}(X\4\0", "ends in the middle"),
    "empty": (b"", "ends in the middle"),
    "nothing left": (b"\x80\2.", "exactly one value"),
    "pop below a mark": (b"\x80\2}(s.", "pops an empty stack"),
    "unopened mark": (b"\x80\2}u.", "mark that was never opened"),
    "string that is not UTF-8": (b"\x80\2X\1\0\0\0\xff.", "not UTF-8"),
    "missing storage": (tensor(key=b"X\1\0\0\0001"), "no member 'data/1'"),
    "storage that is a path": (tensor(key=b"X\5\0\0\0../d0"), "malformed storage reference"),
    "storage of another size": (tensor(numel=b"K\5"), "has 16 bytes, expected 5 of float32"),
    "storage type that is a string": (tensor(storage=b"X\1\0\0\0f"), "malformed storage reference"),
    "view past the end": (tensor(offset=b"K\1"), "does not fit its storage"),
    "stride past the end": (tensor(size=b"K\2\x85", stride=b"K\4\x85"), "does not fit its storage"),
    "expanded view": (tensor(size=b"J\xff\xff\xff\x7f\x85", stride=b"K\0\x85"), "does not fit its storage"),
    "negative stride": (tensor(stride=b"J\xff\xff\xff\xff\x85"), "malformed size, stride or offset"),
}


@pytest.mark.parametrize(("code", "message"), HOSTILE.values(), ids=HOSTILE)
def test_hostile_pickle_is_refused(code, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_pickle("a.pt", code, **{"data/0": bytes(16)})
    with pytest.raises(ValueError, match=message) as caught:
        rotation_zoo.read("a.pt")
    assert str(caught.value).startswith("a.pt: ")
    assert [path.name for path in tmp_path.iterdir()] == ["a.pt"]


def test_the_payload_of_the_hostile_files_does_work(tmp_path, monkeypatch):
    """Else the test above could not fail."""
    monkeypatch.chdir(tmp_path)
    pickle.loads(HOSTILE["os.system"][0])
    assert Path(MARK).exists()


def test_the_tensor_of_the_hostile_files_is_valid_unchanged(tmp_path):
    write_pickle(tmp_path / "a.pt", tensor(), **{"data/0": struct.pack("<4f", 1, 2, 3, 4)})
    np.testing.assert_array_equal(restricted_pickle.load(tmp_path / "a.pt"), [1, 2, 3, 4])


def test_a_self_containing_pickle_is_refused_without_recursion(tmp_path):
    write_pickle(tmp_path / "a.pt", b"\x80\2}q\0X\6\0\0\0layersh\0s.")
    with pytest.raises(ValueError, match="lacks one of"):
        rotation_zoo.read(tmp_path / "a.pt")


def test_a_storage_name_that_is_a_tensor_is_not_compared(tmp_path):
    """numpy compares by element, and has no truth value for that."""
    code = b"\x80\2(" + tensor()[2:-1] + b"ctorch\nFloatStorage\nX\1\0\0\0000X\3\0\0\0cpuK\4tQ."
    write_pickle(tmp_path / "a.pt", code, **{"data/0": bytes(16)})
    with pytest.raises(ValueError, match="malformed storage reference"):
        restricted_pickle.load(tmp_path / "a.pt")


# Tuples that are endless to print (and their neighbours): 2^40 leaves, and 200 000 levels.
SHARED = b")" + b"q\1h\1\x86" * 40
DEEP = b")" + b"\x85" * 200_000


@pytest.mark.parametrize("value", [SHARED, DEEP], ids=["shared", "deep"])
@pytest.mark.parametrize(
    ("place", "message"),
    [
        ("layer_id", "layer 0: layer_id is of type tuple, expected int"),
        ("rotation", "layer 0: rotation is tuple, expected a float32 tensor"),
        ("entry", "layer 0: expected a dict"),
        ("layers", "without a dict of layers"),
        ("format_version", "lacks one of format_version"),
        ("objective", "lacks one of format_version"),
        ("surprise", "unknown entry 'surprise' of type tuple"),
        ("whole", "holds a tuple without a dict of layers"),
        ("tensor size", "malformed size, stride or offset"),
        ("storage", "malformed storage reference"),
    ],
)
def test_values_that_are_endless_to_print_are_refused_at_once(value, place, message, tmp_path):
    def text(name):
        return b"X" + struct.pack("<I", len(name)) + name.encode()

    def entries(**values):
        return b"}(" + b"".join(text(name) + code for name, code in values.items()) + b"u"

    layer = {"layer_id": b"K\0", "rotation": tensor()[2:-1]}
    layer |= {place: value} if place in layer else {}
    if place == "tensor size":
        layer["rotation"] = tensor(size=value + b"\x85")[2:-1]
    if place == "storage":
        layer["rotation"] = tensor(key=value)[2:-1]
    layers = b"}(K\0" + (value if place == "entry" else entries(**layer)) + b"u"
    content = {"format_version": b"K\1", "objective": text("o"), "source_grouping": text("layer"), "layers": layers}
    content |= {place: value} if place in (*content, "surprise") else {}
    write_pickle(
        tmp_path / "a.pt",
        b"\x80\2" + (value if place == "whole" else entries(**content)) + b".",
        **{"data/0": bytes(16)},
    )
    with pytest.raises(ValueError, match=message):
        rotation_zoo.read(tmp_path / "a.pt")


@pytest.mark.parametrize(
    ("members", "options", "message"),
    [
        ({"data.pkl": b"\x80\2}.", "../../evil": b""}, {}, "is not a file below one root folder"),
        ({"data.pkl": b"\x80\2}.", "/evil": b""}, {}, "is not a file below one root folder"),
        ({"data.pkl": b"\x80\2}.", "x\\evil": b""}, {}, "is not a file below one root folder"),
        ({"data.pkl": b"\x80\2}."}, {"root": ""}, "is not a file below one root folder"),
        ({"data.pkl": b"\x80\2}." + b"}" * 999}, {"compression": zipfile.ZIP_DEFLATED}, "compressed or encrypted"),
        ({"data.pkl": b"\x80\2}.", "byteorder": b"big"}, {}, "not little-endian"),
        ({"other.pkl": b"\x80\2}."}, {}, "no single root folder with a data.pkl"),
    ],
)
def test_hostile_archive_is_refused(members, options, message, tmp_path):
    write_archive(tmp_path / "a.pt", members, **options)
    with pytest.raises(ValueError, match=message):
        rotation_zoo.read(tmp_path / "a.pt")
    assert [path.name for path in tmp_path.iterdir()] == ["a.pt"]


def test_members_that_overlap_or_repeat_are_refused(tmp_path):
    with zipfile.ZipFile(tmp_path / "a.pt", "w") as archive:
        archive.writestr("archive/data.pkl", b"\x80\2}.")
        archive.writestr("archive/data/0", bytes(4096))
        # A second directory entry for the same bytes, as quoted-overlap zip bombs have thousands of.
        info = archive.getinfo("archive/data/0")
        for index in range(1, 4):
            again = zipfile.ZipInfo(f"archive/data/{index}")
            again.header_offset, again.CRC, again.file_size, again.compress_size = (
                info.header_offset,
                info.CRC,
                info.file_size,
                info.compress_size,
            )
            archive.filelist.append(again)
    with pytest.raises(ValueError, match="claim more bytes than the file has"):
        rotation_zoo.read(tmp_path / "a.pt")


def test_truncated_corrupted_and_foreign_files_are_refused(tmp_path):
    path = tmp_path / "a.pt"
    rotation_zoo.write(path, rotation_file())
    data = path.read_bytes()
    damaged = bytearray(data)
    damaged[data.index(rotation_file().layers[0].rotation.tobytes()) + 5] ^= 1
    for content in (data[: len(data) // 2], data[:-30], bytes(damaged), b"", b"\x80\2}.", b"PK\3\4 not a zip"):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"a\.pt: not an intact torch zip archive"):
            rotation_zoo.read(path)
    with pytest.raises(ValueError, match="no such file"):
        rotation_zoo.read(tmp_path / "b.pt")
    with pytest.raises(ValueError, match=r": .*directory"):
        rotation_zoo.read(tmp_path)


def test_every_cut_of_a_pickle_is_refused(tmp_path):
    """A prefix of a real program is a ValueError, and so is one with a changed byte, unless it still makes sense."""
    rotation_zoo.write(tmp_path / "a.pt", rotation_file(layers=1))
    members = dict(archive_members(tmp_path / "a.pt"))
    code = members.pop("data.pkl")
    for cut in range(0, len(code), 3):
        write_pickle(tmp_path / "b.pt", code[:cut], **members)
        with pytest.raises(ValueError, match=r"b\.pt: "):
            restricted_pickle.load(tmp_path / "b.pt")
    rng = np.random.default_rng(0)
    refused = 0
    for position in rng.integers(len(code), size=200):
        changed = bytearray(code)
        changed[position] = rng.integers(256)
        write_pickle(tmp_path / "b.pt", bytes(changed), **members)
        try:
            rotation_zoo.read(tmp_path / "b.pt")
        except ValueError:
            refused += 1
    assert refused > 100


def test_reading_needs_no_torch_and_calls_nothing(tmp_path):
    """Audit events of a whole read, in a child process: no import of torch, no exec, no subprocess, no write."""
    rotation_zoo.write(tmp_path / "good.pt", rotation_file())
    write_pickle(tmp_path / "bad.pt", HOSTILE["os.system"][0])
    script = """
import sys
from calib import restricted_pickle
events = []
def audit(event, args):
    if event in ("import", "exec", "compile", "pickle.find_class") or event.startswith(("os.", "subprocess.")):
        events.append((event, str(args[0])[:60]))
    if event == "open" and args[1] not in ("r", "rb", None):
        events.append((event, args))
restricted_pickle.load(sys.argv[1])
sys.addaudithook(audit)
restricted_pickle.load(sys.argv[1])
try:
    restricted_pickle.load(sys.argv[2])
except ValueError:
    events.append("refused")
assert events == ["refused"], events
assert "torch" not in sys.modules and "pickle" not in vars(restricted_pickle)
"""
    arguments = [sys.executable, "-c", script, str(tmp_path / "good.pt"), str(tmp_path / "bad.pt")]
    done = subprocess.run(
        arguments, capture_output=True, text=True, cwd=Path(__file__).parents[2], timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
