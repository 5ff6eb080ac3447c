"""One file for each family. To add one, add a module with a ``FAMILY`` here; it is found automatically."""

from __future__ import annotations

import pkgutil
from importlib import import_module

from curvlens.blocks.family import Family

FAMILIES: tuple[Family, ...] = tuple(
    import_module(f"{__name__}.{module.name}").FAMILY for module in pkgutil.iter_modules(__path__)
)

__all__ = ["FAMILIES"]
