"""What the command line says in its help: nothing here imports torch, so that help comes at once."""

from dataclasses import dataclass
from typing import Literal

TOKENS, SEQUENCES = 64, 4
"""How many tokens a sequence has, and how many sequences are taken, if nothing is said."""
DEMO_SEQUENCES = 32
"""How many sums the model of ``demo`` is looked at on."""
Sort = Literal["order", "trace", "share", "frobenius", "top"]
"""How the rows of a profile are sorted."""
LossName = Literal["causal-lm", "masked-lm", "classification"]
"""What ``--loss`` takes."""
Precision = Literal["float32", "float64", "bfloat16"]
"""What ``--dtype`` takes."""
FileDtype = Literal["uint8", "uint16", "uint32", "int32", "int64"]
"""What ``--data-dtype`` takes."""


@dataclass(frozen=True)
class Options:
    """A model, its data, and how both are taken: the options that the commands share. None means the default."""

    target: str
    data: str | None = None
    data_dtype: FileDtype | None = None
    loss: LossName | None = None
    device: str | None = None
    dtype: Precision | None = None
    tokens: int | None = None
    sequences: int | None = None
    seed: int = 0
    trust_remote_code: bool = False

    def given(self) -> dict[str, object]:
        """The options that were given, by the names that a user types; not the target and the seed."""
        named = {
            "--data": self.data,
            "--data-dtype": self.data_dtype,
            "--loss": self.loss,
            "--device": self.device,
            "--dtype": self.dtype,
            "--tokens": self.tokens,
            "--sequences": self.sequences,
            "--trust-remote-code": self.trust_remote_code or None,
        }
        return {name: value for name, value in named.items() if value is not None}
