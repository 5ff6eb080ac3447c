"""A study: a folder of records, one file of rows a kind, and tensors beside them.

``KIND.jsonl`` has a row a record, and is only ever added to; what is there is never computed again. ``tensors/`` has
their tensors. ``study.json`` says what the folder belongs to, if the study pins it. A finished study of numbers is kept
or handed on as one small file, the sorted table of all its records, compressed: a folder with a ``table.jsonl.gz`` has
its records, too.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import Tensor

from curvlens import files
from curvlens.errors import CurvlensError
from curvlens.study import identity as identities
from curvlens.study import log, tensors
from curvlens.study.lock import locked
from curvlens.study.rows import HEADS, line
from curvlens.study.tensors import OnDisk, Stored
from curvlens.study.unit import FORMAT, Record, Unit


class Study:
    """A folder of records.

    ``identity`` pins what the records are of, as ``{"model": fingerprint, "data": fingerprint}``: a folder with another
    identity, or with files of something else, is refused.
    """

    def __init__(self, folder: str | os.PathLike[str], *, identity: Mapping[str, Any] | None = None) -> None:
        self.folder = Path(folder)
        self.identity = identities.checked(identity)
        identities.require(self.folder, self.identity, writing=False)
        self._known: dict[str, dict[str, Record]] | None = None

    def __repr__(self) -> str:
        return f"Study({str(self.folder)!r})" if self.identity is None else f"Study({str(self.folder)!r}, identity=…)"

    def file(self, kind: str) -> Path:
        """Where the rows of a kind are."""
        return self.folder / f"{kind}.jsonl"

    def records(self, kind: str) -> dict[str, Record]:
        """All records of a kind, by key, of whatever revision."""
        own = self._own(kind)
        return own | {key: record for key, record in self._packed.get(kind, {}).items() if key not in own}

    def get(self, unit: Unit) -> Record | None:
        """The record of a unit; None if it is not done. It reads the file of the kind: ask `missing` for many units."""
        return self.records(unit.kind).get(unit.key)

    def missing(self, units: Iterable[Unit]) -> list[Unit]:
        """The units that have no record yet, in their order, each once."""
        asked = {unit.key: unit for unit in units}
        done = {kind: self.records(kind) for kind in dict.fromkeys(unit.kind for unit in asked.values())}
        return [unit for key, unit in asked.items() if key not in done[unit.kind]]

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Hold the folder while many records are added; another process that wants to write gets an error."""
        if self._known is not None:
            yield
            return
        identities.require(self.folder, self.identity, writing=True)
        with locked(self.folder):
            identities.require(self.folder, self.identity, writing=True)
            try:
                identities.pin(self.folder, self.identity)
            except OSError as error:
                raise log.unwritten(self.folder / identities.NAME, error) from error
            tensors.sweep(self.folder)
            self._known = {}
            try:
                yield
            finally:
                self._known = None

    def add(self, record: Record) -> None:
        """Store a record: its tensors, then its row. Both are on disk when this returns.

        Adding the same numbers again does nothing; other numbers for the same unit are an error.
        """
        with self.writing():
            assert self._known is not None
            # taken out until the row is whole: after an error the end of the file is looked at again
            known = self._known.pop(record.kind, None)
            known = self._prepare(record.kind) if known is None else known
            stored, content = tensors.packed(record.tensors) if record.tensors else (None, b"")
            if record.key in known:
                _require_same(known[record.key], record, stored)
            else:
                if stored is not None:
                    try:
                        tensors.write(self.folder, stored, content)
                    except OSError as error:
                        raise log.unwritten(tensors.path(self.folder, stored), error) from error
                log.append(self.file(record.kind), line(record, stored).encode())
                known[record.key] = record
            self._known[record.kind] = known

    def set_aside(self, kinds: Iterable[str]) -> list[Path]:
        """Move files away that cannot be read, to names that are free; what is in them stays as it is.

        Rows that can be read go into a new file: they are not computed again.
        """
        if not self.folder.exists():
            return []
        moved = []
        with self.writing():
            for kind in kinds:
                try:
                    self._own(kind)
                except CurvlensError:
                    moved.append(files.set_aside(self.file(kind)))
                    self._keep_readable(moved[-1], kind)
            try:
                self._read_packed()
            except CurvlensError:
                moved.append(files.set_aside(self.folder / log.PACKED))
                self.__dict__.pop("_packed", None)
        return moved

    def _own(self, kind: str) -> dict[str, Record]:
        file = self.file(kind)
        found: dict[str, Record] = {}
        for number, record in log.records(file, log.read(file), self._tensors):
            if record.kind != kind:
                raise log.damaged(file, number, f"it belongs to {record.kind!r}")
            found.setdefault(record.key, record)
        return found

    @cached_property
    def _packed(self) -> dict[str, dict[str, Record]]:
        return self._read_packed()

    def _read_packed(self) -> dict[str, dict[str, Record]]:
        """The records of the compressed table, by kind and key."""
        file = self.folder / log.PACKED
        found: dict[str, dict[str, Record]] = {}
        for _, record in log.records(file, log.read(file), self._tensors):
            found.setdefault(record.kind, {})[record.key] = record
        return found

    def _tensors(self, stored: Stored) -> Mapping[str, Tensor]:
        return OnDisk(self.folder, stored)

    def _prepare(self, kind: str) -> dict[str, Record]:
        """Make a file ready for more rows of the present format; the records that are there."""
        if log.mend(self.file(kind)) < FORMAT:
            log.append(self.file(kind), HEADS[FORMAT].encode())
        return self.records(kind)

    def _keep_readable(self, damaged: Path, kind: str) -> None:
        try:
            lines = log.readable_lines(log.read(damaged), kind)
        except CurvlensError:  # a folder, or a file that may not be read
            return
        if lines:
            log.append(self.file(kind), lines)


def _require_same(there: Record, record: Record, stored: Stored | None) -> None:
    if line(there, Stored.behind(there.tensors), timed=False) != line(record, stored, timed=False):
        raise CurvlensError(
            f"The study has another result for {record.kind!r} {dict(record.config)!r:.200}. Nothing was written. "
            f"Raise the revision, as Record({record.kind!r}, {record.revision + 1}, …), to store both."
        )
