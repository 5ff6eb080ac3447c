"""SVG files of matplotlib, about a third as large: the same picture in fewer characters."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from itertools import count
from xml.etree import ElementTree as Tree

_SVG, _LINK = "http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"
_HREF = f"{{{_LINK}}}href"
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:e[-+]?\d+)?")
_REFERENCE = re.compile(r"#([\w.-]+)")
_UNTURNED = re.compile(r"rotate\(-?0 [^)]*\)")
_PLACES = ("d", "x", "y", "width", "height", "transform")
DIGITS = 2
"""Decimals of a coordinate, in points: a hundredth of a point is below what a screen or a printer shows."""


def compact(svg: bytes) -> bytes:
    """Round coordinates, name each style once, and drop metadata, comments, unused names and empty groups.

    >>> drawn = b'<svg xmlns="http://www.w3.org/2000/svg"><g id="a"><path d="M 0.12345 7 \\nL 1.5 2.0 \\n"/></g></svg>'
    >>> compact(drawn).decode().splitlines()[1]
    '<svg xmlns="http://www.w3.org/2000/svg"><path d="M.12 7 1.5 2"/></svg>'
    """
    Tree.register_namespace("", _SVG)
    Tree.register_namespace("xlink", _LINK)
    root = Tree.fromstring(svg)  # our own drawing, never a file of others
    for parent in root.iter():
        for child in [each for each in parent if each.tag == f"{{{_SVG}}}metadata"]:
            parent.remove(child)
    _styled_once(root)
    _short_names(root)
    for element in root.iter():
        _short_numbers(element)
        if not (element.text or "").strip():
            element.text = None
        element.tail = None
    _flatten(root)
    for element in root.iter(f"{{{_SVG}}}text"):
        _join_letters(element)
    _name_styles(root)
    text = Tree.tostring(root, encoding="unicode").replace(" />", "/>")
    return f'<?xml version="1.0" encoding="utf-8"?>\n{text}\n'.encode()


def _short_names(root: Tree.Element) -> None:
    """Keep only the ids that are referred to, one or two letters each."""
    used = dict.fromkeys(
        name
        for element in root.iter()
        for key, value in element.attrib.items()
        if key == _HREF or value.startswith("url(")
        for name in _REFERENCE.findall(value[:80])
    )
    short = dict(zip(used, _letters("i"), strict=False))
    for element in root.iter():
        name = element.attrib.pop("id", None)
        if name in short:
            element.set("id", short[name])
        for key, value in element.attrib.items():
            if value.startswith(("url(#", "#")) and key != "style":
                element.set(key, _REFERENCE.sub(lambda found: f"#{short[found[1]]}", value))


def _styled_once(root: Tree.Element) -> None:
    """A copy needs no style that the shape it is a copy of has itself."""
    own = {f"#{element.get('id')}": element.get("style") for element in root.iter() if element.get("id")}
    for element in root.iter(f"{{{_SVG}}}use"):
        if element.get("style") and own.get(element.get(_HREF, "")) == element.get("style"):
            del element.attrib["style"]


def _join_letters(text: Tree.Element) -> None:
    """Neighbouring letters of one style and line as one element, with a list of their places."""
    joined: list[Tree.Element] = []
    for each in text:
        before = joined[-1] if joined else None
        if (
            before is None
            or any(before.get(key) != each.get(key) for key in ("y", "style"))
            or len(each.text or "") != 1
        ):
            joined.append(each)
        elif len(before.text or "") == len(before.get("x", "").split()):  # a place for every letter so far
            before.text = f"{before.text}{each.text}"
            before.set("x", f"{before.get('x')} {each.get('x')}")
        else:
            joined.append(each)
    text[:] = joined


def _letters(first: str) -> Iterator[str]:
    return (f"{first}{number}" for number in count())


def _short_numbers(element: Tree.Element) -> None:
    for key in _PLACES:
        value = element.get(key)
        if value is None:
            continue
        if key == "transform":
            value = _UNTURNED.sub("", value).strip()
            if "scale" in value or "matrix" in value:  # factors need all their digits
                continue
            if not value:
                del element.attrib[key]
                continue
        value = _NUMBER.sub(lambda found: _rounded(float(found[0])), value)
        if key == "d":
            value = re.sub(r"\s*([A-Za-z])\s*", r"\1", value).strip()
            value = re.sub(r"(?<=[\d.])\s+(?=-)", "", re.sub(r"\s+", " ", _same_letter(value)))
        element.set(key, value)


def _same_letter(path: str) -> str:
    """A command that is repeated needs its letter once.

    >>> _same_letter("M0 0 1 1L2 2L3 3z")
    'M0 0 1 1 2 2 3 3z'
    """
    parts = re.findall(r"[A-Za-z][^A-Za-z]*", path)
    shorter, before = "", ""
    for part in parts:
        same = part[0] == before or (part[0] == "L" and before == "M")
        shorter += f" {part[1:]}" if same and part[0] in "LQC" else part
        before = "M" if same and before == "M" else part[0]
    return shorter


def _rounded(value: float) -> str:
    """A number without zeros that say nothing.

    >>> _rounded(0.504), _rounded(-12.0), _rounded(-0.001)
    ('.5', '-12', '0')
    """
    text = f"{value:.{DIGITS}f}".rstrip("0").rstrip(".")
    return {"-0": "0"}.get(text, re.sub(r"^(-?)0\.", r"\1.", text))


def _flatten(element: Tree.Element) -> None:
    """Put the children of groups without attributes in the place of the group."""
    children: list[Tree.Element] = []
    for child in element:
        _flatten(child)
        children += [*child] if child.tag == f"{{{_SVG}}}g" and not child.attrib else [child]
    element[:] = children


def _name_styles(root: Tree.Element) -> None:
    """One rule for each style that is used more than once, and a class where it is used."""
    uses = Counter(style for element in root.iter() if (style := element.get("style")))
    names = dict(zip((style for style, times in uses.most_common() if times > 1), _letters("s"), strict=False))
    for element in root.iter():
        if element.get("style") in names:
            element.set("class", names[element.attrib.pop("style")])
    sheet = root.find(f".//{{{_SVG}}}style")
    if names and sheet is None:
        sheet = Tree.Element(f"{{{_SVG}}}style")
        root.insert(0, sheet)
    if sheet is not None:
        rules = "".join(f".{name}{{{style.replace('; ', ';').replace(': ', ':')}}}" for style, name in names.items())
        sheet.text = (sheet.text or "") + rules
