"""Whether LayerNorm couples the layers: the blocks of two layers, with norms and without, and the norms' part in them.

H = GGN + Σ M_m with a part M_m for every primitive: what goes through the norms' own second derivatives is exact.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any

import torch
from torch import Tensor

from curvlens import assembly
from curvlens.data import Addition
from curvlens.papers.comparisons import Ratio, ratio
from curvlens.papers.draws import stream
from curvlens.papers.experiment import Effort, Experiment, Report
from curvlens.papers.full_block.matrices import rows
from curvlens.papers.learners import trained
from curvlens.papers.sources import ARTICLE
from curvlens.papers.sweeps import mean, where
from curvlens.papers.verdicts import Finding, judged_parts
from curvlens.report.charts import Chart, Curve, Panel
from curvlens.study import Config, Record

NORMS = {"pre": "Pre-LN", "post": "Post-LN", "none": "no norm"}
SOURCES = ("GGN", "norms", "others")
LAYERS, SAMPLES = 3, 8
HALF = 0.5
"""A coupling goes through what makes at least so much of it."""


def points(effort: Effort) -> list[Config]:
    """GPTs of three layers at initialisation."""
    return [{"norm": norm, "seed": seed} for norm in NORMS for seed in effort.repeats(3, 30)]


def measure(config: Config) -> Mapping[str, Any]:
    """Norms of the layers' blocks on the diagonal and off it, and the shares of the parts in those off it."""
    H, places = network(config)
    layers = [rows(places, f"h.{layer}.") for layer in range(LAYERS)]
    total = H.total.dense()
    pairs = list(combinations(layers, 2))
    through = {"GGN": H.ggn.dense(), "norms": torch.zeros_like(total)}
    for name in H.part_names:
        if is_norm(name):
            through["norms"] += H.parts[name].dense()
    through["others"] = total - through["GGN"] - through["norms"]
    shares = {
        name: sum(float((part[a][:, b] * total[a][:, b]).sum()) for a, b in pairs) for name, part in through.items()
    }
    squares = sum(float(total[a][:, b].square().sum()) for a, b in pairs)
    own = [float(total[a][:, a].norm()) for a in layers]
    return {
        "own": own,
        "coupling": [
            float(total[layers[i]][:, layers[j]].norm()) / (own[i] * own[j]) ** 0.5
            for i, j in combinations(range(LAYERS), 2)
        ],
        "shares": {name: value / squares for name, value in shares.items()},
    }


def network(config: Config) -> tuple[assembly.NetworkHessian, dict[str, slice]]:
    """The Hessian of a GPT of three layers, and where its parameters are."""
    task = Addition(digits=2)
    model = trained(task, seed=stream(config["seed"], "weights"), steps=0, n_layer=LAYERS, norm=config["norm"])
    tokens, labels = task.batch(SAMPLES, seed=stream(config["seed"], "sequences"))
    found = assembly.read(model).hessian(tokens, labels=labels)
    return found, dict(found.total.slices)


def is_norm(part: str) -> bool:
    """Whether a part is that of a norm, by the name of its primitive.

    >>> is_norm("h.0.norm1"), is_norm("final_norm"), is_norm("h.2.attn.softmax")
    (True, True, False)
    """
    return "norm" in part


def report(records: Sequence[Record]) -> Report:
    """The coupling of two layers with norms and without, and what it goes through."""
    coupling = {norm: _coupling(records, norm) for norm in NORMS}
    names = [f"{a + 1}, {b + 1}" for a, b in combinations(range(LAYERS), 2)]
    places = [float(i) for i in range(len(names))]
    chart = Chart(
        "layer-coupling",
        "How layers are coupled, with norms and without",
        f"GPTs of {LAYERS} layers at initialisation that are to add numbers of two digits. Left: the norm of the block "
        "of two layers over the geometric mean of their own blocks' norms. Right: shares ⟨M, H⟩/‖H‖² of the "
        "Gauss–Newton part, of the second derivatives of norms and of those of all other modules in the blocks of two "
        "layers; they sum up to 1. Means over the seeds with their 95 % intervals.",
        [
            Panel(
                [_bars(NORMS[norm], list(values.T), i) for i, (norm, values) in enumerate(coupling.items())],
                title="coupling",
                x_label="layers",
                y_label=r"$\|H_{ab}\| / \sqrt{\|H_{aa}\|\|H_{bb}\|}$",
                ticks=(places, names),
            ),
            Panel(
                [_bars(NORMS[norm], [_shares(records, norm, s) for s in SOURCES], i) for i, norm in enumerate(NORMS)],
                title="what it goes through",
                y_label="share",
                ticks=([float(i) for i in range(len(SOURCES))], list(SOURCES)),
            ),
        ],
    )
    return Report((chart,), (_couples(records, coupling),))


def _coupling(records: Sequence[Record], norm: str) -> Tensor:
    """(seeds, pairs of layers)."""
    return torch.tensor([record.result["coupling"] for record in where(records, norm=norm)], dtype=torch.float64)


def _shares(records: Sequence[Record], norm: str, name: str) -> Tensor:
    return torch.tensor([record.result["shares"][name] for record in where(records, norm=norm)], dtype=torch.float64)


def _bars(label: str, values: Sequence[Tensor], colour: int) -> Curve:
    found = [mean("", column.tolist()) for column in values]
    x, y = list(range(len(found))), [each.value for each in found]
    if len(values[0]) < 2:
        return Curve(label, x, y, colour=colour, style="bars")
    low, high = ([each.value + sign * each.error for each in found] for sign in (-1, 1))
    return Curve(label, x, y, low, high, colour=colour, style="bars")


def _couples(records: Sequence[Record], coupling: Mapping[str, Tensor]) -> Finding:
    """Whether layers are coupled more with norms, and whether through the norms' own second derivatives."""
    middle = {norm: values.log().mean(1).exp() for norm, values in coupling.items()}
    over: dict[str, Ratio] = {norm: ratio(middle[norm], middle["none"]) for norm in ("pre", "post")}
    parts: dict[str, bool | None] = {
        f"more coupling with {NORMS[norm]} than without": found.above() for norm, found in over.items()
    }
    texts = []
    for norm in NORMS:
        found = {name: mean("", _shares(records, norm, name).tolist()) for name in SOURCES}
        texts.append(f"{NORMS[norm]}: " + ", ".join(f"{n} {s.value:.2f} ± {s.error:.2f}" for n, s in found.items()))
        if norm != "none":
            own = found["norms"]
            most = True if own.value - own.error > HALF else False if own.value + own.error < HALF else None
            parts[f"most of it through the norms' second derivatives with {NORMS[norm]}"] = most
    sizes = ", ".join(f"{NORMS[norm]} {float(values.log().mean().exp()):.3g}" for norm, values in middle.items())
    return judged_parts(
        "norm-couples",
        f"Norm of the block of two layers over the geometric mean of their own blocks', at initialisation, geometric "
        f"mean over the pairs: {sizes}. With norms over without: "
        + "; ".join(f"{NORMS[norm]} {found}" for norm, found in over.items())
        + f". Shares ⟨M, H⟩/‖H‖² in the blocks of two layers: {'; '.join(texts)}. Coupling goes through the norms if "
        f"their share is above {HALF:g}.",
        parts,
    )


LAYER_COUPLING = Experiment(
    "layer-coupling", "Coupling of the layers", f"{ARTICLE}, Section 5.2", points, measure, report
)
