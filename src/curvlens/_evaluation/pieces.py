"""A piece: some samples of one batch that go through the model together."""

from __future__ import annotations

from dataclasses import dataclass

from curvlens import batches
from curvlens.batches import Batch


@dataclass(frozen=True)
class Piece:
    """Some samples of one batch, on the model's device."""

    index: int
    """The number of its batch."""
    start: int
    """Its first sample, counted inside the batch."""
    offset: int
    """Its first sample, counted over all the data (a batch that cannot be cut counts as one)."""
    batch: Batch

    @property
    def size(self) -> int | None:
        """The number of samples; None if the tensors have no common first axis."""
        return batches.batch_size(self.batch)

    @property
    def stop(self) -> int | None:
        """One beyond its last sample, counted inside the batch."""
        return None if self.size is None else self.start + self.size

    @property
    def place(self) -> tuple[int, int, int | None]:
        """(batch, first sample, end): its place in the data."""
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
