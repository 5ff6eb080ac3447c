"""What goes through the model in one go: some samples of one batch."""

from __future__ import annotations

from dataclasses import dataclass

from curvlens import batches
from curvlens.batches import Batch


@dataclass(frozen=True)
class Piece:
    """Some samples of one batch, on the model's device."""

    index: int
    """Which batch."""
    start: int
    """Its first sample, counted inside the batch."""
    offset: int
    """Its first sample, counted over all the data (a batch that cannot be cut counts as one)."""
    batch: Batch

    @property
    def size(self) -> int | None:
        """How many samples, None if the tensors have no first axis in common."""
        return batches.batch_size(self.batch)

    @property
    def stop(self) -> int | None:
        """One beyond its last sample, counted inside the batch."""
        return None if self.size is None else self.start + self.size

    @property
    def place(self) -> tuple[int, int, int | None]:
        """Where it lies in the data."""
        return self.index, self.start, self.stop

    def part(self, start: int, stop: int) -> Piece:
        """The samples ``start:stop``, counted inside the batch."""
        head = start - self.start
        rows = batches.rows(self.batch, head, stop - self.start)
        return Piece(self.index, start, self.offset + head, rows)

    def split(self, size: int) -> list[Piece]:
        """Parts of at most ``size`` samples."""
        assert self.stop is not None
        starts = range(self.start, self.stop, size)
        return [self.part(start, min(start + size, self.stop)) for start in starts]
