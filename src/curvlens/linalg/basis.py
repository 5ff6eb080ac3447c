"""Orthonormal vectors in bounded memory: on the device, on the CPU or in a file, in the working dtype or a lower one.

Arithmetic is in float64, on slices of bounded size, whatever dtype the vectors are stored in.
"""

from __future__ import annotations

import logging
import math
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from curvlens.errors import CurvlensError
from curvlens.linalg.vectors import LONG, STREAMED, slices
from curvlens.memory import available_bytes, parse_bytes, readable

logger = logging.getLogger("curvlens")

BasisPlace = str | os.PathLike[str]


def budget(memory: int | float | str | None, store: BasisPlace, device: torch.device) -> int:
    """Bytes that may be used: ``memory``, or a quarter of the free space where the vectors are stored."""
    if memory is not None:
        return parse_bytes(memory)
    if store in ("device", "cpu"):
        return available_bytes(device if store == "device" else torch.device("cpu")) // 4
    return shutil.disk_usage(store).free // 4 if Path(store).is_dir() else available_bytes(torch.device("cpu")) // 4


class Basis:
    """Rows of length n; ``store`` is ``"device"``, ``"cpu"`` or a folder for a file."""

    def __init__(self, capacity: int, n: int, *, dtype: torch.dtype, device: torch.device, store: BasisPlace) -> None:
        self.capacity, self.n, self.dtype, self.device = capacity, n, dtype, device
        bytes_needed = capacity * n * dtype.itemsize
        logger.info("a basis of %d vectors takes %s (store=%s)", capacity, readable(bytes_needed), store)
        if store in ("device", "cpu"):
            home = device if store == "device" else torch.device("cpu")
            free = available_bytes(home)
            if bytes_needed > free:
                raise CurvlensError(
                    f"A basis of {capacity} vectors needs {readable(bytes_needed)}, but {home} has {readable(free)} "
                    "free. Give memory='2GiB' for a smaller basis, store='some/folder' for a file, or "
                    "store_dtype=torch.bfloat16."
                )
            self.rows = torch.empty(capacity, n, dtype=dtype, device=home)
        else:
            self.rows = _in_file(Path(store), capacity, n, dtype, bytes_needed)

    def __getitem__(self, j: int) -> Tensor:
        return self.rows[j].to(self.device)

    def put(self, j: int, v: Tensor, length: float = 1.0) -> None:
        """Store a vector, divided by its length."""
        if v.device == self.rows.device and v.dtype == self.rows.dtype:
            torch.div(v, length, out=self.rows[j])
        else:
            for part in slices(self.n, 1, v.device):
                self.rows[j, part] = (v[part] / length).to(self.rows)

    def sweep(self, w: Tensor, count: int, subtract: Tensor | None = None) -> tuple[Tensor, float]:
        """⟨v_i, w⟩ of the first ``count`` vectors, and ‖w‖, in one pass over memory.

        With coefficients to ``subtract``, first w −= Σ c_i v_i, in place; then the stored remainder is measured.
        Long float32 vectors are multiplied in float32, slice by slice, which takes half the time. Coefficients then
        have relative errors of float32. Those measured after a subtraction are small, so their sum with the subtracted
        ones is accurate, apart from the rounding of w in the subtraction.
        """
        home, rows = self.rows.device, self.rows[:count]
        total = torch.zeros(count + 1, dtype=torch.float64, device=home)
        c = None if subtract is None or not count else subtract.to(home, torch.float64)
        if self.quick and w.dtype == self.rows.dtype and w.device == home:
            _quick_sweep(rows, w, c, total)
        else:
            for part, cast in _portions(rows, 1):
                row = cast[count]
                row.copy_(w[part])
                if c is not None:
                    row.addmv_(cast[:count].T, c, alpha=-1)
                    w[part] = row
                    row.copy_(w[part])
                total += cast @ row
        sums = total.cpu()
        return sums[:count], math.sqrt(float(sums[count]))

    def along(self, j: int, w: Tensor) -> float:
        """⟨v_j, w⟩ with the precision of `sweep`."""
        v, total = self.rows[j], torch.zeros((), dtype=torch.float64, device=self.rows.device)
        for part in slices(self.n, 2, v.device, STREAMED):
            total += v[part] @ w[part]
        return float(total)

    @property
    def quick(self) -> bool:
        """Whether products are in float32: it saves time for long float32 vectors."""
        return self.n > LONG and self.rows.dtype == torch.float32

    def dots(self, count: int, w: Tensor) -> Tensor:
        """⟨v_i, w⟩ of the first ``count`` vectors, in float64 on the CPU."""
        total = torch.zeros(count, dtype=torch.float64, device=self.rows.device)
        for part, cast in _portions(self.rows[:count]):
            total += cast @ w[part].to(self.rows.device).double()
        return total.cpu()

    def subtract(self, coefficients: Tensor, w: Tensor) -> None:
        """w −= Σ c_i v_i, in place."""
        c = coefficients.to(self.rows.device, torch.float64)
        for part, cast in _portions(self.rows[: len(c)]):
            w[part] -= (c @ cast).to(w)

    def rotate(self, S: Tensor) -> None:
        """Replace the first vectors by their combinations, the columns of S (count × p)."""
        (count, p), same = S.shape, 0
        while same < p and float(S[same, same]) == 1 and not float(S[same].abs().sum() + S[:, same].abs().sum() - 2):
            same += 1  # this vector does not change
        old, new = self.rows[same:count], self.rows[same:p]
        St = S[same:, same:].T.to(self.rows.device, torch.float64)
        if self.quick:
            # Two float32 numbers represent one float64 number, so no vector is cast; only the sum is rounded.
            coarse = St.float()
            fine = (St - coarse.double()).float()
            for part in slices(self.n, count + p, self.rows.device, STREAMED):
                new[:, part] = (coarse @ old[:, part]).addmm_(fine, old[:, part])
            return
        for part, cast in _portions(old):
            new[:, part] = St @ cast

    def combine(self, S: Tensor, dtype: torch.dtype) -> Basis:
        """The combinations V S as a new basis on the device."""
        count, p = S.shape
        result = Basis(p, self.n, dtype=dtype, device=self.device, store="device")
        St = S.T.to(self.rows.device, torch.float64)
        for part, cast in _portions(self.rows[:count]):
            result.rows[:, part] = (St @ cast).to(result.rows.device)
        return result


def _portions(rows: Tensor, more: int = 0) -> Iterator[tuple[slice, Tensor]]:
    """Slices of the vectors in float64, in a buffer that is reused, with room for ``more`` rows."""
    (count, n), space = rows.shape, torch.empty(0)
    for part in slices(n, count + more, rows.device):
        width = part.stop - part.start
        if space.shape != (count + more, width):
            space = torch.empty(count + more, width, dtype=torch.float64, device=rows.device)
        space[:count] = rows[:, part]
        yield part, space


def _quick_sweep(rows: Tensor, w: Tensor, c: Tensor | None, total: Tensor) -> None:
    """`Basis.sweep` with products in float32; the norm is still in float64."""
    (count, n), space = rows.shape, torch.empty(0)
    short = None if c is None else c.to(w.dtype)
    for part in slices(n, count + 1, w.device, STREAMED):
        some, cut = w[part], rows[:, part]
        if short is not None:
            some.addmv_(cut.T, short, alpha=-1)
        total[:count] += cut @ some
        space = space if len(space) == len(some) else torch.empty_like(some, dtype=torch.float64)
        space.copy_(some)
        total[count] += space @ space


def _in_file(folder: Path, capacity: int, n: int, dtype: torch.dtype, size: int) -> Tensor:
    """A tensor mapped to an unlinked file. The file is freed with the tensor, or with the process."""
    if not folder.is_dir():
        raise CurvlensError(f"store={str(folder)!r}, expected 'device', 'cpu' or an existing folder.")
    free = shutil.disk_usage(folder).free
    if size > free:
        raise CurvlensError(_full(folder, capacity, size, free))
    handle, name = tempfile.mkstemp(prefix="curvlens-basis-", dir=folder)
    try:
        # Reserve the blocks now: on a full disk a growing mapped file would kill the process without an error.
        _allocate(handle, size)
        return torch.from_file(name, shared=True, size=capacity * n, dtype=dtype).view(capacity, n)
    except OSError as error:
        raise CurvlensError(f"{_full(folder, capacity, size, free)} The system said: {error.strerror}.") from error
    finally:
        os.close(handle)
        Path(name).unlink()


def _allocate(handle: int, size: int) -> None:
    """Reserve all blocks of a file. If the system has no call for it (macOS), write them."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(handle, 0, size)
        return
    zeros = bytes(min(size, 1 << 24))
    while size > 0:
        size -= os.write(handle, zeros[:size])


def _full(folder: Path, capacity: int, size: int, free: int) -> str:
    return (
        f"A basis of {capacity} vectors needs {readable(size)} in {str(folder)!r}, which has {readable(free)} free. "
        "Give memory='2GiB' for a smaller basis, or store='another/folder'."
    )
