"""What ``--data`` names, read with bounds: a text, lines of JSON, or tokens. Nothing is unpickled."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from curvlens import files
from curvlens.cli.code import first_line
from curvlens.cli.defaults import Options
from curvlens.data import Characters
from curvlens.errors import CurvlensError

LARGEST = 256 << 20
"""Bytes of a file of data."""
KINDS = "a text file, .jsonl, tokens as .npy or .bin, or builtin"
_OTHERS = (".json", ".npz", ".pt", ".pth", ".pkl", ".pickle", ".safetensors", ".parquet", ".arrow", ".gz", ".zip")


@dataclass(frozen=True)
class Text:
    """A whole text."""

    name: str
    words: str


@dataclass(frozen=True)
class Line:
    """One object of a JSONL file."""

    name: str
    """The file and the number of the line, for messages."""
    values: Mapping[str, Any]


@dataclass(frozen=True)
class Lines:
    """The objects of a JSONL file, parsed one after the other."""

    name: str
    content: bytes

    def __iter__(self) -> Iterator[Line]:
        """All lines but blank ones."""
        for number, line in enumerate(self.content.split(b"\n"), 1):
            if not line.strip():
                continue
            name = f"Line {number} of {self.name}"
            try:
                values = files.parse(line)
            except ValueError as error:  # also what is not UTF-8
                raise CurvlensError(f"{name} is no JSON: {first_line(error)}.") from error
            if not isinstance(values, dict):
                raise CurvlensError(f'{name} is no JSON object. Expected one a line, such as {{"text": "..."}}.')
            yield Line(name, values)


@dataclass(frozen=True)
class Ids:
    """Tokens: one stream (n,), or sequences of one length (rows, n)."""

    name: str
    values: npt.NDArray[Any]
    hint: str = ""
    """What may be wrong if they do not fit."""


def read(options: Options) -> Text | Lines | Ids:
    """What ``--data`` names."""
    data = options.data
    if data is None:
        raise CurvlensError(f"A Hugging Face model needs data: --data FILE, which is {KINDS}.")
    file = Path(data)
    if options.data_dtype is not None and file.suffix != ".bin":
        raise CurvlensError(f"--data-dtype is for .bin files, and --data is {data!r}. Leave it out.")
    if data == "builtin":
        corpus = Characters()
        return Text("the built-in text (Python's standard library)", corpus.text(corpus.stream))
    if file.suffix in _OTHERS:
        raise CurvlensError(f"{data!r} is a {file.suffix} file, expected {KINDS}.")
    content = _content(file)
    if file.suffix == ".npy":
        return Ids(repr(data), _array(repr(data), content))
    if file.suffix == ".bin":
        return _binary(repr(data), content, options.data_dtype or "uint16")
    if file.suffix in (".jsonl", ".ndjson"):
        return Lines(repr(data), content)
    try:
        return Text(repr(data), content.decode())
    except UnicodeDecodeError as error:
        raise CurvlensError(f"{data!r} cannot be read: it is no text in UTF-8. Expected {KINDS}.") from error


def _content(file: Path) -> bytes:
    name = repr(str(file))
    if file.is_dir():
        raise CurvlensError(f"{name} is a folder. Give a file: {KINDS}.")
    if not file.exists():
        raise CurvlensError(f"There is no file {name}. Expected {KINDS}.")
    try:
        content = files.read(
            file, LARGEST, f"the beginning is enough: head -c 100000000 {file.name} > part{file.suffix}"
        )
    except OSError as error:
        raise CurvlensError(f"{name} cannot be read: {error.strerror}.") from error
    if not content.strip():
        raise CurvlensError(f"{name} is empty.")
    return content


def _array(name: str, content: bytes) -> npt.NDArray[Any]:
    try:
        found = np.load(io.BytesIO(content), allow_pickle=False)
    except (ValueError, OSError, EOFError, MemoryError, OverflowError, zipfile.BadZipFile) as error:
        if "Object arrays" in str(error):
            raise CurvlensError(
                f"{name} holds Python objects, which are pickle. Loading pickle can run code, so curvlens does not. "
                "Save whole numbers: np.save(file, tokens.astype(np.int64))."
            ) from error
        damaged = "its beginning is not that of one" if "pickle" in str(error) else first_line(error)
        raise CurvlensError(f"{name} is no .npy file, or a damaged one: {damaged}. Save it with np.save.") from error
    if not isinstance(found, np.ndarray):
        found.close()
        raise CurvlensError(f"{name} is a .npz file by its content. Save one array: np.save(file, tokens).")
    if found.dtype.kind not in "iu":
        raise CurvlensError(
            f"{name} has {found.dtype} numbers, and tokens are whole numbers. Save them so: "
            "np.save(file, tokens.astype(np.int64))."
        )
    if found.ndim not in (1, 2) or not found.size:
        raise CurvlensError(
            f"{name} has the shape {found.shape}, expected a stream of tokens (n,) or sequences of tokens (rows, n)."
        )
    return found


def _binary(name: str, content: bytes, dtype: str) -> Ids:
    kind = np.dtype(dtype).newbyteorder("<")
    if len(content) % kind.itemsize:
        raise CurvlensError(
            f"{name} has {len(content)} bytes, no multiple of the {kind.itemsize} of {dtype}. Say what it holds: "
            "--data-dtype uint32."
        )
    return Ids(name, np.frombuffer(content, kind), f" Is it {dtype}? Otherwise say --data-dtype uint32.")
