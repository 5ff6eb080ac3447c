"""Tensors beside the rows: one safetensors file for each record, named by the SHA-256 of its content.

A file is written completely, and before the row that names it: a row never names missing tensors. It is read when a
tensor is first used, and accepted only if its content has the checksum in the row.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from curvlens import files
from curvlens.errors import CurvlensError, listing
from curvlens.memory import readable

FOLDER = "tensors"
_DIGEST = re.compile(r"[0-9a-f]{64}")
_UNFINISHED = re.compile(r"\.curvlens-[0-9a-f]{16}\.new")
"""The temporary name of a file in `files.write`; a killed process leaves it behind."""


@dataclass(frozen=True)
class Stored:
    """The description of the tensors in a row."""

    sha256: str
    size: int
    names: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """The description as a dict for the row."""
        return {"sha256": self.sha256, "bytes": self.size, "names": list(self.names)}

    @classmethod
    def of(cls, content: Any) -> Stored:
        """The description from a row. Raise ValueError if it is wrong."""
        if not isinstance(content, dict) or content.keys() != {"sha256", "bytes", "names"}:
            raise ValueError("its tensors have other entries than sha256, bytes and names")
        sha256, size, names = content["sha256"], content["bytes"], content["names"]
        if type(sha256) is not str or not _DIGEST.fullmatch(sha256) or type(size) is not int or size < 0:
            raise ValueError("its tensors have no SHA-256 or no size")
        if not isinstance(names, list) or not all(type(name) is str for name in names):
            raise ValueError("the names of its tensors are no texts")
        return cls(sha256, size, tuple(names))

    @staticmethod
    def behind(tensors: Mapping[str, Tensor]) -> Stored | None:
        """The stored description of a record's tensors; None if there are none."""
        return tensors.stored if isinstance(tensors, OnDisk) else packed(tensors)[0] if tensors else None

    def none(self) -> Mapping[str, Tensor]:
        """For callers that need only the numbers of a row."""
        return {}


class OnDisk(Mapping[str, Tensor]):
    """The tensors of a stored record. The names are known; the file is read when a tensor is first used."""

    def __init__(self, folder: Path, stored: Stored) -> None:
        self.file, self.stored = path(folder, stored), stored

    def __getitem__(self, name: str) -> Tensor:
        if name not in self.stored.names:
            raise KeyError(name)
        return self._read[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.stored.names)

    def __len__(self) -> int:
        return len(self.stored.names)

    def __repr__(self) -> str:
        return f"<{listing(self.stored.names)} in {str(self.file)!r}>"

    @cached_property
    def _read(self) -> dict[str, Tensor]:
        try:
            content = files.read(self.file, self.stored.size)
        except FileNotFoundError:
            raise self._error("is missing") from None
        except OSError as error:
            raise self._error(f"cannot be read: {error.strerror}") from error
        except CurvlensError as error:
            raise self._error(f"is not the file that was stored: {error}") from error
        if len(content) < self.stored.size:
            raise self._error(f"is cut off: {readable(len(content))} of {readable(self.stored.size)} are there")
        if hashlib.sha256(content).hexdigest() != self.stored.sha256:
            raise self._error("was changed: its content does not have the stored SHA-256")
        try:
            found: dict[str, Tensor] = load(content)
        except (SafetensorError, KeyError, ValueError) as error:
            raise self._error(f"is not a safetensors file: {error}") from error
        if found.keys() != set(self.stored.names):
            raise self._error(f"holds other tensors: {listing(sorted(found))}")
        return found

    def _error(self, what: str) -> CurvlensError:
        return CurvlensError(
            f"{str(self.file)!r} {what}. It holds the tensors {listing(self.stored.names)} of a record. Copy the file "
            "from where the study was computed, or delete the row that names it and compute the unit again."
        )


def path(folder: Path, stored: Stored) -> Path:
    """The file of a record's tensors."""
    return folder / FOLDER / f"{stored.sha256}.safetensors"


def require_storable(tensors: Any) -> None:
    """Raise an error for tensors that safetensors cannot hold or cannot read back."""
    if isinstance(tensors, OnDisk):
        return
    if not isinstance(tensors, Mapping):
        raise CurvlensError(f"tensors is of type {type(tensors).__name__}. Give names with tensors, as {{'v': v}}.")
    for name, tensor in tensors.items():
        if not isinstance(name, str) or not isinstance(tensor, Tensor):
            kind = type(tensor).__name__
            raise CurvlensError(f"tensors[{name!r:.40}] is of type {kind}. Give names with tensors, as {{'v': v}}.")
        if tensor.is_nested:
            raise CurvlensError(f"tensors[{name!r:.40}] is nested. Store its parts, t.unbind(), by name.")
        if tensor.layout != torch.strided or tensor.is_quantized:
            raise CurvlensError(f"tensors[{name!r:.40}] is sparse or quantised. Store t.to_dense() or t.dequantize().")
        if tensor.is_meta:
            raise CurvlensError(f"tensors[{name!r:.40}] is on the device 'meta' and has no numbers. Compute it first.")
        if name == "__metadata__":
            raise CurvlensError("tensors['__metadata__']: safetensors keeps this name for itself. Rename the tensor.")
    for dtype in {tensor.dtype for tensor in tensors.values()}:
        try:  # safetensors writes some dtypes that it cannot read
            known = load(save({"": torch.empty(0, dtype=dtype)}))[""].dtype == dtype
        except (KeyError, ValueError, SafetensorError):
            known = False
        if not known:
            raise CurvlensError(
                f"Tensors of {dtype} cannot be stored by safetensors. Store a complex tensor as "
                "torch.view_as_real(tensor), others in another dtype, as tensor.float()."
            )


def packed(tensors: Mapping[str, Tensor]) -> tuple[Stored, bytes]:
    """The content of a file with the tensors, on the CPU, and its description; equal bits give equal files."""
    require_storable(tensors)
    # clones: safetensors rejects tensors that share memory
    content = save({name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()})
    return Stored(hashlib.sha256(content).hexdigest(), len(content), tuple(sorted(tensors))), content


def write(folder: Path, stored: Stored, content: bytes) -> None:
    """Write the file unless it exists. A damaged file of its name is moved away. May raise an OSError."""
    file = path(folder, stored)
    file.parent.mkdir(exist_ok=True)
    if os.path.lexists(file):
        with suppress(OSError, CurvlensError):
            if files.read(file, stored.size) == content:
                return
        files.set_aside(file)
    files.write(file, content)


def sweep(folder: Path) -> None:
    """Remove incomplete files of killed processes; only for the process that holds the lock."""
    for place in (folder, folder / FOLDER):
        for file in place.iterdir() if place.is_dir() else ():
            if _UNFINISHED.fullmatch(file.name):
                file.unlink(missing_ok=True)
