"""The sections of the page below the heat map: spectrum, eigenvectors, origin, stability, and the folded ones."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from curvlens.analysis import attention_panel, charts
from curvlens.analysis.drawn import chart
from curvlens.analysis.extremes import WIDTH
from curvlens.analysis.numbers import number, plain, said
from curvlens.analysis.stability_panel import bars, records, stability
from curvlens.dynamics.advice import BEYOND, on_all_data, percent, short
from curvlens.report.content import Column, Content, Fold, Mark, Number, Prose, Table, Words
from curvlens.report.icicle import Icicle
from curvlens.report.page import Section
from curvlens.results import Profile
from curvlens.results.base import from_plain
from curvlens.study.budget import readable_time

Document = Mapping[str, Any]
LARGEST = 12
"""Rows of a list of blocks or tokens."""
WHOLE = {
    "trace": "trace", "norm": "Frobenius norm", "top": "λ_max", "bottom": "λ_min",
    "stable_rank": "stable rank ‖·‖²_F/‖·‖²₂", "effective_rank": "effective rank (Σ|λ|)²/Σλ²",
    "directions_half": "directions with half of ‖·‖²_F", "negative_share": "negative share of Σ|λ|",
    "gap": "spectral gap λ₁ − λ₂",
}  # fmt: skip


def panels(content: Document) -> list[Section]:
    """The sections, in the order of the page."""
    if content.get("minimal"):
        return [_made(make, content) for make in (_spectrum, _cost)]
    makers = (_spectrum, stability, _origin, _eigenvectors, _depth, _attention, _noise, _cost)
    return [_made(make, content) for make in makers]


def _made(make: Callable[[Document], Section], content: Document) -> Section:
    """A section. One whose numbers leave the range of floats says so, and the others are not lost."""
    try:
        return make(content)
    except BEYOND as error:
        name = make.__name__.removeprefix("_")
        why = f"This section cannot be drawn from its numbers ({type(error).__name__}: {error}). See analysis.json."
        return Section(name, name.capitalize(), why, [])


def specs(content: Document) -> Iterator[tuple[str, charts.Spec]]:
    """The charts of the whole, each with the name of its file."""
    spectrum = [_density(content, each) for each in _whole_densities(content)]
    if spectrum:
        plain = [{key: value for key, value in spec.items() if key not in ("config", "$schema")} for spec in spectrum]
        yield "spectrum", {"$schema": spectrum[0]["$schema"], "config": spectrum[0]["config"], "vconcat": plain}
    named: list[tuple[str, Sequence[Any], Callable[[Any], charts.Spec]]] = [
        ("roles", _role_densities(content), charts.roles),
        ("stability", records(content), lambda _: bars(content)),
        ("parts", _parts(content), charts.parts),
        ("lines", _lines(content), charts.lines),
        ("depth", _depth_records(content), lambda found: charts.curves(found, "|trace|")),
        ("norms", _norm_records(content), lambda found: charts.curves(found, "norm of a layer")),
    ]
    for name, found, make in named:
        if found:
            yield name, make(found)
    calls = content.get("attention", {}).get("calls", ())
    for name in ATTENTION:
        if attention_records(calls, name):
            yield f"attention-{name}", attention_grid(calls, name)


def _spectrum(content: Document) -> Section:
    spectrum, body = content["spectrum"], list[Content]()
    whole = _whole_densities(content)
    for each in whole:
        letter = str(each["operator"])
        title = {"H": "H, the Hessian", "G": "G, its Gauss–Newton part"}.get(letter, letter)
        count = each["probes"]
        how = f"{count} probe{'s' * (count != 1)}, band: 95 % interval" if count else "exact"
        body.append(Prose([Mark(title), f": {how}"]))
        body += chart(f"spectral density of {letter}", partial(_density, content, each))
        body += _atoms(each)
    if whole:
        body.append(
            Prose("Ticks at the top are eigenvalues that were computed one by one. Bins are even on the axis.", "faint")
        )
    rows = [
        [title, *(number(numbers.get(name)) for numbers in content["whole"].values())]
        for name, title in WHOLE.items()
        if any((numbers.get(name) or {}).get("value") is not None for numbers in content["whole"].values())
    ]
    rows += _conditions(content)
    if rows:
        columns = [Column("of the whole"), *(Column(letter, numbers=True) for letter in content["whole"])]
        body.append(Table(columns, rows, "the whole", filtered=False))
    for letter, values in spectrum["eigenvalues"].items():
        body.append(
            Fold(f"Extreme eigenvalues of {letter}", [_eigenvalues(content, letter, values)], f"eigenvalues-{letter}")
        )
    by_role = _role_densities(content)
    if by_role:
        body.append(Prose("Densities of H for single roles, all layers together, on shared axes:"))
        body += chart("densities by role", lambda: charts.roles(by_role))
    body += _heterogeneity(content.get("heterogeneity"))
    lead = "How the eigenvalues are spread, on a logarithmic axis mirrored at 0."
    return Section("spectrum", "Spectrum", lead, body or _none())


def _conditions(content: Document) -> list[list[Words]]:
    """A row for each subspace on which a condition number is known."""
    found = {letter: numbers["condition"] for letter, numbers in content["whole"].items() if "condition" in numbers}
    rows: list[list[Words]] = []
    for count in dict.fromkeys(each["directions"] for each in found.values()):
        cells: list[Words] = [
            _between(found[letter]) if letter in found and found[letter]["directions"] == count else ""
            for letter in content["whole"]
        ]
        share = next(each["share"] for each in found.values() if each["directions"] == count)
        title = f"condition number on the span of the {count:,} largest eigenvalues ({percent(share)} of all)"
        rows.append([title, *cells])
    return rows


def _between(cell: Document) -> Words:
    """A number with the ends of its interval."""
    return [
        Number(short(cell["value"]), "", cell["value"]),
        Mark(f" ({short(cell['low'], 2)} to {short(cell['high'], 2)})", "faint"),
    ]


def _atoms(picture: Document) -> list[Content]:
    """What the marked atoms of a density are."""
    said_of = [
        f"{'' if atom['exact'] else 'at least '}{percent(atom['value'], atom['stderr'])} of all eigenvalues are "
        f"{'0' if not atom['at'] else short(atom['at'])}"
        for atom in picture.get("marked", ())
    ]
    if not said_of:
        return []
    return [Prose(f"Circles are atoms: {'; '.join(said_of)}, to {short(WIDTH)} of the largest.", "faint")]


def _whole_densities(content: Document) -> list[Document]:
    return [each for each in content["spectrum"]["densities"] if not each["role"] and not each["block"]]


def _role_densities(content: Document) -> list[Document]:
    return [each for each in content["spectrum"]["densities"] if each["role"]]


def _density(content: Document, picture: Document) -> charts.Spec:
    """A density on the axes that all densities of the whole share."""
    whole, values = _whole_densities(content), content["spectrum"]["eigenvalues"].get(picture["operator"], ())
    homes = _homes(content, len(values)) if picture["operator"] == "H" else []
    least = 0.3 / max(each["n"] for each in whole)  # less than one eigenvalue
    return charts.density(picture, values, charts.largest(whole), least, homes)


def _homes(content: Document, count: int) -> list[str]:
    """For each eigenvector of H, the block with the largest part of it."""
    found = [max(v["mass"], key=v["mass"].__getitem__) if v["mass"] else "" for v in content["eigenvectors"]]
    return found if len(found) == count else []


def _eigenvalues(content: Document, letter: str, values: Sequence[Document]) -> Table:
    homes = _homes(content, len(values)) if letter == "H" else []
    rows: list[list[Words]] = [
        [str(i + 1), number(value), "yes" if value["converged"] else "no", *homes[i : i + 1]]
        for i, value in enumerate(values)
    ]
    columns = [
        Column("number"),
        Column("eigenvalue", numbers=True),
        Column("converged"),
        *([Column("mostly in")] * bool(homes)),
    ]
    return Table(columns, rows, f"eigenvalues of {letter}", filtered=False)


def _heterogeneity(mixed: Document | None) -> list[Content]:
    if not mixed:
        return []
    names = mixed["blocks"]
    records = [
        {"one": a, "other": b, "value": mixed["distance"][i][j]}
        for i, a in enumerate(names)
        for j, b in enumerate(names)
    ]
    words = (
        "How different the spectra of blocks are: Jensen–Shannon distance in bits, each spectrum scaled to its "
        f"largest |λ|, {mixed['bins']} bins, smoothed over {mixed['smoothing']:g} bins."
    )
    return [Prose(words), *chart("heterogeneity", lambda: charts.grid(records, "bits", x=("one", ""), y=("other", "")))]


def _eigenvectors(content: Document) -> Section:
    body, vectors = list[Content](), content["eigenvectors"]
    found = _lines(content)
    if found:
        drawn = chart("loss along eigenvectors", lambda: charts.lines(found))
        body += [
            *drawn,
            *([Prose("Points are losses that were computed, dashed verticals the radii.", "faint")] * bool(drawn)),
        ]
    for which, line in found:
        radii = " and ".join(
            f"{'at least ' if line[f'{side}_open'] else ''}{short(line[side])} ({sign})"
            for side, sign in (("forward", "+"), ("backward", "−"))
        )
        body.append(Prose(f"Along {which}: loss and quadratic model agree within 5 % up to {radii}.", "faint"))
    folds = [_eigenvector(vector) for vector in reversed(vectors)]
    between = folds[1:-1]
    if len(between) > 2:  # the ends of the spectrum first
        folds = [
            folds[0],
            folds[-1],
            Fold(f"{len(between)} eigenvectors between these", between, "eigenvectors-between"),
        ]
    body += folds
    lead = "Where the extreme eigenvectors of H live, and what a step along them does."
    return Section("eigenvectors", "Eigenvectors", lead, body or _none())


def _lines(content: Document) -> list[tuple[str, Document]]:
    """The lines along eigenvectors that were measured."""
    named = [vector for vector in content["eigenvectors"] if vector.get("which") and "line" in vector]
    return [(f"{vector['which']}, λ = {short(vector['value'])}", vector["line"]) for vector in named]


def _eigenvector(vector: Document) -> Fold:
    mass = sorted(vector["mass"].items(), key=lambda pair: -pair[1])[:LARGEST]
    inside = chart("mass by block", lambda: charts.bars(mass, "share of ‖x‖²"))
    if not inside and mass:
        rows: list[list[Words]] = [[name, Number(percent(x), "", x)] for name, x in mass]
        inside = [
            Table([Column("block"), Column("share of ‖x‖²", numbers=True)], rows, "mass by block", filtered=False)
        ]
    heads = {name: x for name, x in (vector.get("heads") or {}).items() if name not in vector["mass"]}
    if heads:
        largest = sorted(heads.items(), key=lambda pair: -pair[1])[:6]
        inside.append(Prose("By head: " + ", ".join(f"{name} {percent(x)}" for name, x in largest), "faint"))
    where = f", {percent(mass[0][1])} in {mass[0][0]}" if mass else ""
    return Fold(f"λ = {said(vector)}{where}", [*inside, *_tokens(vector)], f"eigenvector-{vector['number']}")


def _tokens(vector: Document) -> list[Content]:
    found = vector.get("tokens", {})
    rows: list[list[Words]] = []
    for token in found.get("tokens", ()):
        text = "".join(token["text"]) if "text" in token else " ".join(map(str, token.get("before", ())))
        numbers = [plain(token[name]) for name in ("loss", "bend", "slope")]
        rows.append(
            [
                f"{token['sample']}:{token['position']}",
                _visible(text),
                _visible(str(token.get("label_text", token.get("label", "")))),
                *numbers,
            ]
        )
    if not rows:
        return [Prose(found["why"], "faint")] if found.get("why") else []
    columns = [Column(title) for title in ("sample:position", "text before", "token")]
    columns += [Column(title, numbers=True) for title in ("loss", "bend", "slope")]
    words = (
        "Tokens whose loss bends most within the radius of agreement: bend is ½(l₊ + l₋) − l, slope is ½(l₊ − l₋), "
        "in nats."
    )
    return [Prose(words), Table(columns, rows, "tokens", filtered=False)]


def _visible(text: str) -> str:
    """With signs for the white space that a page would not show: line breaks, tabs, spaces at the ends or in a row.

    >>> _visible(" a b\\n")
    '␣a b↵'
    """
    seen = re.sub(r"^ +| +$| {2,}", lambda found: "␣" * len(found[0]), text)
    return seen.replace("\r", "").replace("\n", "↵").replace("\t", "⇥")


def _origin(content: Document) -> Section:
    body, records = list[Content](), _parts(content)
    if records:
        body += chart("Gauss-Newton and functional part by layer", lambda: charts.parts(records))
    found = content.get("profile")
    profile = from_plain(json.loads(found["profile"])) if found else None
    if isinstance(profile, Profile):
        body.append(Icicle(profile))
    lead = "H is its Gauss–Newton part plus one functional part for each module. Lines on bars are standard errors."
    return Section("origin", "Where it comes from", lead, body or _none())


def _parts(content: Document) -> list[dict[str, Any]]:
    """Traces of G and F, summed over the blocks of each layer; none if there is no F."""
    sums: dict[tuple[str, str], list[Document]] = {}
    for block in content["blocks"]:
        for letter in "GF":
            cell = content["cells"].get(letter, {}).get("trace", {}).get(block["name"])
            if cell is not None and cell["value"] is not None:
                sums.setdefault((block["layer"] or block["name"], letter), []).append(cell)
    if all(letter != "F" for _, letter in sums):
        return []
    return [
        {
            "name": name,
            "operator": letter,
            "value": math.fsum(cell["value"] for cell in cells),
            "stderr": math.hypot(*(cell["stderr"] or 0.0 for cell in cells)),
        }
        for (name, letter), cells in sums.items()
    ]


def _depth_records(content: Document) -> list[dict[str, Any]]:
    """Layers by their names on the other panels: "h.0", and not the module's path "transformer.h.0"."""
    layers = [block["layer"] for block in content["blocks"] if block["layer"] is not None]

    def named(path: str) -> str:
        return next((layer for layer in layers if f".{path}".endswith(f".{layer}")), path)

    return [
        {"layer": named(path), "operator": letter, **numbers["trace"]}
        for path, sizes in content["depth"].items()
        for letter, numbers in sizes.items()
        if numbers["trace"]["value"] is not None
    ]


def _norm_records(content: Document) -> list[dict[str, Any]]:
    """Norms of the gradient and of the weights of each layer."""
    point, squares = content.get("point", {}), dict[tuple[str, str], float]()
    for block in content["blocks"]:
        for kind, key in (("gradient", "gradient_by_block"), ("weights", "weights_by_block")):
            size = point.get(key, {}).get(block["name"])
            if block["layer"] is not None and size is not None:
                squares[block["layer"], kind] = squares.get((block["layer"], kind), 0.0) + size**2
    return [{"layer": layer, "operator": kind, "value": value**0.5} for (layer, kind), value in squares.items()]


def _depth(content: Document) -> Section:
    body, traces, norms = list[Content](), _depth_records(content), _norm_records(content)
    if traces:
        body.append(
            Prose("|Trace| of the Hessian of the loss by the activations that leave a layer, and of its part G:")
        )
        body += chart("Hessian by activations", lambda: charts.curves(traces, "|trace|"))
    if norms:
        body.append(Prose("Norms of the gradient and of the weights of a layer, exact:"))
        body += chart("norms along depth", lambda: charts.curves(norms, "norm of a layer"))
    lead = "The Hessian by the activations that leave a layer, and norms of gradient and weights."
    return Section("depth", "Along depth", lead, body or _none(), folded=True)


ATTENTION = {
    "evenness": ("share of log n", "Entropy of the attention weights, as a share of the largest possible"),
    "sink": ("weight", "Weight on the first token"),
    "largest": ("weight", "Largest weight"),
}
"""Fields of a call of attention, their units, and what they are."""


def attention_records(calls: Sequence[Document], name: str) -> list[dict[str, Any]]:
    """A record for each call and head."""
    return [
        {"layer": str(i), "head": str(h), "value": x} for i, call in enumerate(calls) for h, x in enumerate(call[name])
    ]


def attention_grid(calls: Sequence[Document], name: str) -> charts.Spec:
    """Call × head."""
    records = attention_records(calls, name)
    return charts.grid(records, ATTENTION[name][0], x=("layer", "call of attention"), y=("head", "head"))


def _attention(content: Document) -> Section:
    body, found = list[Content](), content.get("attention", {})
    calls = found.get("calls", ())
    for name, (_, title) in ATTENTION.items():
        if attention_records(calls, name):
            body.append(Prose(f"{title}, mean over query tokens:"))
            body += chart(title, partial(attention_grid, calls, name))
    if found.get("skipped"):
        body.append(Prose(f"{found['skipped']} calls of attention were too large to look at.", "faint"))
    body += [*attention_panel.theory(content), *attention_panel.heads(content)]
    lead = "What each head looks at, in the order of the forward pass, beside its curvature."
    return Section("attention", "Attention", lead, body or _none(), folded=True)


NOISE = {
    "trace": "tr Σ", "gradient": "‖g‖² without noise, an unbiased estimate (may be negative)",
    "scale": "noise scale tr Σ/‖g‖², in samples",
}  # fmt: skip


def _or_not_known(cell: Document) -> Words:
    return number(cell) or Mark("not known", "faint")


def _reasons(cells: Mapping[str, Document]) -> list[Content]:
    """Below a table: why numbers are not known."""
    why: dict[str, list[str]] = {}
    for name, cell in cells.items():
        if cell.get("why"):
            why.setdefault(cell["why"], []).append(name)
    return [Prose(f"{_few(names)} not known: {reason}.", "faint") for reason, names in why.items()]


def _few(names: Sequence[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more


def _noise(content: Document) -> Section:
    body, found = list[Content](), content.get("noise")
    rows: list[list[Words]]
    if found:
        cells = {title: found[name] for name, title in NOISE.items()}
        rows = [[title, _or_not_known(cell)] for title, cell in cells.items()]
        about = f"From {found['samples']} gradients, each of one {found['unit']}. {found['note']}"
        columns = [Column("quantity"), Column("value", numbers=True)]
        body += [Table(columns, rows, "noise", filtered=False), *_reasons(cells), Prose(about, "faint")]
        rows = [[name, _or_not_known(cell)] for name, cell in found["scales"].items()]
        columns = [Column("block"), Column("noise scale, in samples", numbers=True)]
        table = Table(columns, rows, "noise by block")
        body.append(Fold("Noise scale of each block", [table, *_reasons(found["scales"])], "noise-blocks"))
    body += _spread(content)
    return Section("noise", "Noise and data", "How much the numbers depend on the data.", body or _none(), folded=True)


PARTS = {
    "loss": "loss", "gradient_norm": "gradient norm", "trace": "tr G", "sharpness": "λ_max of H", "trace_H": "tr H",
}  # fmt: skip


def _spread(content: Document) -> list[Content]:
    """The same numbers on parts of the data, and below them on all of it."""
    spread = content.get("spread", ())
    if len(spread) < 2:
        return []
    names = [name for name in PARTS if any(name in each for each in spread)]
    whole = {name: cell for name, cell in on_all_data(content).items() if name in names}
    titled = [*((f"part {i + 1}", each) for i, each in enumerate(spread)), ("all", whole)]
    rows: list[list[Words]] = [[title, *(_cell(each.get(name)) for name in names)] for title, each in titled]
    columns = [Column("data"), *(Column(PARTS[name], numbers=True) for name in names)]
    words = f"The same numbers on {len(spread)} parts of the data: how much they depend on it."
    return [Prose(words), Table(columns, rows, "spread", filtered=False)]


def _cell(found: Any) -> Words:
    return plain(found) if found is None or isinstance(found, (int, float)) else number(found)


def _cost(content: Document) -> Section:
    rows: list[list[Words]] = [
        [
            each["stage"],
            Number(readable_time(each["planned"]), "", each["planned"]),
            Number(readable_time(each["seconds"]), "", each["seconds"]),
            plain(each["gradients"]),
        ]
        for each in content["cost"]
    ]
    columns = [Column("stage"), *(Column(title, numbers=True) for title in ("planned", "real", "gradients"))]
    body: list[Content] = [Table(columns, rows, "cost", filtered=False)]
    if content["left"]:
        listed = ", ".join(f"{each['stage']} ({readable_time(each['seconds'])})" for each in content["left"])
        body.append(
            Prose(f"Not done in this budget: {listed}. To refine what is there, run it again with a larger --budget.")
        )
    body += [Prose([Mark(f"{each['kind']}: ", "warn"), str(each["why"])]) for each in content["failed"]]
    command = content["provenance"].get("command")
    if command:
        body.append(Prose(["Reproduce this: ", Mark(str(command), "code")]))
    return Section("cost", "How it was made", "Planned and real cost of each stage.", body, folded=True)


def _none() -> Sequence[Content]:
    return [Prose("Not measured in this budget.", "faint")]
