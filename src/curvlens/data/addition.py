"""Addition of two numbers, digit by digit: ``12345+67890=080235``."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from curvlens.errors import CurvlensError

VOCABULARY = "0123456789+="


@dataclass(frozen=True)
class Addition:
    """``ddddd+ddddd=dddddd`` with a given number of digits. Only the answer counts in the loss.

    The model sees all tokens except the last: 17 for five digits. Labels are already shifted to the next token (use
    ``CausalLM(shift=False)`` or ``CrossEntropy()``). They are −100 outside of the answer.

    >>> tokens, labels = Addition(digits=2).batch(1, seed=0)
    >>> tokens.shape, Addition(digits=2).text(torch.cat([tokens[0], labels[0, -1:]]))
    (torch.Size([1, 8]), '44+39=083')
    """

    digits: int = 5

    @property
    def vocab(self) -> int:
        """The number of different tokens."""
        return len(VOCABULARY)

    @property
    def context(self) -> int:
        """The number of tokens that the model sees."""
        return 3 * self.digits + 2

    def batch(self, size: int, *, seed: int) -> tuple[Tensor, Tensor]:
        """(tokens, labels), each (size, context), the same for the same seed."""
        generator = torch.Generator().manual_seed(seed)
        return self.of(torch.randint(10**self.digits, (size, 2), generator=generator))

    def of(self, terms: Tensor) -> tuple[Tensor, Tensor]:
        """(tokens, labels) of pairs of numbers (size, 2).

        >>> Addition(digits=2).of(torch.tensor([[7, 95]]))[0]
        tensor([[ 0,  7, 10,  9,  5, 11,  1,  0]])
        """
        if terms.ndim != 2 or terms.shape[1] != 2 or terms.is_floating_point():
            raise CurvlensError(
                f"Expected pairs of whole numbers (size, 2), got {terms.dtype} of shape {tuple(terms.shape)}."
            )
        if terms.numel() and not 0 <= int(terms.min()) <= int(terms.max()) < 10**self.digits:
            raise CurvlensError(
                f"The numbers run from {int(terms.min())} to {int(terms.max())}, expected 0 to {10**self.digits - 1} "
                f"({self.digits} digits). For larger numbers use Addition(digits=...)."
            )
        lines = [f"{a:0{self.digits}}+{b:0{self.digits}}={a + b:0{self.digits + 1}}" for a, b in terms.tolist()]
        sequence = torch.tensor([[VOCABULARY.index(character) for character in line] for line in lines])
        labels = sequence[:, 1:].clone()
        labels[:, : 2 * self.digits + 1] = -100
        return sequence[:, :-1].contiguous(), labels

    def text(self, tokens: Tensor) -> str:
        """Tokens as characters."""
        return "".join(VOCABULARY[token] for token in tokens.tolist())
