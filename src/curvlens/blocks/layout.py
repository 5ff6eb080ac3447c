"""The order of a flat vector: which entries belong to which parameter."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from math import prod

import torch
from torch import Tensor

from curvlens.errors import CurvlensError, listing, nearest


class Layout:
    """Named parameters laid end to end, in the order of ``named_parameters()``, each in its storage order.

    >>> layout = Layout({"w": (2, 3), "b": (2,)})
    >>> layout.size, layout.slices["b"]
    (8, slice(6, 8, None))
    """

    def __init__(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self.shapes = {name: tuple(shape) for name, shape in shapes.items()}
        self.slices: dict[str, slice] = {}
        start = 0
        for name, shape in self.shapes.items():
            self.slices[name] = slice(start, start + prod(shape))
            start += prod(shape)
        self.size = start

    @property
    def names(self) -> tuple[str, ...]:
        """The parameters, in order."""
        return tuple(self.shapes)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Layout) and list(self.shapes.items()) == list(other.shapes.items())

    def __hash__(self) -> int:
        return hash(tuple(self.shapes.items()))

    def __repr__(self) -> str:
        return f"Layout({len(self.shapes)} parameters, {self.size} numbers)"

    def select(self, wanted: str | Iterable[str]) -> Layout:
        """The part named by parameter names or patterns (``*``, ``?``), in the order of this layout."""
        names = self.match(wanted if isinstance(wanted, Iterable) and not isinstance(wanted, str) else [wanted])
        return Layout({name: self.shapes[name] for name in names})

    def match(self, wanted: Iterable[str]) -> list[str]:
        """The names that equal a wanted one or match it as a pattern."""
        found: set[str] = set()
        for item in wanted:
            if not isinstance(item, str):
                raise CurvlensError(f"A parameter is asked for by its name, a text; got a {type(item).__name__}.")
            hits = {item} if item in self.shapes else {name for name in self.shapes if fnmatchcase(name, item)}
            if not hits and any(name.startswith(f"{item}.") for name in self.shapes):
                raise CurvlensError(
                    f"No parameter is called {item!r}, but some names begin so. For all of them: {item + '.*'!r}."
                )
            if not hits:
                raise CurvlensError(
                    f"No parameter is called {item!r} here (one that is frozen or was not chosen has no rows). "
                    f"{nearest(item, self.shapes)}"
                )
            found |= hits
        if not found:
            raise CurvlensError(f"No parameter was named. Known names: {listing(self.shapes)}.")
        return [name for name in self.shapes if name in found]

    def unflatten(self, flat: Tensor) -> dict[str, Tensor]:
        """Views of a flat vector, by name and in the parameters' shapes."""
        return {name: flat[self.slices[name]].view(shape) for name, shape in self.shapes.items()}

    def flatten(self, parts: Mapping[str, Tensor], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """One flat vector of a dict by name; every name has to be there, with the parameter's shape."""
        for name in parts:
            if name not in self.shapes:
                raise CurvlensError(
                    f"The dict has an entry {name!r}, which is no parameter. {nearest(name, self.shapes)}"
                )
        missing = [name for name in self.shapes if name not in parts]
        if missing:
            raise CurvlensError(
                f"The dict lacks {listing(missing)}. Give every parameter (zeros where nothing is meant), or apply the "
                "block of those you have: H[names]."
            )
        flat = torch.empty(self.size, dtype=dtype, device=device)
        for name, shape in self.shapes.items():
            part = torch.as_tensor(parts[name])
            if tuple(part.shape) != shape:
                raise CurvlensError(f"{name!r} has shape {tuple(part.shape)} in the dict, the parameter has {shape}.")
            flat[self.slices[name]] = part.detach().reshape(-1).to(flat)
        return flat
