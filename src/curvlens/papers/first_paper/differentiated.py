"""Second derivatives by automatic differentiation, reverse over reverse: an independent check of the closed forms."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def flat_hessian(scalar: Callable[..., Tensor], weights: Sequence[Tensor]) -> Tensor:
    """∂²/∂W² of a function of several weights, all of them flattened one after the other."""
    sizes = [weight.numel() for weight in weights]

    def of_flat(flat: Tensor) -> Tensor:
        parts = flat.split(sizes)  # type: ignore[no-untyped-call]
        return scalar(*(part.view_as(weight) for part, weight in zip(parts, weights, strict=True)))

    together = torch.cat([weight.flatten() for weight in weights])
    found: Tensor = torch.autograd.functional.hessian(of_flat, together)  # type: ignore[no-untyped-call]
    return found


def functional_part(output: Callable[..., Tensor], weights: Sequence[Tensor], target: Tensor) -> Tensor:
    """H_f of the square loss behind a layer: ∂²⟨g, F⟩/∂W² with g = ∂ℓ/∂F held and ℓ the mean square of F − Y."""
    out = output(*weights)
    grad = 2 * (out - target) / target.numel()
    return flat_hessian(lambda *moved: (grad * output(*moved)).sum(), weights)


def apart(closed: Tensor, differentiated: Tensor) -> float:
    """‖difference‖ over the norm of the differentiated one."""
    return float((closed - differentiated).norm() / differentiated.norm())


def jacobian_norm(output: Callable[[Tensor], Tensor], weight: Tensor) -> float:
    """‖∂F/∂W‖_F."""
    found: Tensor = torch.autograd.functional.jacobian(output, weight)  # type: ignore[no-untyped-call]
    return float(found.norm())
