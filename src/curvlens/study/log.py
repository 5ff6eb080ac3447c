"""Files of rows. Rows are only added.

An incomplete last line from a killed process is removed before the next line is added. Any other damage raises an
error, and nothing is overwritten.
"""

from __future__ import annotations

import errno
import gzip
import io
import os
import zlib
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from curvlens import files
from curvlens.errors import CurvlensError
from curvlens.memory import readable
from curvlens.study.rows import BEGIN, HEADS, Open, head_format, parsed
from curvlens.study.tensors import Stored
from curvlens.study.unit import FORMAT, Record

PACKED = "table.jsonl.gz"
LARGEST = 256 << 20
"""The most bytes of a file, also when unpacked: all points of the papers have 5 MB."""
BOM = b"\xef\xbb\xbf"
"""The mark that some editors put before a text. Their line ends are accepted too: only the content is checked."""
FIX = (
    "Nothing was written. Repair the file, or move it away by `study.set_aside([kind])`, in `curvlens reproduce` by "
    "--set-aside, and compute again what is lost."
)


def read(file: Path) -> bytes:
    """The content of a file; empty if there is no file. A table is unpacked."""
    try:
        content = files.read(file, LARGEST)
    except FileNotFoundError:
        return b""
    except OSError as error:
        raise CurvlensError(f"{str(file)!r} cannot be read: {error.strerror}. Give another folder.") from error
    if file.name != PACKED:
        return content
    try:
        content = gzip.GzipFile(fileobj=io.BytesIO(content)).read(LARGEST + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise CurvlensError(f"{str(file)!r} cannot be read: {error}. {FIX}") from error
    if len(content) > LARGEST:
        raise CurvlensError(f"{str(file)!r} unpacks to more than {readable(LARGEST)}. {FIX}")
    return content


def records(file: Path, content: bytes, tensors: Open = Stored.none) -> Iterator[tuple[int, Record]]:
    """The records of a file with their line numbers."""
    whole, _ = _lines(file, content)
    form = FORMAT
    for number, line in enumerate(whole, start=1):
        head = head_format(line)
        if head is not None:
            form = head
            continue
        try:
            record = parsed(line, tensors)
            if record.format > form:
                raise ValueError(f"it has format {record.format} in a file of format {form}")
        except ValueError as error:
            raise damaged(file, number, str(error)) from error
        yield number, record


def mend(file: Path) -> int:
    """Remove an incomplete last line, or add a missing line break. Return the format at the end of the file."""
    content = read(file)
    whole, rest = _lines(file, content)
    if rest:
        os.truncate(file, len(content) - len(rest))
    elif content and not content.endswith(b"\n"):
        append(file, b"\n")
    return next((form for line in reversed(whole) if (form := head_format(line)) is not None), FORMAT)


def append(file: Path, lines: bytes) -> None:
    """Append lines, or nothing; a new file gets its first line. The lines are on disk when this returns."""
    before = None
    try:
        with file.open("ab") as out:
            before = out.tell()
            lines = lines if before or head_format(lines.split(b"\n")[0]) else HEADS[FORMAT].encode() + lines
            if before + len(lines) > LARGEST:
                raise CurvlensError(
                    f"{str(file)!r} would have more than {readable(LARGEST)}, and would not be read again. Nothing was "
                    "written. Store arrays as tensors: Record(…, tensors={'values': values})."
                )
            out.write(lines)
            out.flush()
            os.fsync(out.fileno())
    except OSError as error:
        if before is not None:
            with suppress(OSError):  # `mend` removes what stays
                os.truncate(file, before)
        raise unwritten(file, error) from error
    if not before:
        files.sync_folder(file.parent)


def unwritten(file: Path, error: OSError) -> CurvlensError:
    """An error that says that earlier results are kept."""
    why = "no space is left there" if error.errno == errno.ENOSPC else error.strerror
    return CurvlensError(
        f"{str(file)!r} cannot be written: {why}. All results before are kept. Make room, and run the same "
        "command again."
    )


def damaged(file: Path, number: int, why: str) -> CurvlensError:
    """An error for a line that cannot be read."""
    return CurvlensError(f"{str(file)!r} is damaged in line {number} ({why}). {FIX}")


def readable_lines(content: bytes, kind: str) -> bytes:
    """The lines of a damaged file that are records of a kind, without its first line; empty if it is not ours."""
    *lines, last = content.removeprefix(BOM).split(b"\n")
    lines += [last] if last else []
    if not lines or head_format(lines[0]) is None:
        return b""
    kept, found = [], False
    for line in lines:
        if head_format(line) is None:
            try:
                if parsed(line).kind != kind:
                    continue
            except ValueError:
                continue
            found = True
        kept.append(line)
    return b"\n".join(kept) + b"\n" if found else b""


def _lines(file: Path, content: bytes) -> tuple[Sequence[bytes], bytes]:
    """The complete lines, and the incomplete rest that a killed process left."""
    *whole, rest = content.removeprefix(BOM).split(b"\n")
    if not whole:
        if not any(head.encode().startswith(rest.rstrip(b"\r")) for head in HEADS.values()):
            raise _foreign(file, rest)
        return whole, rest
    if head_format(whole[0]) is None:
        raise _foreign(file, whole[0])
    try:
        parsed(rest)
    except ValueError as error:
        if not rest.startswith(BEGIN.encode()) and not any(
            begin.encode().startswith(rest) for begin in (BEGIN, HEADS[FORMAT])
        ):
            raise damaged(file, len(whole) + 1, str(error)) from error
        return whole, rest
    return [*whole, rest], b""  # only the line break is missing


def _foreign(file: Path, line: bytes) -> CurvlensError:
    """An error for a file whose first line curvlens did not write."""
    try:
        written = files.parse(line)["curvlens results"]
        what = f"results in format {written!r:.20}, this version reads {' and '.join(map(str, HEADS))}"
        if type(written) is int and written in HEADS:
            what = f"a first line that curvlens did not write, {line.decode(errors='replace')!r:.60}"
    except (ValueError, KeyError, TypeError):
        what = "no results of curvlens"
    return CurvlensError(
        f"{str(file)!r} holds {what}. Give another folder, or move the file away by `study.set_aside([kind])`, in "
        "`curvlens reproduce` by --set-aside; it stays as it is."
    )
