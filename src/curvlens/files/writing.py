"""Writes a file as a whole or not at all, and overwrites only files that curvlens wrote."""

from __future__ import annotations

import os
import secrets
from contextlib import suppress
from pathlib import Path

from curvlens.errors import CurvlensError
from curvlens.files.reading import flags, read
from curvlens.files.seal import origin, sealed

LARGEST = 1 << 30
"""The most bytes of an existing file that may be overwritten."""


def write(file: Path, content: bytes | str, *, seal: str = "", fix: str = "") -> Path:
    """Write a file as a whole or not at all. All files of curvlens are written here.

    Args:
        file: The path. An existing file is replaced, unless ``fix`` is given.
        content: The content. Half a surrogate in a text, which a file name may contain, is written as an escape.
        seal: The kind of the content, such as ``".json"``, to add our seal.
        fix: Advice for a file that we did not write. If given, only a file of ours may be replaced.
    """
    made = content.encode(errors="backslashreplace") if isinstance(content, str) else content
    if fix:
        require_ours(file, fix, kind=seal)
    _replace(file, sealed(seal, made) if seal else made)
    return file


def require_ours(file: Path, fix: str, *, kind: str = "") -> None:
    """Raise an error for an existing file that we did not write, or that was changed since; ``fix`` is the advice."""
    try:
        found = origin(kind or file.suffix, read(file, LARGEST))
    except (FileNotFoundError, NotADirectoryError):
        return
    except OSError as error:
        raise CurvlensError(f"{str(file)!r} cannot be overwritten: {error.strerror}. {fix}") from error
    except CurvlensError as error:
        raise CurvlensError(f"{error} It is not overwritten. {fix}") from error
    if found == "changed":
        raise CurvlensError(f"{str(file)!r} was changed since curvlens wrote it, so it is not overwritten. {fix}")
    if found == "other":
        raise CurvlensError(f"{str(file)!r} was not written by curvlens, so it is not overwritten. {fix}")


def _replace(file: Path, content: bytes) -> None:
    """All or nothing: the file of this name has the whole content, even after a power failure.

    The new file has a random name until it is complete, and must not exist before: an existing file or link raises an
    error and is never followed. Unlike `tempfile.mkstemp` it has the permissions that the umask gives.
    """
    new = file.with_name(f".curvlens-{secrets.token_hex(8)}.new")
    handle = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | flags("O_NOFOLLOW", "O_CLOEXEC", "O_BINARY"), 0o666)
    try:
        with os.fdopen(handle, "wb") as out:
            out.write(content)
            out.flush()
            os.fsync(out.fileno())
        new.replace(file)
    except BaseException:
        new.unlink(missing_ok=True)
        raise
    sync_folder(file.parent)


def sync_folder(folder: Path) -> None:
    """Flush the names in a folder to disk, if the system can: Windows cannot open folders."""
    with suppress(OSError):
        handle = os.open(folder, os.O_RDONLY | flags("O_DIRECTORY", "O_CLOEXEC"))
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def set_aside(file: Path) -> Path:
    """Move a file, a folder or a link to a free name beside it; its content does not change."""
    for number in range(1, 10_000):
        other = file.with_name(f"{file.name}.aside-{number}")
        if not os.path.lexists(other):
            file.rename(other)
            return other
    raise CurvlensError(f"There are too many files {file.name}.aside-… in {str(file.parent)!r}: remove some.")
