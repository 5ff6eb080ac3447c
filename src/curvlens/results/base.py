"""Saving and loading: numbers in a JSON file, tensors in a safetensors file beside it, no code."""

from __future__ import annotations

import dataclasses
import hashlib
import html
import json
import math
import os
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from itertools import count
from pathlib import Path
from types import UnionType
from typing import TYPE_CHECKING, Any, ClassVar, Union, get_args, get_origin, get_type_hints

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor

from curvlens import files
from curvlens.errors import CurvlensError, CurvlensWarning
from curvlens.memory import available_bytes
from curvlens.results import format_one
from curvlens.results.status import Status

FORMAT = 2
"""The format of new files. Format 1 can also be read: `curvlens.results.format_one`."""
LARGEST = 64 << 20
"""The most bytes of a JSON file: a result of 10,000 modules has 20 MiB, and Python needs up to 25 times that to read
it."""
DTYPES = {torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.bool}
"""The dtypes of tensors in results. torch has no maximum for complex and unsigned ones."""
Provenance = dict[str, Any]
"""Operator, seed, dtype and versions that a result comes from."""


class Result:
    """A frozen dataclass of numbers, texts, tensors and mappings of those, with the status of its computation."""

    kinds: ClassVar[dict[str, type[Result]]] = {}

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        Result.kinds[cls.__name__] = cls

    if TYPE_CHECKING:  # a field in some results; in others a property computed from the parts

        @property
        def status(self) -> Status:
            """How the computation ended."""

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers, lists and texts, as in JSON; None for numbers that are not finite."""
        return {name: _plain(value) for name, value in self._fields().items()}

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write ``path.json``, and tensors with an axis into a safetensors file that it names. Return the JSON path.

        An existing result is replaced as a whole: until the new JSON file is complete, the old result can be read. A
        file that is not a saved result stays. The result then goes to a free name beside it, with a warning.
        """
        text = _free(path)
        tensors: dict[str, Tensor] = {}
        document: dict[str, Any] = {"format": FORMAT, "kind": type(self).__name__, "curvlens": version("curvlens")}
        document["fields"] = {name: _split(value, tensors) for name, value in self._fields().items()}
        with _explained(text):
            text.parent.mkdir(parents=True, exist_ok=True)
            old = _old_tensors(text)
            if tensors:
                content = save_tensors(tensors)
                digest = hashlib.sha256(content).hexdigest()
                document["tensors"] = {"file": f"{text.stem}.{digest[:16]}.safetensors", "sha256": digest}
                files.write(text.with_name(document["tensors"]["file"]), content)
            files.write(text, json.dumps(document, indent=1) + "\n", seal=".json")
            if old is not None and old.name != document.get("tensors", {}).get("file"):
                old.unlink(missing_ok=True)
        return text

    def table(self) -> list[dict[str, Any]]:
        """Flat records of plain numbers and texts, one for each row."""
        raise NotImplementedError(f"{type(self).__name__} has no table")

    def to_pandas(self) -> Any:
        """The `table` as a ``pandas.DataFrame``."""
        try:
            import pandas  # type: ignore[import-untyped,unused-ignore]
        except ImportError as error:
            raise CurvlensError("to_pandas() needs pandas. Install it: pip install 'curvlens[report]'.") from error
        return pandas.DataFrame(self.table())

    def plot(self, path: str | os.PathLike[str] | None = None, **options: Any) -> Any:
        """An Altair chart, which a notebook shows. Options: `curvlens.report.plots.plot`.

        With a path ending in .svg, .png, .pdf, .html or .json it is also written to that file.
        """
        from curvlens.report.plots import plot

        return plot(self._pictured(), path, **options)

    def _pictured(self) -> Result:
        """The result that `plot` draws: this one, or an equivalent one that has a picture."""
        return self

    def _repr_html_(self) -> str:
        """The printed text for notebooks, with names and notes escaped."""
        return f"<pre>{html.escape(str(self))}</pre>"

    def _fields(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}  # type: ignore[arg-type]

    @classmethod
    def _from_fields(cls, fields: dict[str, Any]) -> Result:
        hints = get_type_hints(cls)
        for name, value in fields.items():
            if hints.get(name) is Status:
                fields[name] = Status(value)
            elif not _is(value, hints.get(name, Any)):
                raise TypeError(f"{name} is {value!r:.60}, expected {getattr(hints[name], '__name__', hints[name])}")
        return cls(**fields)


def load(path: str | os.PathLike[str]) -> Any:
    """Read a result of any kind that ``save`` wrote; ``path`` with or without ``.json``.

    >>> import tempfile, pathlib
    >>> path = pathlib.Path(tempfile.mkdtemp()) / "trace"
    >>> trace(torch.eye(3, dtype=torch.float64)).save(path).name
    'trace.json'
    >>> float(load(path).value)
    3.0
    """
    text = _json_file(path)
    document = _read(text)
    kind, fields = document.get("kind"), document.get("fields")
    format = document.get("format")
    if format not in (1, FORMAT) or not isinstance(kind, str) or kind not in Result.kinds:
        raise CurvlensError(
            f"{str(text)!r} holds a {kind!r} in format {format!r}; this version of curvlens reads "
            f"formats 1 and {FORMAT}: {', '.join(sorted(Result.kinds))}. curvlens {document.get('curvlens')} wrote it."
        )
    if not isinstance(fields, dict):
        raise CurvlensError(f"{str(text)!r} is not a complete {kind}: it has no fields.")
    tensors: dict[str, Tensor] = {}
    file = _tensor_file(text, document)
    if file is not None:
        with _explained(file):
            try:
                # the bytes, and the tensors made from them
                content = files.read(file, available_bytes(torch.device("cpu")) // 2, "half of the free memory")
            except FileNotFoundError:
                raise CurvlensError(f"{text.name!r} needs {str(file)!r}, which is missing.") from None
        if hashlib.sha256(content).hexdigest() != document["tensors"].get("sha256"):
            raise CurvlensError(
                f"{str(file)!r} is not the file that {text.name!r} was saved with: it was replaced or cut short."
            )
        try:
            tensors = load_tensors(content)
            strange = {x.dtype for x in tensors.values()} - DTYPES
            if strange:
                raise TypeError(f"it has tensors in {strange.pop()}")
        except (SafetensorError, KeyError, ValueError, TypeError, RuntimeError) as error:  # a KeyError: of its dtypes
            raise CurvlensError(f"{str(file)!r} is damaged: {error}.") from error
    try:
        return _join({"$kind": kind, "fields": fields}, tensors, old=format == 1)
    except (TypeError, LookupError, AttributeError, ValueError, RuntimeError, ArithmeticError) as error:
        raise CurvlensError(f"{str(text)!r} is not a complete {kind}: {error}.") from error


def to_plain(result: Result) -> tuple[Any, dict[str, Tensor]]:
    """A result as plain values for JSON, and the tensors that these name: for a store of one's own."""
    tensors: dict[str, Tensor] = {}
    return _split(result, tensors), tensors


def from_plain(document: Any, tensors: dict[str, Tensor] | None = None) -> Any:
    """The inverse of `to_plain`."""
    return _join(document, tensors or {}, old=False)


def claim(path: str | os.PathLike[str]) -> Path:
    """The file that ``save(path)`` writes. Raise an error if the existing file was not written by ``save``."""
    text = _json_file(path)
    with _explained(text):
        try:
            files.require_ours(text, "Move it away, or choose another name.")
        except CurvlensError:
            if not _is_unsealed(text):
                raise
    return text


def _free(path: str | os.PathLike[str]) -> Path:
    """The file that ``save(path)`` writes, or a free name beside it: hours of work are not lost over a name."""
    try:
        return claim(path)
    except CurvlensError as error:
        text = _json_file(path)
        if not text.is_file():
            raise
        names = (text.with_name(f"{text.stem}-{number}.json") for number in count(2))
        free = next(name for name in names if not name.exists())
        warnings.warn(f"{error} The result is saved as {free.name!r}.", CurvlensWarning, stacklevel=3)
        return free


def _is_unsealed(text: Path) -> bool:
    """Whether a file is a result from before files had a seal."""
    try:
        document = _read(text)
    except CurvlensError:
        return False
    kind = document.get("kind")
    return list(document)[:4] == ["format", "kind", "curvlens", "fields"] and kind in list(Result.kinds)


def _is(value: Any, hint: Any) -> bool:
    """Whether a value from a file has the type of its field. For generic hints, only those in use are known."""
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return any(_is(value, each) for each in args)
    if origin is dict:
        return isinstance(value, dict) and all(_is(each, args[1]) for each in value.values())
    if hint is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    return isinstance(value, hint) if hint in (str, int, bool) or _is_result(hint) else True


def _is_result(hint: Any) -> bool:
    return isinstance(hint, type) and issubclass(hint, Result)


def require_tensors(result: Any, *names: str) -> None:
    """Check that these fields of a loaded result are tensors."""
    for name in names:
        if not isinstance(getattr(result, name), Tensor):
            raise TypeError(f"{name} is a {type(getattr(result, name)).__name__}, expected a tensor")


def _json_file(path: str | os.PathLike[str]) -> Path:
    given = os.fspath(path)
    path = Path(given)
    if path.name in ("", ".", "..") or str(given).endswith(("/", os.sep)):
        raise CurvlensError(f"{str(given)!r} names no file to save to. Give a path like 'run/eigs'.")
    stem = path.with_suffix("") if path.suffix == ".json" else path
    return stem.with_name(stem.name + ".json")


def _read(text: Path) -> dict[str, Any]:
    with _explained(text):
        try:
            document = files.parse(files.read(text, LARGEST).decode("utf-8"))
        except FileNotFoundError:
            raise CurvlensError(f"There is no result at {str(text)!r}. Give the path that save() returned.") from None
        except ValueError as error:
            raise CurvlensError(f"{str(text)!r} is not a saved result: {error}.") from error
    if not isinstance(document, dict):
        raise CurvlensError(f"{str(text)!r} is not a saved result: it holds a {type(document).__name__}.")
    return document


def _old_tensors(text: Path) -> Path | None:
    """The tensor file of the result that will be replaced, if there is one."""
    try:
        return _tensor_file(text, _read(text))
    except CurvlensError:
        return None


def _tensor_file(text: Path, document: dict[str, Any]) -> Path | None:
    """The tensor file of a saved result. It must be in the same folder and have a name that ``save`` gives."""
    named = document.get("tensors")
    if named is None:
        return None
    name = named.get("file") if isinstance(named, dict) else None
    if not isinstance(name, str) or not re.fullmatch(rf"{re.escape(text.stem)}\.[0-9a-f]{{16}}\.safetensors", name):
        raise CurvlensError(
            f"{str(text)!r} names {name!r} as the file of its tensors, which is not the name of such a file."
        )
    return text.with_name(name)


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    """Raise errors of the file system as a `CurvlensError`."""
    try:
        yield
    except (OSError, ValueError) as error:
        said = getattr(error, "strerror", None) or error
        raise CurvlensError(f"{str(path)!r} could not be read or written: {said}.") from error


def _plain(value: Any) -> Any:
    if isinstance(value, (Tensor, np.ndarray)):
        return _plain(value.tolist())
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Result):
        return value.to_dict()
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value.value if isinstance(value, Status) else value


def _split(value: Any, tensors: dict[str, Tensor]) -> Any:
    """A value for JSON. Tensors with an axis go into the other file and are replaced by a reference."""
    if isinstance(value, (Tensor, np.ndarray)) and value.ndim:
        place = str(len(tensors))
        kind = "$tensor" if isinstance(value, Tensor) else "$array"
        # A copy: safetensors rejects tensors that share memory.
        tensors[place] = torch.as_tensor(value).detach().cpu().clone(memory_format=torch.contiguous_format)
        return {kind: place}
    if isinstance(value, Tensor):
        return {"$scalar": _split(value.item(), tensors)}
    if isinstance(value, Result):
        return {
            "$kind": type(value).__name__,
            "fields": {k: _split(v, tensors) for k, v in value._fields().items()},
        }
    if isinstance(value, dict):
        return {"$dict": [[str(k), _split(v, tensors)] for k, v in value.items()]}
    if isinstance(value, (list, tuple)):
        return [_split(item, tensors) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return {"$float": str(value)}
    return value.value if isinstance(value, Status) else value


def _join(value: Any, tensors: dict[str, Tensor], *, old: bool) -> Any:
    """The inverse of `_split`; with ``old`` the results inside have format 1."""
    if isinstance(value, list):
        return [_join(item, tensors, old=old) for item in value]
    if not isinstance(value, dict):
        return value
    if "$tensor" in value:
        return tensors[value["$tensor"]]
    if "$array" in value:
        return tensors[value["$array"]].numpy()
    if "$scalar" in value:
        return torch.tensor(_join(value["$scalar"], tensors, old=old), dtype=torch.float64)
    if "$float" in value:
        return float(value["$float"])
    if "$kind" in value:
        fields = {k: _join(v, tensors, old=old) for k, v in value["fields"].items()}
        if old:
            fields = format_one.upgraded(value["$kind"], fields)
        return Result.kinds[value["$kind"]]._from_fields(fields)
    return {key: _join(item, tensors, old=old) for key, item in value["$dict"]}
