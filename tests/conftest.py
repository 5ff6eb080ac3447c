from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings

# One thread: the matrices are tiny, and a time limit should not depend on who else runs on the machine.
torch.set_num_threads(1)

# Some virtual machines announce AMX and do not have it: products of bfloat16 then fail, or end the process.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

settings.register_profile("curvlens", derandomize=True, deadline=None)
settings.load_profile("curvlens")


@pytest.fixture(autouse=True)
def _nothing_said() -> None:
    """Warnings that come once a process come once a test: none depends on which ran before."""
    from curvlens.linalg.counted import say_precision

    say_precision.cache_clear()


def pytest_configure(config: pytest.Config) -> None:
    # A shell that starts us in the background has interrupts ignored; the tests raise some.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # Not in pyproject.toml: there pytest imports curvlens to find the class, before jaxtyping can hook in.
    config.addinivalue_line("filterwarnings", "error::curvlens.CurvlensWarning")


@pytest.fixture
def uncovered() -> Iterator[None]:
    """For interrupts at any moment: one in coverage, which holds a lock while it meets a file, would hang the tests."""
    tracing = sys.gettrace()
    sys.settrace(None)
    yield
    sys.settrace(tracing)


@pytest.fixture
def no_search_for_rings() -> Iterator[None]:
    """What is gone is gone by its count of references, not because Python looked for rings."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()
