"""`curvlens.compare`: what changed between analyses, with errors."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from curvlens import files
from curvlens.analysis.compare_page import page
from curvlens.analysis.compare_sentences import changes
from curvlens.analysis.compared import compared
from curvlens.analysis.result import load_analysis
from curvlens.errors import CurvlensError, a_kind, listing, printable
from curvlens.report.commas import commas

FIX = "Give another name: out='other.html', or --out other.html."
LARGEST = 1 << 20
"""Most bytes of a study.json."""


@dataclass(frozen=True)
class Comparison:
    """What changed between analyses. ``print(comparison)`` has its sentences; `table` has all differences."""

    content: dict[str, Any]
    """Plain numbers with errors, as ``compare.json`` has them."""
    page: Path | None = None
    """Where the page is, if one was written."""

    @property
    def names(self) -> list[str]:
        """Of the analyses, in the order given."""
        return [run["name"] for run in self.content["runs"]]

    @property
    def sentences(self) -> list[str]:
        """What changed, one sentence each; first what makes the analyses hard to compare."""
        return [*self.content["notes"], *(each["text"] for each in self.content["sentences"])]

    def __repr__(self) -> str:
        place = f": {self.page}" if self.page is not None else ""
        lines = [f"Comparison of {', '.join(self.names)}{place}", *(f"  {text}" for text in self.sentences)]
        return "\n".join(map(printable, lines))

    def table(self) -> list[dict[str, Any]]:
        """A record for each difference: between which, of what, both values with errors, difference, error, ratio.

        ``block`` is empty for numbers of the whole model. ``clear`` says whether the difference is larger than twice
        its error (None: the error is not known).
        """
        names, found = self.names, list[dict[str, Any]]()
        for place, each in enumerate(self.content["differences"], start=1):
            for key, change in each["whole"].items():
                about = self.content["numbers"][key]
                values = about["values"][0], about["values"][place]
                found.append(_record(names, place, about["operator"], about["quantity"], "", values, change))
            for letter, quantities in each["cells"].items():
                for quantity, cells in quantities.items():
                    for block, change in cells.items():
                        both = self.content["cells"][letter][quantity][block]
                        found.append(_record(names, place, letter, quantity, block, (both[0], both[place]), change))
        return found

    def to_pandas(self) -> Any:
        """The `table` as a ``pandas.DataFrame``."""
        try:
            import pandas  # type: ignore[import-untyped,unused-ignore]
        except ImportError as error:
            raise CurvlensError("to_pandas() needs pandas. Install it: pip install 'curvlens[report]'.") from error
        return pandas.DataFrame(self.table())


def compare(
    folders: Sequence[str | os.PathLike[str]],
    out: str | os.PathLike[str] | None = None,
    names: Sequence[str] | None = None,
) -> Comparison:
    """Compare the analyses of two or more folders, in the order given: differences of all numbers, with errors.

    Differences are taken from the first folder. A difference is a change if it is larger than twice its error and its
    95 % interval excludes 0. Blocks are compared by their names; what the analyses do not share is said.

    Args:
        folders: folders that `curvlens.analyze` wrote, such as one for each checkpoint.
        out: a page to write, as ``"compare.html"``; ``compare.json`` and ``compare.csv`` are written beside it.
        names: of the analyses. Default: those of their folders.
    """
    paths = _paths(folders)
    called = _names(paths, names)
    place = None if out is None else _free(Path(out))
    documents = [load_analysis(path).content for path in paths]
    for path, document in zip(paths, documents, strict=True):
        _require_whole(path, document)
    content = compared(documents, called, [_identity(path) for path in paths])
    if not content["blocks"]:
        raise CurvlensError(
            "The analyses have no block in common: "
            + "; ".join(
                f"{name!r} has {listing(_block_names(d), 3)}" for name, d in zip(called, documents, strict=True)
            )
            + ". Compare analyses of models of one architecture."
        )
    if not any(each["whole"] or each["cells"] for each in content["differences"]):
        raise CurvlensError("The analyses have no number in common. Run curvlens analyze with a larger --budget.")
    content["runs"] = [{**run, "folder": str(path)} for run, path in zip(content["runs"], paths, strict=True)]
    content["provenance"] = {"curvlens": version("curvlens")}
    content["sentences"] = [dataclasses.asdict(each) for each in changes(content)]
    comparison = Comparison(content, place)
    if place is not None:
        _write(comparison, place)
    return comparison


def _paths(folders: Sequence[str | os.PathLike[str]]) -> list[Path]:
    if isinstance(folders, (str, os.PathLike)):
        folders = [folders]
    if not isinstance(folders, Sequence) or not all(isinstance(each, (str, os.PathLike)) for each in folders):
        raise CurvlensError(f"compare takes folders of analyses, got {a_kind(folders)}: cl.compare(['run1', 'run2']).")
    if len(folders) < 2:
        given = listing([str(each) for each in folders]) or "none"
        raise CurvlensError(
            f"compare needs two or more folders of analyses, got {given}. Give another: cl.compare(['run1', 'run2']) "
            "or curvlens compare run1 run2."
        )
    paths = [Path(each) for each in folders]
    twice = [str(path) for place, path in enumerate(paths) if path.resolve() in [p.resolve() for p in paths[:place]]]
    if twice:
        raise CurvlensError(f"{listing(twice)} is given twice. Give each folder once.")
    return paths


def _names(paths: Sequence[Path], names: Sequence[str] | None) -> list[str]:
    if names is None:
        parts = [path.resolve().parts for path in paths]
        deepest = max(map(len, parts))
        candidates = ["/".join(part[-depth:]) for depth in range(1, deepest + 1) for part in parts]
        for start in range(0, len(candidates), len(paths)):
            found = candidates[start : start + len(paths)]
            if len(set(found)) == len(found):
                return found
        return [str(path) for path in paths]
    found = [names] if isinstance(names, str) else [str(name).strip() for name in names]
    if len(found) != len(paths) or len(set(found)) < len(found) or not all(found):
        raise CurvlensError(
            f"names= needs {len(paths)} different names, one for each folder, got {listing(found) or 'none'}. "
            "Leave it out to have the names of the folders."
        )
    return found


def _require_whole(path: Path, document: Mapping[str, Any]) -> None:
    """Raise an error for a document that lacks what every analysis has."""
    blocks = document.get("blocks")
    whole = isinstance(blocks, list) and all(
        isinstance(block, Mapping)
        and isinstance(block.get("name"), str)
        and isinstance(block.get("role"), str)
        and isinstance(block.get("layer"), (str, type(None)))
        and isinstance(block.get("size"), int)
        for block in blocks
    )
    if not whole or not all(isinstance(document.get(key), Mapping) for key in ("cells", "whole", "spectrum")):
        raise CurvlensError(
            f"{str(path / 'analysis.json')!r} is damaged: it lacks blocks, cells, whole or spectrum. Run the same "
            f"curvlens analyze with --out {path} again: it writes the file from the stored units."
        )


def _block_names(document: Mapping[str, Any]) -> list[str]:
    return [block["name"] for block in document["blocks"]]


def _identity(folder: Path) -> dict[str, str]:
    """Fingerprints of weights and data, where the folder still has them."""
    try:
        found = files.parse(files.read(folder / "study.json", LARGEST))["identity"]
        return {key: str(found[key]) for key in ("model", "data") if key in found}
    except (OSError, ValueError, LookupError, TypeError, CurvlensError):
        return {}


def _free(out: Path) -> Path:
    """The page, if all three files may be written."""
    if out.suffix != ".html":
        raise CurvlensError(f"out={str(out)!r} is no name of a page. Use out={str(out.with_suffix('.html'))!r}.")
    if not out.parent.is_dir():
        raise CurvlensError(f"{str(out)!r} cannot be written: there is no folder {str(out.parent)!r}. Make it first.")
    for kind in (".html", ".json", ".csv"):
        files.require_ours(out.with_suffix(kind), FIX)
    return out


def _write(comparison: Comparison, out: Path) -> None:
    contents = {
        ".html": page(comparison.content),
        ".json": json.dumps(comparison.content, indent=1, allow_nan=False) + "\n",
        ".csv": commas(comparison.table()),
    }
    for kind, text in contents.items():
        file = out.with_suffix(kind)
        try:
            files.write(file, text, seal=kind, fix=FIX)
        except OSError as error:
            raise CurvlensError(f"{str(file)!r} could not be written: {error.strerror}. {FIX}") from error


def _record(
    names: Sequence[str],
    place: int,
    letter: str,
    quantity: str,
    block: str,
    values: Sequence[Any],
    change: Mapping[str, Any],
) -> dict[str, Any]:
    one, other = values
    return {
        "from": names[0],
        "to": names[place],
        "operator": letter,
        "quantity": quantity,
        "block": block,
        "value_from": one["value"],
        "error_from": one.get("bound", one.get("stderr")),
        "value_to": other["value"],
        "error_to": other.get("bound", other.get("stderr")),
        "difference": change["value"],
        "error": change.get("bound", change.get("stderr")),
        "error_is": "bound" if "bound" in change else "stderr",
        "low": change["low"],
        "high": change["high"],
        "ratio": change["ratio"],
        "clear": change["clear"],
    }
