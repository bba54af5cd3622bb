"""Folders and files are whole or not there."""

from __future__ import annotations

import errno
import fcntl
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from models.files import write_weights
from models.fresh import fresh_folder, write_fresh


@contextmanager
def small_disk(most: int) -> Iterator[None]:
    """As a context, no file can grow beyond ``most`` bytes, as on a full disk but for the error's number."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def write(folder: Path, content: str = "whole") -> None:
    with fresh_folder(folder) as partial:
        (partial / "file").write_text(content)


def test_a_folder_has_its_name_when_it_is_whole(tmp_path: Path) -> None:
    out = tmp_path / "deep" / "out"
    with fresh_folder(out) as partial:
        (partial / "file").write_text("whole")
        assert not out.exists() and partial.parent == out.parent
    assert [path.name for path in out.parent.iterdir()] == ["out"] and (out / "file").read_text() == "whole"
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "empty")
    write(tmp_path / "link")  # a rename would replace the link, and fail
    assert (tmp_path / "empty" / "file").read_text() == "whole" and (tmp_path / "link").is_symlink()


@pytest.mark.parametrize("problem", [RuntimeError, KeyboardInterrupt])
def test_after_a_failure_nothing_is_left(problem: Any, tmp_path: Path) -> None:
    with pytest.raises(problem), fresh_folder(tmp_path / "deep" / "er" / "out") as partial:
        (partial / "file").write_text("half")
        raise problem
    assert not list(tmp_path.iterdir())


def test_weights_on_a_full_disk_leave_nothing(tmp_path: Path) -> None:
    refused = pytest.raises(OSError, match="0.partial: cannot be written, ")
    with refused, fresh_folder(tmp_path / "out") as partial, small_disk(4096):
        write_weights(partial, [("a", torch.zeros(4096))], shard_bytes=1)
    assert not list(tmp_path.iterdir())


def test_a_file_on_a_full_disk_is_as_it_was_or_absent(tmp_path: Path) -> None:
    (tmp_path / "there").write_text("before")
    for path in (tmp_path / "there", tmp_path / "deep" / "new"):
        with pytest.raises(OSError, match=rf"{path.name}\.partial"), small_disk(4096):
            write_fresh(path, "x" * 8192)
    assert [path.name for path in tmp_path.iterdir()] == ["there"] and (tmp_path / "there").read_text() == "before"
    write_fresh(tmp_path / "there", "after")
    assert (tmp_path / "there").read_text() == "after"


def test_what_a_killed_process_left_is_written_over(tmp_path: Path) -> None:
    (tmp_path / ".out.partial").mkdir()
    (tmp_path / ".out.partial" / "left").write_text("half")
    write(tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["file"]


def test_a_second_writer_is_refused_and_the_first_goes_on(tmp_path: Path) -> None:
    with fresh_folder(tmp_path / "out") as partial:
        (partial / "file").write_text("first")
        with pytest.raises(ValueError, match="another process is writing .*out.partial"):
            write(tmp_path / "out", "second")
    assert (tmp_path / "out" / "file").read_text() == "first"


def test_a_file_system_without_locks_is_written_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)
    write(tmp_path / "out")
    assert (tmp_path / "out" / "file").read_text() == "whole"


def test_what_cannot_be_renamed_to_is_refused_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    with pytest.raises(ValueError, match="got ., the current one: name a folder in it"):
        write(Path("."))
    monkeypatch.setattr(Path, "is_mount", lambda path: path.name == "mounted")
    (tmp_path / "mounted").mkdir()
    with pytest.raises(ValueError, match="mounted, a mount point: name a folder in it"):
        write(tmp_path / "mounted")
    write(tmp_path / "mounted" / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["here", "mounted"]
