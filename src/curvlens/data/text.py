"""A text corpus that comes with Python: the sources of its standard library."""

from __future__ import annotations

import sysconfig
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from curvlens.errors import CurvlensError

_FIRST, _LAST = 32, 126  # printable ASCII; a line break is token 0, everything else a blank


class Characters:
    """The standard library's sources as one stream of characters, 96 tokens in all.

    >>> corpus = Characters(files=("this.py",))
    >>> corpus.text(corpus.stream[:8])
    's = \"\"\"G'
    """

    vocab = _LAST - _FIRST + 2

    def __init__(self, files: tuple[str, ...] = ("argparse.py", "ast.py", "dataclasses.py", "inspect.py")) -> None:
        self.files = files

    @cached_property
    def stream(self) -> Tensor:
        """All characters, as tokens."""
        folder = Path(sysconfig.get_paths()["stdlib"])
        missing = [name for name in self.files if not (folder / name).exists()]
        if missing:
            raise CurvlensError(
                f"The standard library of this Python has no file {', '.join(missing)}. Choose others: "
                "Characters(files=('ast.py',))."
            )
        text = "".join((folder / name).read_text(encoding="utf-8") for name in self.files)
        codes = torch.tensor(list(text.encode("ascii", "replace")), dtype=torch.long)
        tokens = torch.where((codes >= _FIRST) & (codes <= _LAST), codes - _FIRST + 1, 1)
        return torch.where(codes == ord("\n"), 0, tokens)

    def batch(self, size: int, length: int, *, seed: int) -> Tensor:
        """Tokens (size, length) from random places, the same for the same seed; for ``CausalLM``."""
        if length > len(self.stream):
            raise CurvlensError(
                f"length={length} is more than the {len(self.stream)} characters of the corpus. Choose a smaller "
                "length, or more files."
            )
        generator = torch.Generator().manual_seed(seed)
        starts = torch.randint(len(self.stream) - length + 1, (size,), generator=generator)
        return torch.stack([self.stream[start : start + length] for start in starts.tolist()])

    def text(self, tokens: Tensor) -> str:
        """Tokens as characters."""
        return "".join("\n" if token == 0 else chr(token + _FIRST - 1) for token in tokens.tolist())
