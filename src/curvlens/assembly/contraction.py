"""Products of a small tensor with one that has many directions, without copying the large tensor."""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor

FEW = 32
"""With fewer columns than this, one large product of permuted tensors is faster than a product for each row."""


def contract(letters: str, many: Tensor, small: Tensor) -> Tensor:
    """``torch.einsum(letters, many, small)``; the last letter of ``many`` is for directions and is not in ``small``.

    It is one matrix product without a copy of ``many``, Σ_k small[f, k] many[p, k, rest], if the summed letters are
    neighbours in ``many`` and no letter that both keep follows them. Otherwise einsum permutes.
    """
    inputs, out = letters.split("->")
    of_many, of_small = inputs.split(",")
    summed = [letter for letter in of_many if letter in of_small and letter not in out]
    if not summed:
        return _outer(of_many, of_small, out, many, small)
    first = of_many.index(summed[0])
    before, after = of_many[:first], of_many[first + len(summed) :]
    if of_many[first : first + len(summed)] != "".join(summed) or any(c in of_small for c in after):
        return torch.einsum(letters, many, small)
    size = dict(zip(of_small, small.shape, strict=True)) | dict(zip(of_many, many.shape, strict=True))
    free = [letter for letter in of_small if letter not in of_many]
    kept = [letter for letter in before if letter in of_small]
    turned = small.permute([of_small.index(letter) for letter in (*kept, *free, *summed)])
    batch = [size[letter] if letter in of_small else 1 for letter in before]
    rest = prod(size[c] for c in after)
    if rest < FEW and any(c not in of_small for c in before):  # many products with a few columns each
        return torch.einsum(letters, many, small)
    left = turned.reshape(*batch, prod(size[c] for c in free), prod(size[c] for c in summed))
    right = many.reshape(*(size[c] for c in before), left.shape[-1], -1)
    made = [*before, *free, *after]
    product = (left @ right).view([size[letter] for letter in made])
    order = [made.index(letter) for letter in out]
    return product if order == sorted(order) else product.permute(order)


def _outer(of_many: str, of_small: str, out: str, many: Tensor, small: Tensor) -> Tensor:
    """The same if nothing is summed. In memory, directions come before the axes of only one of the tensors.

    The block of a state with a weight is computed with the rows of the weight and needed with its columns. So it can be
    transposed and used as a matrix without a copy.
    """
    size = dict(zip(of_small, small.shape, strict=True)) | dict(zip(of_many, many.shape, strict=True))
    shared = [letter for letter in out if letter in of_many and letter in of_small]
    order = [*shared, out[-1], *(letter for letter in out[:-1] if letter not in shared)]
    product = many.new_empty([size[letter] for letter in order])
    torch.mul(_along(order, of_many, many), _along(order, of_small, small), out=product)
    return product.permute([order.index(letter) for letter in out])


def _along(order: list[str], letters: str, tensor: Tensor) -> Tensor:
    """The axes of a tensor in this order, with length 1 for those that it does not have."""
    turned = tensor.permute([letters.index(letter) for letter in order if letter in letters])
    return turned[tuple(slice(None) if letter in letters else None for letter in order)]
