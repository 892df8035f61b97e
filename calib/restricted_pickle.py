"""Read a `torch.save` zip archive as plain Python data and numpy arrays, without torch and without running code.

A pickle is a program for a small stack machine; its danger lies in the opcodes that import and call (GLOBAL, REDUCE,
BUILD, INST, OBJ, NEWOBJ, EXT*). The interpreter below knows only the opcodes that `torch.save` (protocol 2) writes for
dicts of tensors. GLOBAL looks a name up in a fixed table and pushes one of our own inert constants, REDUCE compares
with those constants and builds an OrderedDict or an array view: nothing in the file is ever imported, called, or
written to disk. Opcode meanings are those documented in the standard library's `pickletools`; the archive layout
(`<root>/data.pkl`, `<root>/data/<key>`, `<root>/byteorder`) is that of torch >= 1.6.

Bounds: members must be stored uncompressed and add up to no more than the archive, the pickle is at most
`MAX_PICKLE_BYTES` (so opcodes, stack and memo are bounded with it), open marks at most `MAX_MARKS`, and a tensor may
not be larger than its storage. The result can nest deeply, contain itself, or share its parts so often that printing,
comparing or hashing it never ends: a caller should look for the types it expects and touch nothing else.
"""

import collections
import dataclasses
import enum
import os
import re
import struct
import zipfile
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

MAX_ARCHIVE_BYTES = 4 << 30
MAX_PICKLE_BYTES = 1 << 20
MAX_MARKS = 64

_STORAGE_TYPES = {
    "DoubleStorage": np.float64,
    "FloatStorage": np.float32,
    "HalfStorage": np.float16,
    "BFloat16Storage": ml_dtypes.bfloat16,
    "LongStorage": np.int64,
    "IntStorage": np.int32,
    "ShortStorage": np.int16,
    "CharStorage": np.int8,
    "ByteStorage": np.uint8,
    "BoolStorage": np.bool_,
}


class _Constructor(enum.Enum):
    """The two callables of the allow-list, as values that cannot be called."""

    ORDERED_DICT = "collections.OrderedDict"
    REBUILD_TENSOR = "torch._utils._rebuild_tensor_v2"


@dataclasses.dataclass(frozen=True)
class _StorageType:
    dtype: np.dtype


@dataclasses.dataclass(frozen=True)
class _Storage:
    values: np.ndarray  # 1-D, read-only


_GLOBALS: dict[str, _Constructor | _StorageType] = {constructor.value: constructor for constructor in _Constructor}
_GLOBALS |= {f"torch.{name}": _StorageType(np.dtype(dtype)) for name, dtype in _STORAGE_TYPES.items()}


def load(path: str | os.PathLike[str]) -> Any:
    """The object that `torch.save` wrote to `path`.

    Tensors come back as read-only numpy views (bfloat16 as `ml_dtypes.bfloat16`), parameters and devices are ignored.

    Raises:
        ValueError: one sentence with the path, for a missing file, anything but an intact little-endian torch zip
            archive, a global outside the allow-list, an opcode outside the subset, or a size that contradicts another.
    """
    path = Path(path)
    try:
        if path.stat().st_size > MAX_ARCHIVE_BYTES:
            raise ValueError(f"the file has {path.stat().st_size} bytes, expected at most {MAX_ARCHIVE_BYTES}.")
        with zipfile.ZipFile(path) as archive:
            return _Interpreter(_Members(archive, path.stat().st_size)).run()
    except FileNotFoundError:
        raise ValueError(f"{path}: no such file; give the path of a .pt file written by torch.save.") from None
    except zipfile.BadZipFile as error:
        raise ValueError(
            f"{path}: not an intact torch zip archive ({error}); write it with torch.save of torch 1.6 or later."
        ) from None
    except (ValueError, OSError, EOFError, RuntimeError, struct.error, zipfile.LargeZipFile) as error:
        raise ValueError(f"{path}: {error}") from None


class _Members:
    """The members of one archive, by their name below its single root folder."""

    def __init__(self, archive: zipfile.ZipFile, archive_bytes: int) -> None:
        self._archive = archive
        self._infos: dict[str, zipfile.ZipInfo] = {}
        roots = set()
        for info in archive.infolist():
            parts = info.filename.split("/")
            if len(parts) < 2 or ".." in parts or "" in parts or "\\" in info.filename:
                raise ValueError(
                    f"archive member {info.filename[:80]!r} is not a file below one root folder, as torch.save writes."
                )
            if info.compress_type != zipfile.ZIP_STORED or info.file_size != info.compress_size or info.flag_bits & 0x1:
                raise ValueError(
                    f"archive member {info.filename[:80]!r} is compressed or encrypted; torch.save stores plain bytes."
                )
            name = "/".join(parts[1:])
            if name in self._infos:
                raise ValueError(f"archive member {info.filename[:80]!r} occurs twice.")
            roots.add(parts[0])
            self._infos[name] = info
        if len(roots) != 1 or "data.pkl" not in self._infos:
            raise ValueError(
                "the archive has no single root folder with a data.pkl; expected a file written by torch.save."
            )
        if sum(info.file_size for info in self._infos.values()) > archive_bytes:
            raise ValueError("the archive's members claim more bytes than the file has.")

    def size(self, name: str) -> int:
        if name not in self._infos:
            raise ValueError(f"the archive has no member {name!r}.")
        return self._infos[name].file_size

    def read(self, name: str) -> bytes:
        data = self._archive.read(self._infos[name]) if self.size(name) else b""
        if len(data) != self.size(name):
            raise ValueError(f"archive member {name!r} has {len(data)} bytes, expected {self.size(name)}.")
        return data

    def __contains__(self, name: str) -> bool:
        return name in self._infos


class _Interpreter:
    """The stack machine: `marks` are the heights of `stack` at open MARKs, `memo` holds the values stored by BINPUT."""

    def __init__(self, members: _Members) -> None:
        if members.size("data.pkl") > MAX_PICKLE_BYTES:
            raise ValueError(f"data.pkl has {members.size('data.pkl')} bytes, expected at most {MAX_PICKLE_BYTES}.")
        if "byteorder" in members and members.read("byteorder") != b"little":
            raise ValueError("the archive is not little-endian; write it on a little-endian machine.")
        self.members = members
        self.code = members.read("data.pkl")
        self.position = 0
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: dict[int, Any] = {}
        self.storages: dict[str, _Storage] = {}

    def run(self) -> Any:
        while (opcode := self.take(1)) != b".":
            handler = _OPCODES.get(opcode)
            if handler is None:
                raise ValueError(
                    f"pickle opcode {opcode!r} at byte {self.position - 1} is not allowed; "
                    "expected dicts of tensors written by torch.save."
                )
            handler(self)
        if len(self.stack) != 1 or self.marks:
            raise ValueError("the pickle does not leave exactly one value.")
        return self.stack[0]

    def take(self, count: int) -> bytes:
        data = self.code[self.position : self.position + count]
        if len(data) != count:
            raise ValueError("the pickle ends in the middle of an opcode.")
        self.position += count
        return data

    def unsigned(self, count: int) -> int:
        return int.from_bytes(self.take(count), "little")

    def pop(self) -> Any:
        # A mark is a floor: opcodes that pop values may not reach below the newest one.
        if len(self.stack) <= (self.marks[-1] if self.marks else 0):
            raise ValueError(f"the pickle pops an empty stack at byte {self.position}.")
        return self.stack.pop()

    def pop_to_mark(self) -> list[Any]:
        if not self.marks:
            raise ValueError(f"the pickle closes a mark that was never opened at byte {self.position}.")
        start = self.marks.pop()
        values = self.stack[start:]
        del self.stack[start:]
        return values

    def mark(self) -> None:
        if len(self.marks) == MAX_MARKS:
            raise ValueError(f"the pickle nests more than {MAX_MARKS} levels deep.")
        self.marks.append(len(self.stack))

    def push_tuple(self, count: int) -> None:
        values = [self.pop() for _ in range(count)]
        self.stack.append(tuple(reversed(values)))

    def put(self, width: int) -> None:
        value = self.pop()
        self.stack.append(value)
        self.memo[self.unsigned(width)] = value

    def get(self, width: int) -> None:
        index = self.unsigned(width)
        if index not in self.memo:
            raise ValueError(f"the pickle reads memo entry {index}, which was never stored.")
        self.stack.append(self.memo[index])

    def unicode(self) -> None:
        try:
            self.stack.append(self.take(self.unsigned(4)).decode("utf-8"))
        except UnicodeDecodeError:
            raise ValueError(f"the pickle has a string that is not UTF-8 before byte {self.position}.") from None

    def long1(self) -> None:
        count = self.unsigned(1)
        if count > 8:
            raise ValueError(f"the pickle has an integer of {count} bytes, expected at most 8.")
        self.stack.append(int.from_bytes(self.take(count), "little", signed=True))

    def protocol(self) -> None:
        if (version := self.unsigned(1)) != 2:
            raise ValueError(
                f"pickle protocol {version}, expected 2; write the file with torch.save's default protocol."
            )

    def set_items(self, items: list[Any]) -> None:
        target = self.pop()
        if type(target) not in (dict, collections.OrderedDict) or len(items) % 2:
            raise ValueError(f"the pickle sets items on something that is not a dict at byte {self.position}.")
        for key, value in zip(items[::2], items[1::2], strict=True):
            # Only cheap keys: hashing a tuple that shares its parts takes time exponential in the file's size.
            if type(key) not in (str, int):
                raise ValueError(f"the pickle has a dict key of type {type(key).__name__}, expected str or int.")
            target[key] = value
        self.stack.append(target)

    def extend(self, items: list[Any]) -> None:
        target = self.pop()
        if type(target) is not list:
            raise ValueError(f"the pickle appends to something that is not a list at byte {self.position}.")
        target.extend(items)
        self.stack.append(target)

    def line(self) -> str:
        end = self.code.find(b"\n", self.position)
        if end < 0:
            raise ValueError("the pickle ends in the middle of an opcode.")
        return self.take(end + 1 - self.position)[:-1].decode("ascii", errors="backslashreplace")

    def push_global(self) -> None:
        name = f"{self.line()}.{self.line()}"
        if name not in _GLOBALS:
            raise ValueError(
                f"the pickle refers to {name[:80]!r}, which is not allowed; expected tensors, dicts, lists and scalars."
            )
        self.stack.append(_GLOBALS[name])

    def reduce(self) -> None:
        arguments, constructor = self.pop(), self.pop()
        if constructor is _Constructor.ORDERED_DICT and type(arguments) is tuple and not arguments:
            self.stack.append(collections.OrderedDict())
        elif constructor is _Constructor.REBUILD_TENSOR and type(arguments) is tuple:
            self.stack.append(_view(arguments))
        else:
            raise ValueError(
                f"the pickle calls something other than a tensor or empty dict constructor at byte {self.position}."
            )

    def push_storage(self) -> None:
        """Persistent id ("storage", type, key, location, element count); the location (a device) is ignored."""
        match self.pop():
            case (str("storage"), _StorageType(dtype), str(key), str(), int(count)) if re.fullmatch(r"[0-9]{1,9}", key):
                member = f"data/{key}"
                if self.members.size(member) != count * dtype.itemsize:
                    raise ValueError(
                        f"archive member {member!r} has {self.members.size(member)} bytes, expected {count} of {dtype}."
                    )
            case _:
                raise ValueError(f"the pickle has a malformed storage reference at byte {self.position}.")
        if key not in self.storages:
            self.storages[key] = _Storage(np.frombuffer(self.members.read(member), dtype))
        if self.storages[key].values.dtype != dtype:
            raise ValueError(f"archive member {member!r} is used with two element types.")
        self.stack.append(self.storages[key])


def _view(arguments: tuple[Any, ...]) -> np.ndarray:
    """`_rebuild_tensor_v2(storage, offset, size, stride, requires_grad, hooks)`: a bounds-checked view."""
    match arguments:
        case (_Storage(values), int(offset), tuple(size), tuple(stride), bool(), dict(), *_):
            pass
        case _:
            raise ValueError("the pickle has a malformed tensor.")
    counts = (*size, *stride, offset)
    if len(size) != len(stride) or len(size) > 8 or any(type(n) is not int or n < 0 for n in counts):
        raise ValueError("the pickle has a tensor with a malformed size, stride or offset.")
    elements = int(np.prod(size, dtype=object))
    last = offset + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
    # Fewer elements than the storage also excludes stride 0 tricks that would make a copy of the view huge.
    if elements > values.size or (elements and last >= values.size):
        raise ValueError(
            f"the pickle has a tensor of size {size[:8]} that does not fit its storage of {values.size} elements."
        )
    if not elements:
        return np.empty(size, values.dtype)
    strides = [step * values.itemsize for step in stride]
    return np.lib.stride_tricks.as_strided(values[offset:], size, strides, writeable=False)


_OPCODES = {
    b"\x80": _Interpreter.protocol,
    b"(": _Interpreter.mark,
    b"}": lambda m: m.stack.append({}),
    b"]": lambda m: m.stack.append([]),
    b")": lambda m: m.stack.append(()),
    b"t": lambda m: m.stack.append(tuple(m.pop_to_mark())),
    b"\x85": lambda m: m.push_tuple(1),
    b"\x86": lambda m: m.push_tuple(2),
    b"\x87": lambda m: m.push_tuple(3),
    b"N": lambda m: m.stack.append(None),
    b"\x88": lambda m: m.stack.append(True),
    b"\x89": lambda m: m.stack.append(False),
    b"K": lambda m: m.stack.append(m.unsigned(1)),
    b"M": lambda m: m.stack.append(m.unsigned(2)),
    b"J": lambda m: m.stack.append(int.from_bytes(m.take(4), "little", signed=True)),
    b"\x8a": _Interpreter.long1,
    b"G": lambda m: m.stack.append(struct.unpack(">d", m.take(8))[0]),
    b"X": _Interpreter.unicode,
    b"q": lambda m: m.put(1),
    b"r": lambda m: m.put(4),
    b"h": lambda m: m.get(1),
    b"j": lambda m: m.get(4),
    b"s": lambda m: m.set_items([*reversed([m.pop(), m.pop()])]),
    b"u": lambda m: m.set_items(m.pop_to_mark()),
    b"a": lambda m: m.extend([m.pop()]),
    b"e": lambda m: m.extend(m.pop_to_mark()),
    b"c": _Interpreter.push_global,
    b"R": _Interpreter.reduce,
    b"Q": _Interpreter.push_storage,
}
