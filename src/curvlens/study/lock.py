"""Lets one process at a time write to a folder."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from curvlens.errors import CurvlensError

NAME = ".lock"
_HELD: set[tuple[int, str]] = set()
"""The locks of this process: its id, which differs after a fork, and the folder."""


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder, which is created if needed. The system releases it when the process ends."""
    from filelock import FileLock, Timeout  # takes 35 ms, and reading does not need it

    file = folder / NAME
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # A link is not followed: its target may belong to somebody else. filelock opens with O_NOFOLLOW if the system
        # has it; on other systems this check must do.
        if file.is_symlink():
            raise CurvlensError(f"{str(folder)!r} cannot hold results: {str(file)!r} is a link. Remove it.")
        lock = FileLock(file, timeout=0, thread_local=False)
        lock.acquire()
    except Timeout:
        if _held(folder) in _HELD:
            raise CurvlensError(
                f"Another Study of this process is writing results to {str(folder)!r}. Use one Study object for a "
                "folder; several threads may share it."
            ) from None
        raise CurvlensError(
            f"Another process is writing results to {str(folder)!r}. Wait for it, or give another folder."
        ) from None
    except OSError as error:
        why = "there is a file of this name" if isinstance(error, FileExistsError) else error.strerror
        raise CurvlensError(
            f"{str(folder)!r} cannot hold results: {why}. Give a folder that can be written to."
        ) from error
    _HELD.add(held := _held(folder))
    try:
        yield
    finally:
        _HELD.discard(held)
        lock.release()


def _held(folder: Path) -> tuple[int, str]:
    return os.getpid(), os.path.realpath(folder)
