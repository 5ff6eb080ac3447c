"""A record as one line: configuration, numbers, and checksums.

Format 2 is exact to the bit (`plain`) and names the file of the record's tensors. Format 1 had ``experiment`` instead
of ``kind``, ten digits of every number, infinities and NaN as texts, and no tensors. Rows of format 1 are read and
written in format 1, so a table of old rows does not change.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from curvlens import files
from curvlens.errors import CurvlensError
from curvlens.study.plain import as_json, decoded, encoded
from curvlens.study.tensors import Stored
from curvlens.study.unit import FORMAT, Record, digest, ordered

HEADS = {number: as_json({"curvlens results": number}) + "\n" for number in (1, FORMAT)}
"""The first line of every file. A file that began in format 1 has the line of format 2 before its first new row."""
BEGIN = '{"key":"'
Open = Callable[[Stored], Mapping[str, Tensor]]
"""Returns the tensors of a row, from its description of them."""


def line(record: Record, stored: Stored | None = None, *, timed: bool = True) -> str:
    """A record as a line. Without the time, equal numbers give equal lines."""
    old = record.format == 1
    result = record.result if old else encoded(record.result)
    content = {
        "key": record.key,
        "experiment" if old else "kind": record.kind,
        "revision": record.revision,
        "config": ordered(record.config),
        "result": result,
    }
    if stored is not None:
        content["tensors"] = stored.to_dict()
    content["check"] = _check(content, record.format)
    if timed:
        content["seconds"] = round(float(record.seconds), 3 if old else 6)
    return as_json(content) + "\n"


def parsed(text: bytes, tensors: Open = Stored.none) -> Record:
    """The record of a line. Raise ValueError with the reason if the line is wrong."""
    try:
        content = files.parse(text)
        number = 1 if "experiment" in content else FORMAT
        kind, seconds = (
            content["experiment" if number == 1 else "kind"],
            content.get("seconds", 0.0),
        )  # a table has no times
        if type(seconds) not in (int, float):
            raise ValueError("its seconds are no number")
        stored = Stored.of(content["tensors"]) if "tensors" in content else None
        result = content["result"] if number == 1 else decoded(content["result"])
        held = {} if stored is None else tensors(stored)
        record = Record(kind, content["revision"], content["config"], result, seconds, held, number)
        if content["key"] != record.key:
            raise ValueError("its key does not belong to its configuration")
        if content["check"] != _check(content, number):
            raise ValueError("its numbers were changed")
    except KeyError as error:
        raise ValueError(f"it has no {error}") from error
    except CurvlensError as error:
        raise ValueError(str(error).rstrip(".")) from error
    except (TypeError, AttributeError, RecursionError) as error:
        raise ValueError("it is not a record") from error
    return record


def table(records: Mapping[str, Record]) -> str:
    """All records by kind and configuration, as lines without times. Equal numbers give equal tables."""
    rows = sorted(records.values(), key=lambda r: (r.kind, r.revision, as_json(ordered(r.config))))
    head = HEADS[max((row.format for row in rows), default=FORMAT)]
    return head + "".join(line(row, Stored.behind(row.tensors), timed=False) for row in rows)


def head_format(text: bytes) -> int | None:
    """The format in a first line; None if it is no first line of ours. In a table it also contains the seal."""
    try:
        head = files.parse(text)
    except ValueError:
        return None
    if not isinstance(head, dict) or not head.keys() <= {"curvlens results", "written by"}:
        return None
    number = head.get("curvlens results")
    return number if type(number) is int and number in HEADS else None


def _check(content: Mapping[str, Any], number: int) -> str:
    """A short checksum of a result: it shows that a number in a file was changed."""
    if number == 1:
        return digest([content["key"], content["result"]], 6)
    return digest([content["key"], content["result"], content.get("tensors")], 16)
