"""Folders that somebody else made: files cut, changed, exchanged or replaced by what is no file, at random."""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

VALUES: tuple[Any, ...] = (
    *(None, True, -1, 0, 2**63, 10**400, -(10**400), 10**5000, 1e308, float("nan"), float("inf"), "", "x", "\x1b[31m"),
    *("\ud800", [], {}, [[]], {"$tensor": "0"}, {"$tensor": []}, {"$array": "0"}, {"$scalar": [[1], [2, 3]]}),
    *({"$scalar": {"$scalar": 1}}, {"$float": "1e999"}, {"$float": []}, {"$kind": "Eigs", "fields": {}}, {"$kind": []}),
    *({"$dict": [[1]]}, {"$dict": [[[], 1]]}, {"$dict": 3}),
)
TEXTS = ("", "\0", "{", "null", "[" * 10**5, '{"a":' * 10**5, "9" * 5000, '{"format": 1, "format": 2}', "\ufeff{}")


def spoil(file: Path, rng: random.Random) -> str:
    """Do one of many things to a file; its name."""
    act = rng.choice((_cut, _flip, _text, _value, _value, _value, _value, _other, _double))
    if file.suffix == ".safetensors":
        act = rng.choice((_cut, _flip, _dtype, _other))
    try:
        act(file, rng)
    except (ValueError, IndexError, TypeError, RecursionError):  # of a file that is no JSON with something in it
        _flip(file, rng)
    return act.__name__


def _cut(file: Path, rng: random.Random) -> None:
    content = file.read_bytes()
    file.write_bytes(content[: rng.randrange(len(content) + 1)])


def _flip(file: Path, rng: random.Random) -> None:
    content = bytearray(file.read_bytes() or b"x")
    for _ in range(rng.randint(1, 8)):
        content[rng.randrange(len(content))] = rng.randrange(256)
    file.write_bytes(bytes(content))


def _dtype(file: Path, rng: random.Random) -> None:
    other = rng.choice((b"I64", b"U64", b"C64", b"F32", b"F16", b"XYZ"))
    file.write_bytes(file.read_bytes().replace(b'"F64"', b'"%b"' % other))


def believed(text: Path, *tensors: Path) -> None:
    """A JSON file that has the right sum of whatever tensors there are."""
    try:
        document = json.loads(text.read_text())
        for file in tensors:
            document["tensors"]["sha256"] = hashlib.sha256(file.read_bytes()).hexdigest()
        text.write_text(json.dumps(document))
    except (ValueError, TypeError, LookupError, OSError, RecursionError):
        pass


def _double(file: Path, rng: random.Random) -> None:
    file.write_bytes(file.read_bytes() * 2)


def _text(file: Path, rng: random.Random) -> None:
    text = rng.choice(TEXTS).encode()
    file.write_bytes(gzip.compress(text) if file.suffix == ".gz" and rng.random() < 0.7 else text)


def _value(file: Path, rng: random.Random) -> None:
    """Another value somewhere in a JSON text, or in one of its lines."""
    lines = file.read_text(encoding="utf-8").splitlines() if file.suffix == ".jsonl" else [file.read_text("utf-8")]
    at = rng.randrange(len(lines))
    document = json.loads(lines[at])
    place = document
    while True:
        keys = list(place) if isinstance(place, dict) else list(range(len(place)))
        key = rng.choice(keys)
        if not isinstance(place[key], (dict, list)) or not place[key] or rng.random() < 0.2:
            break
        place = place[key]
    if rng.random() < 0.2:
        del place[key]
    else:
        place[key] = rng.choice([value for value in VALUES if value != 10**5000])
    lines[at] = json.dumps(document)
    if rng.random() < 0.1:
        lines[at] = lines[at].replace(": 0", ": " + "7" * 5000, 1)
    file.write_text("\n".join(lines))


def _other(file: Path, rng: random.Random) -> None:
    """Something in its place that is no file, is none of ours, or may not be read."""
    content = file.read_bytes()
    file.unlink()

    def unreadable() -> None:
        file.write_bytes(content)
        file.chmod(0)

    def huge() -> None:
        file.touch()
        os.truncate(file, 1 << 40)

    ways: tuple[Callable[[], Any], ...] = (
        lambda: os.mkfifo(file),
        file.mkdir,
        lambda: file.symlink_to("/dev/zero"),
        lambda: file.symlink_to(file),
        lambda: file.symlink_to("nowhere"),
        unreadable,
        huge,
    )
    rng.choice(ways)()
