"""Cost of one product in gradients. All rows take turns, so that noise of the machine hits them alike."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from statistics import median, quantiles
from typing import Any

import torch

from bench.child import serve
from bench.methods import BY_KEY, METHODS, Product, reason
from bench.model import FULL, QUICK, gradient, make_batch, make_model

GRADIENT = "gradient"


def seconds(call: Callable[[], object]) -> float:
    """Wall time of one call."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def spread(values: list[float]) -> dict[str, Any]:
    """Median, quartiles and the values themselves."""
    low, _, high = quantiles(values, n=4, method="inclusive") if len(values) > 1 else (values[0],) * 3
    return {"median": median(values), "quartiles": [low, high], "values": values}


def measure(*, quick: bool, repetitions: int) -> dict[str, Any]:
    """Time of the gradient, and for each row its time in gradients, per product and once."""
    sizes = QUICK if quick else FULL
    model, batch = make_model(sizes), make_batch(sizes)
    v = torch.randn(sum(p.numel() for p in model.parameters()))

    def unit() -> float:
        return seconds(lambda: gradient(model, batch))

    for _ in range(2):
        unit()
    # The first double backward of a process loads kernels and pages; nobody's first product shall pay for it.
    BY_KEY["func-vjp-grad"].build(model, [batch])(v)

    rows: dict[str, Any] = {}
    products: dict[str, Product] = {}
    for method in METHODS:
        if not method.timed:
            continue
        rows[method.key] = {}
        nearby = unit()  # not the median of all: the load of the machine changes over minutes
        start = time.perf_counter()
        try:
            product = method.build(model, [batch])
            product(v)
        except Exception as error:
            rows[method.key]["not_run"] = reason(error)
            continue
        first = time.perf_counter() - start
        rows[method.key]["once"] = (first - seconds(lambda product=product: product(v))) / nearby  # type: ignore[misc]
        products[method.key] = product

    times: dict[str, list[float]] = {GRADIENT: [], **{key: [] for key in products}}
    work: dict[str, list[float]] = {key: [] for key in times}
    gc.disable()
    for _ in range(repetitions):
        for key in times:
            start = time.process_time()
            times[key].append(unit() if key == GRADIENT else seconds(lambda key=key: products[key](v)))  # type: ignore[misc]
            work[key].append(time.process_time() - start)
        gc.collect()

    units = times[GRADIENT]
    for key in products:
        rows[key]["ratio"] = spread([t / g for t, g in zip(times[key], units, strict=True)])
        # Processor time does not count waiting for a busy core: far from the ratio above, the run was disturbed.
        rows[key]["processor_ratio"] = spread([t / g for t, g in zip(work[key], work[GRADIENT], strict=True)])
        rows[key]["seconds"] = median(times[key])
    busy = [w / t for w, t in zip(work[GRADIENT], units, strict=True)]
    return {"gradient_seconds": spread(units), "gradient_cores": spread(busy), "rows": rows}


if __name__ == "__main__":
    serve(measure)
