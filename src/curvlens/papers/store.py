"""Results on disk: one file of lines an experiment, only ever added to.

A line holds one point (`records`). What is there is never computed again. A line that a killed process left half
written is cut off before the next one is added; any other damage is told, and nothing is written over.

A finished run is kept or handed on as one small file, the sorted table of all its points, compressed: a folder with a
`PACKED` table has its points, too.
"""

from __future__ import annotations

import errno
import fcntl
import gzip
import io
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from pathlib import Path

from curvlens import files
from curvlens.errors import CurvlensError
from curvlens.memory import readable
from curvlens.papers.records import FORMAT, HEAD, Record, parsed

PACKED = "table.jsonl.gz"
LARGEST = 256 << 20
"""Bytes of a file, also when unpacked: all points of the papers have 5 MB."""
BOM = b"\xef\xbb\xbf"
"""What some editors put before a text. Line ends may be theirs, too: what is in a line is checked, not its end."""
FIX = "Nothing was written. Repair the file, or move it away with --set-aside and compute again what is lost."


class Store:
    """A folder of results."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)

    def file(self, experiment: str) -> Path:
        """Where the points of an experiment are."""
        return self.folder / f"{experiment}.jsonl"

    def records(self, experiment: str) -> dict[str, Record]:
        """All points of an experiment, by key, of whatever revision."""
        own = self._own(experiment)
        return own | {name: record for name, record in self._packed.get(experiment, {}).items() if name not in own}

    def _own(self, experiment: str) -> dict[str, Record]:
        file = self.file(experiment)
        found: dict[str, Record] = {}
        for number, record in _points(file, _read(file)):
            if record.experiment != experiment:
                raise _damaged(file, number, f"it belongs to {record.experiment!r}")
            found.setdefault(record.key, record)
        return found

    @cached_property
    def _packed(self) -> dict[str, dict[str, Record]]:
        return self._read_packed()

    def _read_packed(self) -> dict[str, dict[str, Record]]:
        """The points of the compressed table, by experiment and key."""
        file = self.folder / PACKED
        try:
            content = gzip.GzipFile(fileobj=io.BytesIO(_read(file))).read(LARGEST + 1)
        except (OSError, EOFError, zlib.error) as error:
            raise CurvlensError(f"{str(file)!r} cannot be read: {error}. {FIX}") from error
        if len(content) > LARGEST:
            raise CurvlensError(f"{str(file)!r} unpacks to more than {readable(LARGEST)}. {FIX}")
        found: dict[str, dict[str, Record]] = {}
        for _, record in _points(file, content):
            found.setdefault(record.experiment, {})[record.key] = record
        return found

    @contextmanager
    def writing(self) -> Iterator[Writer]:
        """Add points; one process at a time."""
        with _locked(self.folder):
            yield Writer(self)

    def set_aside(self, experiments: Iterable[str]) -> list[Path]:
        """Move files away that cannot be read, to names that are free; what is in them stays as it is.

        Points of an experiment that can be read go into a new file: they are not computed again.
        """
        if not self.folder.exists():
            return []
        moved = []
        reads: dict[Path, Callable[[], object]] = {self.file(name): partial(self._own, name) for name in experiments}
        with _locked(self.folder):
            for file, read in (reads | {self.folder / PACKED: self._read_packed}).items():
                try:
                    read()
                except CurvlensError:
                    moved.append(_aside(file))
                    if file.name != PACKED:
                        self._keep_readable(moved[-1], file.stem)
        return moved

    def _keep_readable(self, damaged: Path, experiment: str) -> None:
        """Begin a new file with the whole lines of a damaged one; of a file that is not ours there are none."""
        try:
            head, *lines = _read(damaged).split(b"\n")
        except CurvlensError:  # a folder, or a file that may not be read
            return
        if not _is_head(head):
            return
        writer = Writer(self)
        for line in lines:
            try:
                record = parsed(line)
            except ValueError:
                continue
            if record.experiment == experiment:
                writer.add(record)


class Writer:
    """Adds lines to the files of a store, each as a whole."""

    def __init__(self, store: Store) -> None:
        self._store, self._ready = store, set[str]()

    def add(self, record: Record) -> None:
        """One more line, on disk when this returns."""
        file = self._store.file(record.experiment)
        if record.experiment not in self._ready:
            _mend_end(file)
            self._ready.add(record.experiment)
        _append(file, record.line(timed=True))


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # a link is not followed: what it points to is not ours to write to
        lock = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
    except OSError as error:
        why = "there is a file of this name" if isinstance(error, FileExistsError) else error.strerror
        raise CurvlensError(
            f"{str(folder)!r} cannot hold results: {why}. Give a folder that can be written to, with --results."
        ) from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError:
        raise CurvlensError(
            f"Another process is writing results to {str(folder)!r}. Wait for it, or give another folder."
        ) from None
    finally:
        os.close(lock)


def _read(file: Path) -> bytes:
    """What is in a file; an empty table if there is none."""
    try:
        return files.read(file, LARGEST)
    except FileNotFoundError:
        return gzip.compress(b"") if file.name == PACKED else b""
    except OSError as error:
        raise CurvlensError(
            f"{str(file)!r} cannot be read: {error.strerror}. Give another folder with --results."
        ) from error


def _points(file: Path, content: bytes) -> Iterator[tuple[int, Record]]:
    """The points of a file with the numbers of their lines."""
    whole, _ = _lines(file, content)
    for number, line in enumerate(whole[1:], start=2):
        try:
            yield number, parsed(line)
        except ValueError as error:
            raise _damaged(file, number, str(error)) from error


def _lines(file: Path, content: bytes) -> tuple[Sequence[bytes], bytes]:
    """Whole lines, and what a process that was killed left of the line that it was writing."""
    *whole, rest = content.removeprefix(BOM).split(b"\n")
    if not whole:
        if not HEAD.encode().startswith(rest.rstrip(b"\r")):
            raise _foreign(file, rest)
        return whole, rest
    if not _is_head(whole[0]):
        raise _foreign(file, whole[0])
    try:
        parsed(rest)
    except ValueError as error:
        if not b'{"key":"'.startswith(rest[:8]):
            raise _damaged(file, len(whole) + 1, str(error)) from error
        return whole, rest
    return [*whole, rest], b""  # all of it is there but the line break


def _is_head(line: bytes) -> bool:
    """Whether a line is the first one of a file of ours; a table has its seal there, too."""
    try:
        head = files.parse(line)
    except ValueError:
        return False
    if not isinstance(head, dict) or not head.keys() <= {"curvlens results", "written by"}:
        return False
    return type(head.get("curvlens results")) is int and head["curvlens results"] == FORMAT


def _mend_end(file: Path) -> None:
    """A file with its first line, without a half-written last one, and with a line break at its end."""
    content = _read(file)
    _, rest = _lines(file, content)
    if rest:
        os.truncate(file, len(content) - len(rest))
    elif content and not content.endswith(b"\n"):
        _append(file, "\n")


def _append(file: Path, line: str) -> None:
    """Write at the end, or not at all; the first line of a file before any other."""
    before = None
    try:
        with file.open("ab") as out:
            before = out.tell()
            out.write(((HEAD if not before else "") + line).encode())
            out.flush()
            os.fsync(out.fileno())
    except OSError as error:
        if before is not None:
            os.truncate(file, before)
        why = "no space is left there" if error.errno == errno.ENOSPC else error.strerror
        raise CurvlensError(
            f"{str(file)!r} cannot be written: {why}. All results before are kept; make room and run the same command."
        ) from error


def _aside(file: Path) -> Path:
    for number in range(1, 10_000):
        other = file.with_name(f"{file.name}.aside-{number}")
        if not os.path.lexists(other):
            file.rename(other)
            return other
    raise CurvlensError(f"There are too many files {file.name}.aside-… in {str(file.parent)!r}: remove some.")


def _foreign(file: Path, line: bytes) -> CurvlensError:
    """An error for a file whose first line is not ours."""
    try:
        written = files.parse(line)["curvlens results"]
        what = f"results in format {written!r:.20}, this version reads {FORMAT}"
        if type(written) is int and written == FORMAT:
            what = f"a first line that curvlens did not write, {line.decode(errors='replace')!r:.60}"
    except (ValueError, KeyError, TypeError):
        what = "no results of curvlens"
    return CurvlensError(
        f"{str(file)!r} holds {what}. Give another folder, or move the file away with --set-aside; it stays as it is."
    )


def _damaged(file: Path, number: int, why: str) -> CurvlensError:
    return CurvlensError(f"{str(file)!r} is damaged in line {number} ({why}). {FIX}")
