"""Reads a file of unknown origin: it must be regular, of bounded size and with bounded numbers."""

from __future__ import annotations

import functools
import json
import operator
import os
import stat
from pathlib import Path
from typing import Any

from curvlens.errors import CurvlensError
from curvlens.memory import readable

_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
}


def read(path: str | os.PathLike[str], limit: int, why: str = "") -> bytes:
    """The content of a regular file of at most ``limit`` bytes. May raise an OSError.

    ``why`` is the reason for the limit, for the message.

    Other kinds of files (a pipe, a device, a link to one) could block for ever or be endless. `O_NONBLOCK` prevents
    blocking on a pipe. The kind is checked after opening, so that the file cannot be exchanged in between. On systems
    without it, such as Windows, the kind is checked before.
    """
    if not flags("O_NONBLOCK"):
        _require_regular(path, Path(path).stat())
    handle = os.open(path, os.O_RDONLY | flags("O_NONBLOCK", "O_CLOEXEC", "O_BINARY"))
    try:
        size = _require_regular(path, os.fstat(handle))
        with os.fdopen(handle, "rb", closefd=False) as file:
            content = file.read(limit + 1) if size <= limit else b""
    finally:
        os.close(handle)
    size = max(size, len(content))  # a file may grow meanwhile, and system files report a size of 0
    if size > limit:
        most = f"{readable(limit)} are read{why and ', '}{why}"
        raise CurvlensError(f"{os.fspath(path)!r} has {readable(size)}, at most {most}. Is it the right file?")
    return content


def flags(*names: str) -> int:
    """Flags for opening a file; those that the system does not have are left out."""
    return functools.reduce(operator.or_, (getattr(os, name, 0) for name in names))


def _require_regular(path: str | os.PathLike[str], about: os.stat_result) -> int:
    """The size of a regular file. Raise an error for anything else."""
    if not stat.S_ISREG(about.st_mode):
        kind = _KINDS.get(stat.S_IFMT(about.st_mode), "something else")
        raise CurvlensError(f"{os.fspath(path)!r} is {kind}, expected a regular file.")
    return about.st_size


def parse(content: bytes | str) -> Any:
    """The value of a JSON text. Raise ValueError if it is invalid, nested too deeply, or has a number too long."""
    try:
        return json.loads(content, parse_int=_whole)
    except RecursionError as error:
        raise ValueError("lists or mappings are nested too deeply") from error


def _whole(digits: str) -> int:
    """A whole number of 64 bits, enough for seeds and counts. A float overflows at 309 digits, Python's int at 4301."""
    if len(digits.lstrip("-")) > 20 or abs(int(digits)) >= 1 << 64:
        raise ValueError(f"a whole number has {len(digits.lstrip('-'))} digits, more than 64 bits hold")
    return int(digits)
