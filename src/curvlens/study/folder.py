"""A study: a folder of records, with one file of rows for each kind, and tensors beside them.

``KIND.jsonl`` has one row for each record. Rows are only added, and a stored unit is never computed again. ``tensors/``
has the tensors. ``study.json`` has the identity of the study, if it has one. A finished study of numbers can be kept or
shared as one small file, the compressed sorted table of all its records: the records of a ``table.jsonl.gz`` in the
folder count as stored.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from threading import RLock
from typing import Any

from torch import Tensor

from curvlens import files
from curvlens.errors import CurvlensError
from curvlens.study import identity as identities
from curvlens.study import log, tensors
from curvlens.study.lock import locked
from curvlens.study.rows import HEADS, line
from curvlens.study.tensors import OnDisk, Stored
from curvlens.study.unit import FORMAT, Record, Unit, ordered


class Study:
    """A folder of records.

    ``identity`` says what the records belong to, as ``{"model": fingerprint, "data": fingerprint}``. A folder with
    another identity, or with other files, raises an error.
    """

    def __init__(self, folder: str | os.PathLike[str], *, identity: Mapping[str, Any] | None = None) -> None:
        self.folder = Path(folder)
        self.identity = identities.checked(identity)
        identities.require(self.folder, self.identity, writing=False)
        self._known: dict[str, dict[str, Record]] | None = None
        self._writer = RLock()

    def __reduce__(self) -> Any:
        """A copy, or a pickle for another process, opens the folder anew."""
        return partial(Study, identity=self.identity), (self.folder,)

    def __repr__(self) -> str:
        return f"Study({str(self.folder)!r})" if self.identity is None else f"Study({str(self.folder)!r}, identity=…)"

    def file(self, kind: str) -> Path:
        """The file with the rows of a kind."""
        return self.folder / f"{kind}.jsonl"

    def records(self, kind: str) -> dict[str, Record]:
        """All records of a kind, by key, of every revision."""
        own = self._own(kind)
        return own | {key: record for key, record in self._packed.get(kind, {}).items() if key not in own}

    def get(self, unit: Unit) -> Record | None:
        """The record of a unit; None if it is not done. It reads the whole file: for many units call `missing`."""
        return self.records(unit.kind).get(unit.key)

    def missing(self, units: Iterable[Unit]) -> list[Unit]:
        """The units without a record, in their order, each once."""
        asked = {unit.key: unit for unit in units}
        done = {kind: self.records(kind) for kind in dict.fromkeys(unit.kind for unit in asked.values())}
        return [unit for key, unit in asked.items() if key not in done[unit.kind]]

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Lock the folder while many records are added. Another process that wants to write gets an error.

        Other threads that write by this object wait.
        """
        with self._writer:
            if self._known is not None:
                yield
            else:
                with self._opened():
                    yield

    @contextmanager
    def _opened(self) -> Iterator[None]:
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
        """Store a record: first its tensors, then its row. Both are on disk when this returns.

        Adding the same numbers again does nothing. Other numbers for the same unit raise an error.
        """
        with self.writing():
            assert self._known is not None
            # removed until the row is complete: after an error the end of the file is checked again
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
                # without the tensors themselves: a long run would fill the memory
                known[record.key] = replace(record, tensors={} if stored is None else self._tensors(stored))
            self._known[record.kind] = known

    def set_aside(self, kinds: Iterable[str]) -> list[Path]:
        """Move unreadable files to free names; their content does not change.

        Rows that can be read go into a new file and are not computed again.
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
        """Prepare a file for new rows in the present format, and return its records."""
        if log.mend(self.file(kind)) < FORMAT:
            log.append(self.file(kind), HEADS[FORMAT].encode())
        return self.records(kind)

    def _keep_readable(self, damaged: Path, kind: str) -> None:
        try:
            lines = log.readable_lines(log.read(damaged), kind)
        except CurvlensError:  # a folder, or a file without read permission
            return
        if lines:
            log.append(self.file(kind), lines)


def _require_same(there: Record, record: Record, stored: Stored | None) -> None:
    there, given = (replace(each, result=ordered(each.result)) for each in (there, record))  # in any order
    if line(there, Stored.behind(there.tensors), timed=False) != line(given, stored, timed=False):
        raise CurvlensError(
            f"The study has another result for {record.kind!r} {dict(record.config)!r:.200}. Nothing was written. "
            f"Raise the revision, as Record({record.kind!r}, {record.revision + 1}, …), to store both."
        )
