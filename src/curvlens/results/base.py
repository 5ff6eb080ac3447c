"""Saving and loading: numbers in a JSON file, tensors in a safetensors file beside it, nothing that runs."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
from importlib.metadata import version
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor

from curvlens.errors import CurvlensError

FORMAT = 1
Provenance = dict[str, Any]
"""Which operator, seed, dtype and versions a result comes from."""


class Result:
    """A frozen dataclass of numbers, texts, tensors and mappings of those."""

    kinds: ClassVar[dict[str, type[Result]]] = {}

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        Result.kinds[cls.__name__] = cls

    def to_dict(self) -> dict[str, Any]:
        """Plain numbers, lists and texts."""
        return {name: _plain(value) for name, value in self._fields().items()}

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write ``path.json`` and, for tensors with an axis, ``path.safetensors``; returns the first.

        Each file appears whole or not at all, the JSON file last.
        """
        text = _stem(path).with_name(_stem(path).name + ".json")
        tensors: dict[str, Tensor] = {}
        fields = {name: _split(value, name, tensors) for name, value in self._fields().items()}
        document: dict[str, Any] = {
            "format": FORMAT,
            "kind": type(self).__name__,
            "curvlens": version("curvlens"),
            "fields": fields,
        }
        text.parent.mkdir(parents=True, exist_ok=True)
        if tensors:
            content = save_tensors(tensors)
            document["tensors"] = hashlib.sha256(content).hexdigest()
            _write(_beside(text), content)
        _write(text, (json.dumps(document, indent=1, ensure_ascii=False) + "\n").encode())
        return text

    def _fields(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}  # type: ignore[arg-type]

    @classmethod
    def _from_fields(cls, fields: dict[str, Any]) -> Result:
        return cls(**fields)


Kind = TypeVar("Kind", bound=Result)


def load(path: str | os.PathLike[str]) -> Any:
    """Read a result that was saved with its ``save``, whatever its kind; ``path`` with or without ``.json``.

    >>> import tempfile, pathlib
    >>> path = pathlib.Path(tempfile.mkdtemp()) / "trace"
    >>> trace(torch.eye(3, dtype=torch.float64)).save(path).name
    'trace.json'
    >>> float(load(path).value)
    3.0
    """
    text = _stem(path).with_name(_stem(path).name + ".json")
    try:
        document = json.loads(text.read_text(encoding="utf-8"))
        kind, fields = document["kind"], document["fields"]
    except FileNotFoundError:
        raise CurvlensError(f"There is no result at {str(text)!r}. Give the path that save() returned.") from None
    except (ValueError, KeyError, TypeError) as error:
        raise CurvlensError(f"{str(text)!r} is no saved result: {error}.") from error
    if document.get("format") != FORMAT or kind not in Result.kinds:
        raise CurvlensError(
            f"{str(text)!r} holds a {kind!r} in format {document.get('format')!r}; this version of curvlens reads "
            f"format {FORMAT}: {', '.join(sorted(Result.kinds))}. curvlens {document.get('curvlens')} wrote it."
        )
    tensors: dict[str, Tensor] = {}
    if "tensors" in document:
        try:
            content = _beside(text).read_bytes()
            if hashlib.sha256(content).hexdigest() != document["tensors"]:
                raise CurvlensError(
                    f"{str(_beside(text))!r} is not the file that {text.name!r} was saved with: one of them was "
                    "replaced or cut short."
                )
            tensors = load_tensors(content)
        except FileNotFoundError:
            raise CurvlensError(f"{text.name!r} needs {str(_beside(text))!r}, which is missing.") from None
        except SafetensorError as error:
            raise CurvlensError(f"{str(_beside(text))!r} is damaged: {error}.") from error
    try:
        return Result.kinds[kind]._from_fields({name: _join(value, tensors) for name, value in fields.items()})
    except (TypeError, KeyError, AttributeError, ValueError) as error:
        raise CurvlensError(f"{str(text)!r} is no complete {kind}: {error}.") from error


def _stem(path: str | os.PathLike[str]) -> Path:
    path = Path(path)
    if path.name in ("", ".", ".."):
        raise CurvlensError(f"{str(path)!r} names no file to save to. Give a path like 'run/eigs'.")
    return path.with_suffix("") if path.suffix in (".json", ".safetensors") else path


def _beside(text: Path) -> Path:
    return text.with_suffix(".safetensors")


def _write(path: Path, content: bytes) -> None:
    """All or nothing: a name that exists holds the whole content."""
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        part.write_bytes(content)
        part.replace(path)
    except OSError as error:
        raise CurvlensError(f"{str(path)!r} could not be written: {error.strerror or error}.") from error
    finally:
        part.unlink(missing_ok=True)


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.tolist()
    if isinstance(value, Result):
        return value.to_dict()
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value


def _split(value: Any, place: str, tensors: dict[str, Tensor]) -> Any:
    """A value for JSON; tensors with an axis go into the other file and leave their place."""
    if isinstance(value, Tensor) and value.ndim:
        tensors[place] = value.detach().cpu().contiguous()
        return {"$tensor": place}
    if isinstance(value, Tensor):
        return {"$scalar": _split(value.item(), place, tensors)}
    if isinstance(value, Result):
        fields = {k: _split(v, f"{place}/{k}", tensors) for k, v in value._fields().items()}
        return {"$kind": type(value).__name__, "fields": fields}
    if isinstance(value, dict):
        return {"$dict": [[str(k), _split(v, f"{place}/{k}", tensors)] for k, v in value.items()]}
    if isinstance(value, (list, tuple)):
        return [_split(item, f"{place}/{i}", tensors) for i, item in enumerate(value)]
    if isinstance(value, float) and not math.isfinite(value):
        return {"$float": str(value)}
    return value


def _join(value: Any, tensors: dict[str, Tensor]) -> Any:
    if isinstance(value, list):
        return [_join(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    if "$tensor" in value:
        return tensors[value["$tensor"]]
    if "$scalar" in value:
        return torch.tensor(_join(value["$scalar"], tensors), dtype=torch.float64)
    if "$float" in value:
        return float(value["$float"])
    if "$kind" in value:
        fields = {k: _join(v, tensors) for k, v in value["fields"].items()}
        return Result.kinds[value["$kind"]]._from_fields(fields)
    return {key: _join(item, tensors) for key, item in value["$dict"]}
