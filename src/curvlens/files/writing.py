"""Write a file as a whole or not at all, and only over nothing or over what we wrote."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from curvlens.errors import CurvlensError
from curvlens.files.reading import read
from curvlens.files.seal import origin, sealed

LARGEST = 1 << 30
"""Bytes of a file of ours that is written over."""


def write_ours(file: Path, content: bytes, fix: str, *, kind: str = "") -> Path:
    """Write a file with its seal, over nothing or over one of ours; ``fix`` is what to do about any other.

    ``kind`` is that of the content where the file may have any ending.
    """
    require_ours(file, fix, kind=kind)
    replace(file, sealed(kind or file.suffix, content))
    return file


def require_ours(file: Path, fix: str, *, kind: str = "") -> None:
    """An error if there is a file that we did not write, or that was changed since; ``fix`` says what to do."""
    try:
        found = origin(kind or file.suffix, read(file, LARGEST))
    except (FileNotFoundError, NotADirectoryError):
        return
    except OSError as error:
        raise CurvlensError(f"{str(file)!r} cannot be written over: {error.strerror}. {fix}") from error
    except CurvlensError as error:
        raise CurvlensError(f"{error} It is not written over. {fix}") from error
    if found == "changed":
        raise CurvlensError(f"{str(file)!r} was changed since curvlens wrote it, so it is not written over. {fix}")
    if found == "other":
        raise CurvlensError(f"{str(file)!r} was not written by curvlens, so it is not written over. {fix}")


def replace(file: Path, content: bytes) -> None:
    """All or nothing: a name that exists holds the whole content, also after the machine went down.

    The new file has a random name until it is whole, and is made anew: a file or a link that somebody put there is an
    error, never followed. Unlike `tempfile.mkstemp` it has the permissions that the umask gives.
    """
    new = file.with_name(f".curvlens-{secrets.token_hex(8)}.new")
    handle = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    try:
        with os.fdopen(handle, "wb") as out:
            out.write(content)
            out.flush()
            os.fsync(out.fileno())
        new.replace(file)
    except BaseException:
        new.unlink(missing_ok=True)
        raise
