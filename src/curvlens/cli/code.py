"""Load ``file.py:name`` or ``package.module:name`` of a user. This runs that code."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn

from curvlens import files
from curvlens.errors import CurvlensError, nearest

LARGEST = 16 << 20
"""Bytes of a Python file."""


def is_code(target: str) -> bool:
    """Whether the target is ``file.py:name`` or ``package.module:name``. ``file.py`` alone is an error."""
    if target.endswith(".py"):
        raise CurvlensError(
            f"{target!r} is a file without a name in it. Give {target}:name, as in {target}:make_model."
        )
    return ":" in target and not Path(target).exists()


def from_code(target: str) -> Any:
    """What ``package.module:name`` or ``file.py:name`` is, or returns if it is a function. This runs that code.

    Files beside it can be imported, as in a script that Python runs: its folder goes to the front of ``sys.path``, and
    stays there, since a forward pass may import, too.
    """
    place, _, name = target.rpartition(":")
    if not name:
        raise CurvlensError(f"{target!r} lacks a name. {EXPECTED}")
    if not place:
        raise CurvlensError(f"{target!r} lacks a file. {EXPECTED}")
    with _blamed(target):
        module = _of_file(place) if place.endswith(".py") else _of_package(place)
    if not hasattr(module, name):
        public = {key: value for key, value in vars(module).items() if not key.startswith("_")}
        # what is its own before what it imports, which may be thousands
        own = {
            key
            for key, value in public.items()
            if isinstance(value, nn.Module) or getattr(value, "__module__", None) == module.__name__
        }
        known = sorted(public, key=lambda key: (key not in own, not _is_ready(public[key])))
        raise CurvlensError(f"{place} has no {name!r}. {nearest(name, known)}")
    made = getattr(module, name)
    if isinstance(made, nn.Module) or not callable(made):
        return made
    needed = _needed(made)
    if needed:
        raise CurvlensError(
            f"{target} needs arguments ({', '.join(needed)}). Give the name of a function without arguments, "
            " as in def make(): return model, data, loss."
        )
    with _blamed(target):
        return made()


def _is_ready(value: object) -> bool:
    """Whether it can be named as it is: a problem, a model, or a function without arguments."""
    if isinstance(value, type):
        return False
    return not callable(value) or isinstance(value, nn.Module) or not _needed(value)


EXPECTED = "Expected file.py:name, as in train.py:make_model, or package.module:name."


def _of_file(place: str) -> ModuleType:
    if not Path(place).is_file():
        raise CurvlensError(f"There is no file {place!r}. {EXPECTED}")
    files.read(place, LARGEST)
    whole = Path(place).resolve()
    name = whole.stem
    if name in sys.modules and getattr(sys.modules[name], "__file__", None) != str(whole):
        name = f"curvlens_target_{name}"  # a file random.py must not be the module that everybody else imports
    spec = importlib.util.spec_from_file_location(name, whole)
    if spec is None or spec.loader is None:
        raise CurvlensError(f"{place!r} cannot be imported. {EXPECTED}")
    _look_first_in(whole.parent)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _of_package(place: str) -> ModuleType:
    _look_first_in(Path.cwd())  # as python -m does
    if not all(part.isidentifier() for part in place.split(".")):
        raise CurvlensError(f"{place!r} is no name of a module, and no file that ends in .py. {EXPECTED}")
    try:
        return importlib.import_module(place)
    except ModuleNotFoundError as error:
        raise CurvlensError(f"{error}. Expected package.module:name or file.py:name, got {place!r}.") from error


def _look_first_in(folder: Path) -> None:
    if sys.path[:1] != [str(folder)]:
        sys.path.insert(0, str(folder))


@contextmanager
def _blamed(target: str) -> Iterator[None]:
    """Convert an error in a user's own code to a CurvlensError with its line."""
    try:
        yield
    except CurvlensError:
        raise
    except SystemExit as error:
        where = _line(error, target)
        raise CurvlensError(
            f"{target} ended the program: {where}sys.exit({error.code!r}). Move script code below "
            "`if __name__ == '__main__':`."
        ) from error
    except Exception as error:
        raise CurvlensError(
            f"{target} raised {type(error).__name__}: {_line(error, target)}{first_line(error)}"
        ) from error


def _line(error: BaseException, target: str) -> str:
    """The line of the user's file in which an error was raised, or an empty text."""
    file = str(Path(target.rpartition(":")[0]).resolve())
    own = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
    return f"line {own[-1]}: " if own else ""


def first_line(error: Exception) -> str:
    """The first line of a message, or the type of an error without a message."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _needed(function: Any) -> list[str]:
    """The parameters without a default."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return []  # not to be known: it is simply called
    free = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [p.name for p in parameters if p.default is inspect.Parameter.empty and p.kind not in free]
