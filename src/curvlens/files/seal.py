"""The seal of files that curvlens wrote: a mark in the first line, with a checksum of the rest.

A foreign file has no such mark; an edited file has another checksum. The mark is a comment, a key or a column,
depending on the kind of file, so that all readers can still read it:

======  ======================================================================
.html   a comment as the first line; also in .md
.svg    the same comment, below the XML declaration
.json   the first key; also in the first line of a .jsonl
.csv    the title of an empty last column
.png    a text chunk after the first chunk
======  ======================================================================
"""

from __future__ import annotations

import re
import struct
import zlib
from collections.abc import Callable
from hashlib import sha256
from typing import Literal

DIGITS = 32
_MARK = b"curvlens sha256 %b"
_FOUND = re.compile(rb"curvlens sha256 ([0-9a-f]{%d})" % DIGITS)
_NEAR = 8192
"""The first bytes in which a mark is searched for; the titles of a table come before it."""


def sealed(kind: str, content: bytes) -> bytes:
    """The content with its mark, in the place for its kind, such as ``".json"``."""
    place, form = _KINDS[kind]
    at = place(content)
    return content[:at] + form(_MARK % sha256(content).hexdigest()[:DIGITS].encode()) + content[at:]


def origin(kind: str, content: bytes) -> Literal["ours", "changed", "other"]:
    """Whether `sealed` made this content ("ours"), it was edited afterwards ("changed"), or neither ("other")."""
    found = _FOUND.search(content[:_NEAR])
    if found is None:
        return "other"
    _, form = _KINDS[kind]
    bare = content.replace(form(found[0]), b"", 1)
    return "ours" if sealed(kind, bare) == content else "changed"


def _comment(mark: bytes) -> bytes:
    return b"<!-- written by %b -->\n" % mark


def _key(mark: bytes) -> bytes:
    return b'"written by": "%b", ' % mark


def _chunk(mark: bytes) -> bytes:
    text = b"tEXtComment\0written by " + mark
    return struct.pack(">I", len(text) - 4) + text + struct.pack(">I", zlib.crc32(text))


def _start(content: bytes) -> int:
    return 0


def _below_xml(content: bytes) -> int:
    return content.find(b"\n") + 1 if content.startswith(b"<?xml") else 0


def _in_brace(content: bytes) -> int:
    return 1


def _end_of_titles(content: bytes) -> int:
    return content.index(b"\n") if b"\n" in content else len(content)


def _behind_header(content: bytes) -> int:
    return 33  # after the signature and the chunk with the size of the picture


_KINDS: dict[str, tuple[Callable[[bytes], int], Callable[[bytes], bytes]]] = {
    ".html": (_start, _comment),
    ".md": (_start, _comment),
    ".svg": (_below_xml, _comment),
    ".json": (_in_brace, _key),
    ".jsonl": (_in_brace, _key),
    ".csv": (_end_of_titles, bytes),
    ".png": (_behind_header, _chunk),
}
