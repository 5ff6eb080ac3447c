"""The page of an analysis, from its document alone: the same document gives the same page."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from curvlens.analysis import charts
from curvlens.dynamics.advice import percent, short, with_bound
from curvlens.report.content import Column, Content, Fold, Link, Mark, Number, Prose, Table, VegaChart, Words
from curvlens.report.heat_map import HeatMap
from curvlens.report.icicle import Icicle
from curvlens.report.page import Page, Section
from curvlens.results import Profile
from curvlens.results.base import from_plain
from curvlens.study.budget import readable_time

Document = Mapping[str, Any]
LARGEST = 12
"""Rows of a list of blocks or tokens."""


def page(content: Document) -> str:
    """The page as HTML."""
    sections = [
        _says(content),
        _heat(content),
        _spectrum(content),
    ]
    if not content.get("minimal"):
        sections += [
            _eigenvectors(content),
            _origin(content),
            _depth(content),
            _attention(content),
            _stability(content),
            _noise(content),
        ]
    sections.append(_cost(content))
    bad = [each["text"] for each in content["sentences"] if each["tone"] == "bad"]
    ended = {"interrupted": "This analysis was interrupted: it shows what was done by then.", "planned": "Only planned."}
    banner = " ".join([*bad, *([ended[content["ended"]]] if content["ended"] in ended else [])])
    return Page(
        f"Curvature of {content['name']}",
        sections,
        lead=_lead(content),
        banner=banner,
        provenance={**content["provenance"], "seed": content["seed"], "loss": content["loss_name"]},
        filtered="blocks",
    ).html()


def _lead(content: Document) -> list[Content]:
    point, sanity = content.get("point", {}), content.get("sanity", {})
    facts = [f"{content['parameters']:,} parameters", f"{content['dtype']} on {content['device']}"]
    if "tokens" in point:
        facts.insert(1, f"{point['tokens']:,} tokens")
    facts.append(f"{readable_time(sum(c['seconds'] for c in content['cost']))} of work, budget {content['budget']}")
    numbers: list[Any] = []
    if "loss" in point:
        numbers += [f"loss {short(point['loss'], 4)}"]
        twin = sanity.get("shuffled_loss")
        if twin is not None:
            good = twin > point["loss"] * 1.02
            numbers += [Mark(f" (shuffled input {short(twin, 4)} {'✓' if good else '✗'})", "good" if good else "bad")]
        if sanity.get("accuracy") is not None:
            numbers += [f" · accuracy {percent(sanity['accuracy'])}"]
    whole = content["whole"].get("H", {})
    if "top" in whole:
        numbers += [f" · sharpness λ_max {with_bound(whole['top'])}"]
    if "trace" in whole:
        numbers += [f" · tr H {short(whole['trace']['value'])} ± {short(whole['trace']['stderr'], 2)}"]
    findings = content.get("doctor")
    health: Words = ""
    if findings is not None:
        errors = sum(f["severity"] == "error" for f in findings)
        tone: Any = "bad" if errors else "good"
        notes = len(findings) - errors
        health = [Mark("● ", tone), f"doctor: {errors or 'no'} error{'s' * (errors != 1)}, {notes} note{'s' * (notes != 1)}"]
    return [Prose(" · ".join(facts), "faint"), Prose(numbers), *([Prose(health)] if health else [])]


def _says(content: Document) -> Section:
    titles = {each.id: each.title for each in _TITLES}
    body: list[Content] = []
    for number, each in enumerate(content["sentences"], start=1):
        words: list[Any] = [f"{number}. ", Mark(each["text"], each["tone"]) if each["tone"] else each["text"]]
        if each["panel"] in titles and each["panel"] != "start":
            words += [" ", Link(f"→ {titles[each['panel']].lower()}", each["panel"])]
        body.append(Prose(words))
    findings = content.get("doctor") or ()
    if findings:
        rows = [[f["name"], f["severity"], f["what"], f["effect"], f["fix"]] for f in findings]
        columns = [Column(title) for title in ("finding", "severity", "what", "effect", "fix")]
        body.append(Fold("What the doctor found", [Table(columns, rows, "findings")], "doctor"))
    return Section("start", "What this says", "Each sentence is a rule over measured numbers. Errors are standard errors; those of eigenvalues are bounds.", body)


def _heat(content: Document) -> Section:
    more: dict[str, list[tuple[str, str]]] = {}
    point, vectors = content.get("point", {}), content["eigenvectors"]
    for block in content["blocks"]:
        name = block["name"]
        facts = more.setdefault(name, [])
        if name in point.get("gradient_by_block", {}):
            facts.append(("gradient norm", short(point["gradient_by_block"][name])))
            facts.append(("weight norm", short(point["weights_by_block"][name])))
        if vectors:
            facts.append(("share of the top eigenvector", percent(vectors[-1]["mass"].get(name, 0.0))))
        heads = [(head, cell) for head, cell in content["heads"].items() if head.startswith(f"{name}.") and head != name]
        if heads:
            said = ", ".join(f"{head.rpartition('.')[2]}: {short(cell['value'])}" for head, cell in heads[:32])
            facts.append(("trace of G by head", said))
        facts.append(("parameters", ", ".join(block["parameters"][:6])))
    rows = [
        [
            name,
            letter,
            _QUANTITIES[quantity],
            Number(short(cell["value"]), _error(cell), cell["value"]),
            str(cell.get("samples") or ""),
        ]
        for letter, quantities in content["cells"].items()
        for quantity, cells in quantities.items()
        for name, cell in cells.items()
        if cell["value"] is not None
    ]
    columns = [Column("block"), Column("of"), Column("quantity"), Column("value", numbers=True), Column("samples", numbers=True)]
    return Section(
        "heat",
        "Layer × role",
        "Where the curvature sits. Choose an operator and a quantity; click a cell for all numbers of a block.",
        [
            HeatMap(content["blocks"], content["cells"], more),
            Fold(f"All {len(rows)} numbers", [Table(columns, rows, "all cells")], "cells"),
        ],
    )


def _spectrum(content: Document) -> Section:
    spectrum, body = content["spectrum"], list[Content]()
    whole = [each for each in spectrum["densities"] if not each["role"] and not each["block"]]
    if whole:
        said = ", ".join(f"{e['operator']}: {e['probes']} probes" if e["probes"] else f"{e['operator']}: exact" for e in whole)
        body.append(VegaChart(charts.densities(whole, spectrum["eigenvalues"]), "spectral density"))
        body.append(Prose(f"Ticks are eigenvalues that were computed. Bands are 95 % intervals ({said}).", "faint"))
    for letter, values in spectrum["eigenvalues"].items():
        rows = [
            [str(i + 1), Number(short(v["value"], 5), short(v["bound"], 2), v["value"]), "yes" if v["converged"] else "no"]
            for i, v in enumerate(values)
        ]
        columns = [Column("number"), Column("eigenvalue", numbers=True), Column("converged")]
        body.append(Fold(f"Extreme eigenvalues of {letter}", [Table(columns, rows, f"eigenvalues of {letter}")]))
    facts = _whole_facts(content["whole"])
    if facts:
        columns = [Column("quantity"), *(Column(letter, numbers=True) for letter in content["whole"])]
        body.append(Table(columns, facts, "the whole"))
    by_role = [each for each in spectrum["densities"] if each["role"]]
    if by_role:
        body.append(Prose("Densities of single roles, all layers together."))
        body.append(VegaChart(charts.roles(by_role), "densities by role"))
    mixed = content.get("heterogeneity")
    if mixed:
        records = [
            {"one": a, "other": b, "value": mixed["distance"][i][j]}
            for i, a in enumerate(mixed["blocks"])
            for j, b in enumerate(mixed["blocks"])
        ]
        body.append(
            Prose(
                "How different the spectra of blocks are: Jensen–Shannon distance in bits, each spectrum scaled to its "
                f"largest |λ|, {mixed['bins']} bins, smoothed over {mixed['smoothing']:g} bins."
            )
        )
        body.append(VegaChart(charts.grid(records, "bits", x="one", y="other"), "heterogeneity"))
    return Section("spectrum", "Spectrum", "How the eigenvalues are spread, on a logarithmic axis mirrored at 0.", body or _none())


def _whole_facts(whole: Document) -> list[list[Any]]:
    names = {
        "trace": "trace", "norm": "Frobenius norm", "top": "λ_max", "bottom": "λ_min", "stable_rank": "stable rank ‖·‖²_F/‖·‖²₂",
        "effective_rank": "effective rank (Σ|λ|)²/Σλ²", "directions_half": "directions with half of ‖·‖²",
        "negative_share": "negative share of Σ|λ|",
    }  # fmt: skip
    rows = []
    for name, title in names.items():
        cells = [numbers.get(name) for numbers in whole.values()]
        if any(cell is not None and cell.get("value") is not None for cell in cells):
            rows.append([title, *(Number(short(c["value"]), _error(c), c["value"]) if c and c.get("value") is not None else "" for c in cells)])
    return rows


def _eigenvectors(content: Document) -> Section:
    body = list[Content]()
    vectors = content["eigenvectors"]
    named = [v for v in vectors if v.get("which")]
    found = [(f"{v['which']}, λ = {short(v['value'])}", v["line"]) for v in named if "line" in v]
    if found:
        body.append(VegaChart(charts.lines(found), "loss along eigenvectors"))
        for which, line in found:
            radii = " and ".join(
                f"{'at least ' if line[f'{side}_open'] else ''}{short(line[side])} ({word})"
                for side, word in (("forward", "+"), ("backward", "−"))
            )
            body.append(Prose(f"Along {which}: loss and quadratic model agree within 5 % up to {radii}.", "faint"))
    for vector in reversed(vectors):
        mass = sorted(vector["mass"].items(), key=lambda pair: -pair[1])[:LARGEST]
        inside: list[Content] = [VegaChart(charts.bars([{"name": n, "value": x} for n, x in mass], "share of ‖x‖²"), "mass by block")]
        heads = vector.get("heads")
        if heads:
            largest = sorted(heads.items(), key=lambda pair: -pair[1])[:6]
            inside.append(Prose("By head: " + ", ".join(f"{name} {percent(x)}" for name, x in largest), "faint"))
        inside += _tokens(vector)
        where = f", {percent(mass[0][1])} in {mass[0][0]}" if mass else ""
        body.append(Fold(f"λ = {with_bound(vector)}{where}", inside, f"eigenvector-{vector['number']}"))
    return Section("eigenvectors", "Eigenvectors", "Where the extreme eigenvectors of H live, and what a step along them does.", body or _none())


def _tokens(vector: Document) -> list[Content]:
    found = vector.get("tokens", {})
    rows = []
    for token in found.get("tokens", ()):
        text = "".join(token.get("text", ())) if "text" in token else " ".join(map(str, token.get("before", ())))
        label = token.get("label_text", token.get("label", ""))
        rows.append(
            [
                f"{token['sample']}:{token['position']}", str(text), str(label), Number(short(token["loss"]), "", token["loss"]),
                Number(short(token["bend"]), "", token["bend"]), Number(short(token["slope"]), "", token["slope"]),
            ]
        )  # fmt: skip
    if not rows:
        return [Prose(found["why"], "faint")] if found.get("why") else []
    titles = ("sample:position", "text before", "token")
    columns = [*(Column(t) for t in titles), *(Column(t, numbers=True) for t in ("loss", "bend", "slope"))]
    return [
        Prose("Tokens whose loss bends most within the radius of agreement: ½(l₊ + l₋) − l; slope is ½(l₊ − l₋)."),
        Table(columns, rows, "tokens"),
    ]


def _origin(content: Document) -> Section:
    body = list[Content]()
    records, cells = [], content["cells"]
    sums: dict[str, dict[str, float]] = {}
    for block in content["blocks"]:
        for letter in ("G", "F"):
            cell = cells.get(letter, {}).get("trace", {}).get(block["name"])
            if cell is not None:
                group = sums.setdefault(block["layer"] or block["name"], {})
                group[letter] = group.get(letter, 0.0) + cell["value"]
    for name, group in sums.items():
        records += [{"name": name, "operator": letter, "value": value} for letter, value in group.items()]
    if any(record["operator"] == "F" for record in records):
        body.append(VegaChart(charts.parts(records), "Gauss-Newton and functional part by layer"))
    found = content.get("profile")
    if found:
        profile = from_plain(json.loads(found["profile"]))
        if isinstance(profile, Profile):
            body.append(Icicle(profile))
    return Section("origin", "Where it comes from", "H is its Gauss–Newton part plus one functional part for each module.", body or _none())


def _depth(content: Document) -> Section:
    body, records = list[Content](), []
    for path, sizes in content["depth"].items():
        for letter, numbers in sizes.items():
            records.append({"layer": path, "operator": letter, "value": numbers["trace"]["value"]})
    if records:
        body.append(VegaChart(charts.curves(records, "|trace| by activations"), "Hessian by activations"))
    point = content.get("point", {})
    sizes = {"gradient": point.get("gradient_by_block", {}), "weights": point.get("weights_by_block", {})}
    norms: dict[tuple[str, str], float] = {}
    for block in content["blocks"]:
        for kind, found in sizes.items():
            if block["layer"] is not None and block["name"] in found:
                key = (block["layer"], kind)
                norms[key] = norms.get(key, 0.0) + found[block["name"]] ** 2
    if norms:
        rows = [{"layer": layer, "operator": kind, "value": value**0.5} for (layer, kind), value in norms.items()]
        body.append(VegaChart(charts.curves([r for r in rows if r["value"] > 0], "norm of a layer"), "norms along depth"))
    return Section("depth", "Along depth", "The Hessian by the activations that leave a layer, and norms of gradient and weights.", body or _none(), folded=True)


def _attention(content: Document) -> Section:
    body, found = list[Content](), content.get("attention", {})
    calls = found.get("calls", ())
    words = {"evenness": "entropy, as a share of the largest possible", "sink": "weight on the first token", "largest": "largest weight"}
    for name, title in words.items():
        records = [
            {"layer": str(i), "head": str(h), "value": value} for i, call in enumerate(calls) for h, value in enumerate(call[name])
        ]
        if records:
            body += [Prose(f"{title[0].upper()}{title[1:]}, mean over query tokens."), VegaChart(charts.grid(records, name), title)]
    if found.get("skipped"):
        body.append(Prose(f"{found['skipped']} calls of attention were too large to look at.", "faint"))
    if calls and "m1" in calls[0]:
        rows = [
            [f"{i}.{h}", *(Number(short(call[m][h]), "", call[m][h]) for m in ("m1", "m2", "m3"))]
            for i, call in enumerate(calls)
            if "m1" in call
            for h in range(len(call["m1"]))
        ]
        columns = [Column("call.head"), *(Column(m, numbers=True) for m in ("M1", "M2", "M3"))]
        body.append(Fold("Moments of the values under the attention weights", [Table(columns, rows, "moments")]))
    return Section("attention", "Attention", "What each head looks at, in the order of the forward pass.", body or _none(), folded=True)


def _stability(content: Document) -> Section:
    body, records = list[Content](), []
    found, top = content.get("stability"), content["whole"].get("H", {}).get("top")
    if found and found.get("ratio") is not None:
        ratio, bound = float(found["ratio"]), float(found.get("residual") or 0.0)
        records.append({"name": str(found["rule"]), "value": ratio, "low": ratio - bound, "high": ratio + bound})
        body.append(VegaChart(charts.edge(records), "distance to the edge"))
        if found.get("convention"):
            body.append(Prose(str(found["convention"]), "faint"))
    if top is not None and top["low"] > 0:
        rules = {"gradient descent": 2.0, "momentum 0.9": 3.8, "Nesterov 0.9": 2 * 1.9 / 2.8}
        rows = [[name, Number(short(factor), "", factor), Number(short(factor / top["value"]), short(factor * top["bound"] / top["value"] ** 2, 2), factor / top["value"])] for name, factor in rules.items()]
        columns = [Column("optimiser"), Column("edge η λ_max", numbers=True), Column("largest stable learning rate", numbers=True)]
        body.append(Table(columns, rows, "learning rates"))
        body.append(Prose("Adam's edge depends on its second moments: give the optimiser (--optimizer optimizer.pt) to have it measured.", "faint") if not found else Prose(""))
    body.append(Prose("All of this is local and quadratic. The lines along the eigenvectors show how far the quadratic model holds.", "faint"))
    return Section("stability", "Stability", "The learning rates at which the sharpest direction begins to grow.", body)


def _noise(content: Document) -> Section:
    body, found = list[Content](), content.get("noise")
    if found:
        names = {"trace": "tr Σ", "gradient": "‖g‖², without noise", "scale": "noise scale tr Σ/‖g‖², in samples"}
        rows = [[title, _number(found[name])] for name, title in names.items()]
        about = f"From {found['samples']} gradients, each of one {found['unit']}. {found['note']}"
        body += [Table([Column("quantity"), Column("value", numbers=True)], rows, "noise"), Prose(about, "faint")]
        scales = [[name, _number(cell)] for name, cell in found["scales"].items() if cell["value"] is not None]
        columns = [Column("block"), Column("noise scale", numbers=True)]
        body.append(Fold("Noise scale of each block", [Table(columns, scales, "noise by block")]))
    spread = content.get("spread", ())
    if len(spread) > 1:
        rows = [
            [
                f"part {i + 1}", Number(short(each["loss"], 4), "", each["loss"]), Number(short(each["gradient_norm"]), "", each["gradient_norm"]),
                Number(short(each["trace"]["value"]), short(each["trace"]["stderr"], 2), each["trace"]["value"]) if "trace" in each else "",
            ]
            for i, each in enumerate(spread)
        ]  # fmt: skip
        columns = [Column("data"), *(Column(t, numbers=True) for t in ("loss", "gradient norm", "tr G"))]
        body += [Prose("The same numbers on parts of the data: how much they depend on it."), Table(columns, rows, "spread")]
    return Section("noise", "Noise and data", "How much the numbers depend on the data.", body or _none(), folded=True)


def _cost(content: Document) -> Section:
    rows = [
        [c["stage"], Number(readable_time(c["planned"]), "", c["planned"]), Number(readable_time(c["seconds"]), "", c["seconds"]), Number(short(c["gradients"]), "", c["gradients"])]
        for c in content["cost"]
    ]
    columns = [Column("stage"), *(Column(t, numbers=True) for t in ("planned", "real", "gradients"))]
    body: list[Content] = [Table(columns, rows, "cost")]
    if content["left"]:
        said = ", ".join(f"{each['stage']} ({readable_time(each['seconds'])})" for each in content["left"])
        body.append(Prose(f"Not done in this budget: {said}. Run the same command with a larger --budget: it refines what is there."))
    for each in content["failed"]:
        body.append(Prose([Mark(f"{each['kind']}: ", "warn"), each["why"]]))
    command = content["provenance"].get("command")
    if command:
        body.append(Prose(["Reproduce this: ", Mark(str(command), "code")]))
    return Section("cost", "How it was made", "Planned and real cost of each stage.", body, folded=True)


def _none() -> Sequence[Content]:
    return [Prose("Not measured in this budget.", "faint")]


def _number(cell: Document) -> Words:
    return "" if cell.get("value") is None else Number(short(cell["value"]), _error(cell), cell["value"])


def _error(cell: Document) -> str:
    if cell.get("exact"):
        return ""
    error = cell.get("bound", cell.get("stderr"))
    return short(error, 2) if error else ""


_QUANTITIES = {"trace": "trace", "norm": "Frobenius norm", "top": "λ_max", "bottom": "λ_min", "mean": "mean curvature"}
_TITLES = [
    Section(id, title)
    for id, title in (
        ("start", "What this says"), ("heat", "Layer × role"), ("spectrum", "Spectrum"), ("eigenvectors", "Eigenvectors"),
        ("origin", "Where it comes from"), ("stability", "Stability"), ("noise", "Noise and data"), ("cost", "How it was made"),
    )
]  # fmt: skip
