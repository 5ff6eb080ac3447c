"""The order of a flat vector: which entries belong to which part of which parameter."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cached_property, reduce

import torch
from torch import Tensor

from curvlens.blocks.block import Block
from curvlens.blocks.cutting import embed, extract
from curvlens.blocks.map import Blocks
from curvlens.blocks.parts import Part
from curvlens.errors import CurvlensError, listing, nearest


class Layout:
    """Parts of parameters laid end to end, in the order of ``named_parameters()``, each in its storage order.

    >>> layout = Layout({"w": (2, 3), "b": (2,)})
    >>> layout.size, layout.slices["b"]
    (8, slice(6, 8, None))
    """

    def __init__(self, parts: Mapping[str, tuple[int, ...]] | Iterable[Part], blocks: Blocks | None = None) -> None:
        if isinstance(parts, Mapping):
            parts = [Part(name, tuple(shape)) for name, shape in parts.items()]
        self.parts = {part.key: part for part in parts}
        self.shapes = {key: part.shape for key, part in self.parts.items()}
        self.slices: dict[str, slice] = {}
        self.size = 0
        for key, part in self.parts.items():
            self.slices[key] = slice(self.size, self.size + part.size)
            self.size += part.size
        self._map = blocks

    @property
    def names(self) -> tuple[str, ...]:
        """The parameters, in order. For a part of a parameter, the expression that cuts it out."""
        return tuple(self.shapes)

    @cached_property
    def blocks(self) -> Blocks:
        """The named blocks in this layout."""
        parts = tuple(self.parts.values())
        return Blocks.of_parameters(parts) if self._map is None else self._map.within(parts)

    @cached_property
    def whole(self) -> Layout:
        """The layout of the whole parameters; itself if no parameter is cut."""
        if all(part.whole for part in self.parts.values()):
            return self
        return Layout({part.parameter: part.full for part in self.parts.values()})

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Layout) and list(self.shapes.items()) == list(other.shapes.items())

    def __hash__(self) -> int:
        return hash(tuple(self.shapes.items()))

    def __repr__(self) -> str:
        return f"Layout({len(self.shapes)} parameters, {self.size} numbers)"

    def select(self, wanted: str | Iterable[str]) -> Layout:
        """The layout of the blocks, parameters or patterns (``*``, ``?``) named, in the order of this layout."""
        names = wanted if isinstance(wanted, Iterable) and not isinstance(wanted, str) else [wanted]
        return Layout(self.blocks.find(names), self.blocks)

    def of(self, block: Block) -> Layout:
        """The layout of a block of this layout."""
        return Layout(block.parts, self.blocks)

    # Between a layout and one inside it

    def extract(self, inner: Layout, vectors: Tensor) -> Tensor:
        """The entries of ``inner`` in vectors (size, …) of this layout."""
        return vectors if inner == self else extract(tuple(self.parts.values()), tuple(inner.parts.values()), vectors)

    def embed(self, inner: Layout, vectors: Tensor) -> Tensor:
        """Extend vectors of ``inner`` by zeros to vectors of this layout."""
        return vectors if inner == self else embed(tuple(self.parts.values()), tuple(inner.parts.values()), vectors)

    # Vectors by name

    def unflatten(self, flat: Tensor) -> dict[str, Tensor]:
        """Views of a flat vector, by name and in the parameters' shapes."""
        return {name: flat[self.slices[name]].view(shape) for name, shape in self.shapes.items()}

    def flatten(
        self, parts: Mapping[str, Tensor], *, dtype: torch.dtype | None = None, device: torch.device | None = None
    ) -> Tensor:
        """One flat vector from a dict by name. It must have all names, with the shapes of the parameters.

        The default dtype is the one that all entries promote to, the default device that of the first entry.

        >>> Layout({"w": (2,), "b": (1,)}).flatten({"w": torch.ones(2), "b": torch.zeros(1, dtype=torch.float64)})
        tensor([1., 1., 0.], dtype=torch.float64)
        """
        for name in parts:
            if name not in self.shapes:
                raise CurvlensError(
                    f"The dict has an entry {name!r}, which is not a parameter. {nearest(name, self.shapes)}"
                )
        missing = [name for name in self.shapes if name not in parts]
        if missing:
            raise CurvlensError(
                f"The dict lacks {listing(missing)}. Give all parameters (zeros for those that do not matter), or use "
                "the block of those you have: H[names]."
            )
        given = [torch.as_tensor(parts[name]) for name in self.shapes]
        require_real(*given)
        if dtype is None:  # integers get torch's default dtype
            floating = [part.dtype for part in given if part.is_floating_point()]
            dtype = reduce(torch.promote_types, floating) if floating else torch.get_default_dtype()
        device = device or (given[0].device if given else None)
        flat = torch.empty(self.size, dtype=dtype, device=device)
        for name, shape in self.shapes.items():
            part = torch.as_tensor(parts[name])
            if tuple(part.shape) != shape:
                raise CurvlensError(
                    f"{name!r} has shape {tuple(part.shape)} in the dict, expected the shape of the parameter, {shape}."
                )
            flat[self.slices[name]] = part.detach().reshape(-1).to(flat)
        return flat


def require_real(*vectors: Tensor) -> None:
    """Raise an error for complex vectors: a conversion to a real dtype would drop the imaginary part."""
    if any(v.is_complex() for v in vectors):
        raise CurvlensError(
            "The vector is complex, the operator is real. Apply it to both parts: H @ v.real + 1j * (H @ v.imag)."
        )
