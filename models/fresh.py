"""Folders and files that are whole or not there: written beside their final name, and renamed.

::

    out/            absent or empty until everything is on the disk
    .out.partial/   being written; after a failure it is gone, and what a killed process left of it is written over
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def fresh_folder(final: Path) -> Iterator[Path]:
    """As a context, gives an empty folder that becomes ``final`` at the end; after a failure nothing is left of it.

    Args:
        final: Absent or an empty folder.

    Raises:
        ValueError: If ``final`` holds anything, is a file or lies below one, cannot be renamed to, or another process
            is writing it; before anything is written.
    """
    final = final.expanduser()
    _check_new(final)
    final = final.resolve()  # "..", or a link, is no name to write beside
    partial = _beside(final)
    with _parents(final), _claimed(partial):
        try:
            yield partial
            for path in [*partial.iterdir(), partial]:
                _sync(path)
            partial.rename(final)
            _sync(final.parent)
        except BaseException as problem:
            shutil.rmtree(partial, ignore_errors=True)
            _name(problem, partial)
            raise


def write_fresh(final: Path, text: str) -> None:
    """Writes a file; after a failure there is nothing, or what there was.

    Args:
        final: Folders above it are made.
        text: In UTF-8.
    """
    partial = _beside(final)
    with _parents(final):
        try:
            partial.write_text(text, encoding="utf-8")
            _sync(partial)
            partial.rename(final)
            _sync(final.parent)
        except BaseException as problem:
            with suppress(OSError):
                partial.unlink()
            _name(problem, partial)
            raise


def _name(problem: BaseException, path: Path) -> None:
    """Adds the path to an error of the system that says none, as one of a full disk."""
    if isinstance(problem, OSError) and problem.errno is not None and problem.filename is None:
        problem.filename = str(path)


def _beside(final: Path) -> Path:
    return final.with_name(f".{final.name}.partial")


def _check_new(folder: Path) -> None:
    expected = f"folder: expected a new or empty folder to save to, got {folder}"
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{expected}, which exists")
    for parent in folder.parents:
        if parent.exists() and not parent.is_dir():
            raise ValueError(f"{expected}, but {parent} is a file")
    # Nothing can be renamed to a mount point; and a shell would stay behind in the folder that was there before.
    whole = folder.resolve()  # of ".", is_mount compares the folder with itself
    for kind, found in (("the current one", whole == Path.cwd()), ("a mount point", whole.is_mount())):
        if found:
            raise ValueError(f"{expected}, {kind}: name a folder in it")


@contextmanager
def _parents(path: Path) -> Iterator[None]:
    """As a context, makes the folders above ``path``; after a failure those that it made are gone."""
    made = [parent for parent in path.parents if not parent.exists()]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield
    except BaseException:
        for parent in made:
            with suppress(OSError):  # somebody else has put something there
                parent.rmdir()
        raise


@contextmanager
def _claimed(partial: Path) -> Iterator[None]:
    """As a context, makes an empty folder that is this process's alone; the lock ends with the process."""
    partial.mkdir(exist_ok=True)
    handle = os.open(partial, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"folder: another process is writing {partial}") from None
        except OSError:  # a shared file system without locks
            pass
        for left in partial.iterdir():
            left.unlink()
        yield
    finally:
        os.close(handle)


def _sync(path: Path) -> None:
    """Waits until a file's or a folder's contents are on the disk, so that no rename can overtake them."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
