"""Results on disk: one file of lines an experiment, only ever added to.

A line holds one point: its configuration, what was measured, and a key made of experiment, revision and configuration.
What is there is never computed again. A line that a killed process left half written is cut off before the next one is
added; any other damage is told, and nothing is written over.

A finished run is kept or handed on as one small file, the sorted table of all its points, compressed: a folder with a
`PACKED` table has its points, too.
"""

from __future__ import annotations

import errno
import fcntl
import gzip
import hashlib
import json
import math
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from curvlens.errors import CurvlensError

FORMAT = 1
HEAD = {"curvlens results": FORMAT}
PACKED = "table.jsonl.gz"
DIGITS = 10
"""Significant digits that are kept of a number."""
Config = Mapping[str, Any]
"""Names and plain numbers, texts and truth values: all that a point depends on."""


@dataclass(frozen=True)
class Record:
    """One measured point."""

    experiment: str
    revision: int
    config: Config
    result: Mapping[str, Any]
    seconds: float = field(default=0.0, compare=False)

    @property
    def key(self) -> str:
        """The same for the same experiment, revision and configuration."""
        return key(self.experiment, self.revision, self.config)

    def line(self, *, timed: bool) -> str:
        """As a line of a file; without the time it is the same for the same numbers."""
        content = {
            "key": self.key,
            "experiment": self.experiment,
            "revision": self.revision,
            "config": dict(sorted(self.config.items())),
            "result": rounded(self.result),
        }
        return _text(content | ({"seconds": round(self.seconds, 3)} if timed else {}))


def key(experiment: str, revision: int, config: Config) -> str:
    """What a point is stored under."""
    content = _text([experiment, revision, dict(sorted(config.items()))])
    return hashlib.sha256(content.encode()).hexdigest()[:16]


def _text(content: Any) -> str:
    return json.dumps(content, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def rounded(value: Any) -> Any:
    """Numbers with `DIGITS` digits; what no number is, by its name, so that a file has it in writing.

    >>> rounded({"norm": [1 / 3, float("inf"), float("nan")]})
    {'norm': [0.3333333333, 'inf', 'nan']}
    """
    if isinstance(value, Mapping):
        return {name: rounded(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [rounded(each) for each in value]
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}") if math.isfinite(value) else str(value)
    return value


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
        return own | {key: record for key, record in self._packed.get(experiment, {}).items() if key not in own}

    @cached_property
    def _packed(self) -> dict[str, dict[str, Record]]:
        return self._read_packed()

    def _read_packed(self) -> dict[str, dict[str, Record]]:
        """The points of the compressed table, by experiment and key."""
        file = self.folder / PACKED
        try:
            lines = gzip.decompress(file.read_bytes()).split(b"\n")[:-1]
        except FileNotFoundError:
            return {}
        except (OSError, EOFError, zlib.error) as error:
            raise CurvlensError(
                f"{str(file)!r} cannot be read: {error}. Nothing was written. Get it again, or move it away with "
                "--set-aside and compute its points again."
            ) from error
        found: dict[str, dict[str, Record]] = {}
        for number, line in enumerate(lines, start=1):
            record = _parsed(file, number, line)
            found.setdefault(record.experiment, {})[record.key] = record
        return found

    def _own(self, experiment: str) -> dict[str, Record]:
        file = self.file(experiment)
        try:
            content = file.read_bytes()
        except FileNotFoundError:
            return {}
        except OSError as error:
            raise CurvlensError(f"{str(file)!r} cannot be read: {error.strerror}.") from error
        lines = content.split(b"\n")
        whole = lines[:-1]  # what follows the last line break was being written when a process was killed
        if not whole:
            return {}
        _require_head(file, whole[0])
        found: dict[str, Record] = {}
        for number, line in enumerate(whole[1:], start=2):
            record = _parsed(file, number, line)
            if record.experiment != experiment:
                raise _damaged(file, number, f"it belongs to {record.experiment!r}")
            found.setdefault(record.key, record)
        return found

    @contextmanager
    def writing(self) -> Iterator[Writer]:
        """Add points; one process at a time."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            lock = (self.folder / ".lock").open("w")
        except OSError as error:
            raise CurvlensError(f"{str(self.folder)!r} cannot hold results: {error.strerror}.") from error
        with lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise CurvlensError(
                    f"Another process is writing results to {str(self.folder)!r}. Wait for it, or give another folder."
                ) from None
            yield Writer(self)

    def set_aside(self, experiments: Iterable[str]) -> list[Path]:
        """Move files away that cannot be read, to names that are free; what is in them stays as it is."""
        moved = []
        reads: dict[Path, Callable[[], object]] = {self.file(name): partial(self._own, name) for name in experiments}
        for file, read in (reads | {self.folder / PACKED: self._read_packed}).items():
            try:
                read()
            except CurvlensError:
                moved.append(_aside(file))
        return moved


def _aside(file: Path) -> Path:
    for number in range(1, 10_000):
        other = file.with_name(f"{file.name}.aside-{number}")
        if not os.path.lexists(other):
            file.rename(other)
            return other
    raise CurvlensError(f"There are too many files {file.name}.aside-… in {str(file.parent)!r}: remove some.")


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
        _append(file, record.line(timed=True) + "\n")


def table(records: Mapping[str, Record]) -> str:
    """All points as sorted lines without times: the same for the same numbers."""
    return "".join(sorted(record.line(timed=False) + "\n" for record in records.values()))


def _append(file: Path, line: str) -> None:
    """Write at the end, or not at all."""
    before = None
    try:
        with file.open("ab") as out:
            before = out.tell()
            out.write(line.encode())
            out.flush()
            os.fsync(out.fileno())
    except OSError as error:
        if before is not None:
            os.truncate(file, before)
        why = "no space is left there" if error.errno == errno.ENOSPC else error.strerror
        raise CurvlensError(
            f"{str(file)!r} cannot be written: {why}. All results before are kept; make room and run the same command."
        ) from error


def _mend_end(file: Path) -> None:
    """A file with its first line, and without a half-written last one."""
    try:
        content = file.read_bytes()
    except FileNotFoundError:
        content = b""
    end = content.rfind(b"\n") + 1
    if end < len(content):
        os.truncate(file, end)
    if not end:
        _append(file, _text(HEAD) + "\n")


def _require_head(file: Path, line: bytes) -> None:
    try:
        head = json.loads(line)
    except ValueError:
        head = None
    if head != HEAD:
        written = head.get("curvlens results") if isinstance(head, dict) else None
        what = f"in format {written!r}, this version reads {FORMAT}" if written else "no results of curvlens"
        raise CurvlensError(
            f"{str(file)!r} holds {what}. Give another folder, or move the file away with --set-aside; it stays as it "
            "is."
        )


def _parsed(file: Path, number: int, line: bytes) -> Record:
    try:
        content = json.loads(line)
        content.setdefault("seconds", 0.0)
        record = Record(*(content[name] for name in ("experiment", "revision", "config", "result", "seconds")))
        if not isinstance(record.config, dict) or not isinstance(record.result, dict):
            raise TypeError("its configuration or result is no mapping")
        same = record.key == content["key"]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _damaged(file, number, str(error)) from error
    if not same:
        raise _damaged(file, number, "its key does not belong to its configuration")
    return record


def _damaged(file: Path, number: int, why: str) -> CurvlensError:
    return CurvlensError(
        f"{str(file)!r} is damaged in line {number} ({why}). Nothing was written. Repair the line or delete it, or "
        "move the file away with --set-aside and compute its points again."
    )
