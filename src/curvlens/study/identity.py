"""The identity of a folder of results: a mapping that is written once and compared whenever the folder is opened.

A study with an identity, such as the fingerprints of a model and its data, owns its folder: it starts in an empty
folder and later opens only its own. A study without an identity may share its folder with other files.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from curvlens import files
from curvlens.errors import CurvlensError, listing
from curvlens.study.lock import NAME as LOCK
from curvlens.study.plain import as_json, decoded, encoded, plain

NAME = "study.json"
LARGEST = 1 << 20
_LEFT = re.compile(rf"{re.escape(LOCK)}|\.curvlens-[0-9a-f]{{16}}\.new")
"""Files that a process leaves in an empty folder if it is killed before the identity is written."""


def checked(identity: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """The identity as plain values; None if there is none."""
    if identity is None:
        return None
    try:
        if not isinstance(identity, Mapping) or not identity:
            raise ValueError("it is not a mapping with at least one entry")
        found: dict[str, Any] = plain(identity, where="identity")
    except ValueError as error:
        raise CurvlensError(f"This identity cannot be stored: {error}. Give one as {{'model': '3f2a…'}}.") from error
    return found


def pinned(folder: Path) -> dict[str, Any] | None:
    """The identity of a folder; None if it has none."""
    file = folder / NAME
    try:
        content = files.parse(files.read(file, LARGEST))
        if not isinstance(content, dict) or content.get("curvlens study") != 1:
            raise ValueError("it is not a file of a study")
        return checked(decoded(content["identity"]))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, KeyError, CurvlensError) as error:
        why = (
            error.strerror
            if isinstance(error, OSError)
            else f"it has no {error}"
            if isinstance(error, KeyError)
            else error
        )
        raise CurvlensError(
            f"{str(file)!r} does not say what the folder belongs to: {str(why).rstrip('.')}. Nothing was written. Give "
            "another folder, or put the file back."
        ) from error


def require(folder: Path, identity: Mapping[str, Any] | None, *, writing: bool) -> None:
    """Raise an error if a folder belongs to something else. Reading needs no identity."""
    there = pinned(folder)
    if identity is None:
        if there is not None and writing:
            raise CurvlensError(
                f"{str(folder)!r} belongs to a study with an identity ({listing(there)}). Open it with the same one: "
                "Study(folder, identity=…), or give another folder."
            )
        return
    if there is None:
        if folder.is_dir() and (found := sorted(f.name for f in folder.iterdir() if not _LEFT.fullmatch(f.name))):
            raise CurvlensError(
                f"{str(folder)!r} belongs to something else: it holds {listing(found, 3)} and no {NAME}. Nothing was "
                "written. Give an empty or a new folder."
            )
        return
    if different := _differences(there, identity):
        raise CurvlensError(
            f"{str(folder)!r} belongs to another study: {'; '.join(different)}. Nothing was written. Give "
            "another folder."
        )


def pin(folder: Path, identity: Mapping[str, Any] | None) -> None:
    """Write the identity of a folder that has none. The caller holds the lock. May raise an OSError."""
    if identity is not None and pinned(folder) is None:
        text = as_json({"curvlens study": 1, "identity": encoded(identity)}) + "\n"
        files.write(folder / NAME, text, seal=".json", fix="Give another folder.")


def _differences(there: Mapping[str, Any], here: Mapping[str, Any]) -> list[str]:
    found = []
    for name in sorted({*there, *here}):
        if name not in here:
            found.append(f"{name} is {_shown(there[name])} there and not given here")
        elif name not in there:
            found.append(f"{name} is not given there and {_shown(here[name])} here")
        elif as_json(encoded(there[name])) != as_json(encoded(here[name])):
            found.append(f"{name} is {_shown(there[name])} there and {_shown(here[name])} here")
    return found


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}…"
