"""How curvature moves through the layers of a model."""

from __future__ import annotations

from dataclasses import dataclass, field

from curvlens.errors import CurvlensError, nearest
from curvlens.results.base import Provenance, Result
from curvlens.results.estimate import Estimate

PARTS = ("hessian", "ggn", "functional")


@dataclass(frozen=True, eq=False)
class Amount(Result):
    """The size of one symmetric matrix."""

    trace: Estimate
    frobenius: Estimate
    top: Estimate
    """Its largest eigenvalue; the error is a bound."""


@dataclass(frozen=True, eq=False)
class Level(Result):
    """A layer, or a role over all layers: the curvature of H, G and F there."""

    name: str
    parameters: dict[str, Amount]
    """Of the block of its own parameters, by part: hessian, ggn, functional."""
    activations: dict[str, Amount]
    """By the activations that leave it: what arrives from all that lies behind. Empty for a role."""


@dataclass(frozen=True, eq=False, repr=False)
class Propagation(Result):
    """The curvature of every layer, in the order of the model: ``propagation["h.0"].activations["ggn"].top``."""

    levels: dict[str, Level]
    by: str
    samples: int
    note: str = ""
    provenance: Provenance = field(default_factory=dict)

    def __getitem__(self, name: str) -> Level:
        if name not in self.levels:
            raise CurvlensError(f"There is no {self.by} {name!r}. {nearest(name, self.levels)}")
        return self.levels[name]

    def __len__(self) -> int:
        return len(self.levels)

    def __repr__(self) -> str:
        return f"Propagation({len(self)} by {self.by}: {', '.join(self.levels)}; {self.samples} samples each)"

    def __str__(self) -> str:
        """A table: the largest eigenvalue and the norm of every part, of parameters and of activations."""
        width = max([len(name) for name in self.levels] + [12])
        lines = [f"{'':<{width}}  " + "".join(f"{part:^42}" for part in PARTS)]
        lines += [f"{'':<{width}}  " + f"{'λ_max':>12} {'norm':>12} {'trace':>12}    " * len(PARTS)]
        for what in ("parameters", "activations"):
            if not all(getattr(level, what) for level in self.levels.values()):
                continue
            lines.append(f"by {what}")
            for name, level in self.levels.items():
                amounts = [getattr(level, what)[part] for part in PARTS]
                cells = (
                    f"{float(a.top):>12.4g} {float(a.frobenius):>12.4g} {float(a.trace):>12.4g}    " for a in amounts
                )
                lines.append(f"{name:<{width}}  " + "".join(cells))
        return "\n".join(lines)
