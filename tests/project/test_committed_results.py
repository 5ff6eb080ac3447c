"""The full run that is kept in the repository, and the verdict page that is made of it."""

from __future__ import annotations

import html
import json
import re
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

from curvlens.dynamics.recommendations import VERDICTS
from curvlens.papers import EXPERIMENTS, Effort, missing
from curvlens.papers.claims import CLAIMS
from curvlens.papers.headlines import HEADLINES, headline
from curvlens.papers.page_markdown import markdown
from curvlens.papers.reference import compared, references
from curvlens.papers.shown import Shown
from curvlens.study import Study
from curvlens.study.log import PACKED

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "results"
NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:e[-+]?\d+)?")


@pytest.fixture(scope="module")
def shown() -> list[Shown]:
    sys.path.insert(0, str(ROOT / "examples"))
    try:
        from verdicts import reported
    finally:
        sys.path.pop(0)
    found: list[Shown] = reported(RESULTS)
    return found


def test_every_point_of_the_full_run_is_there() -> None:
    assert not missing(EXPERIMENTS, Effort(), Study(RESULTS))
    assert (RESULTS / PACKED).stat().st_size < 2_000_000


def test_the_page_is_that_of_the_results(shown: list[Shown]) -> None:
    """Word by word; numbers to a thousandth, since fits differ in their last digits between processors."""
    made, kept = markdown(shown, Effort(), "figures/papers/"), (ROOT / "docs" / "verdicts.md").read_text()
    assert NUMBER.sub("#", made) == NUMBER.sub("#", kept)
    pairs = zip(NUMBER.findall(made), NUMBER.findall(kept), strict=True)
    assert all(float(a) == pytest.approx(float(b), rel=2e-3, abs=1e-9) for a, b in pairs)
    for each in shown:
        for chart in each.report.charts:
            assert (ROOT / "docs" / "figures" / "papers" / f"{chart.name}.svg").exists()


def test_every_claim_is_one_line_with_a_verdict_a_number_and_a_figure(shown: list[Shown]) -> None:
    """The number is one of the finding's own."""
    kept = (ROOT / "docs" / "verdicts.md").read_text()
    lines = [html.unescape(line) for line in kept.splitlines() if line.startswith("<details><summary>")]
    for each in shown:
        for finding in each.report.findings:
            number, what = headline(finding)
            assert number, finding.claim
            assert number in finding.measured
            (statement,) = (claim.statement for claim in CLAIMS if claim.name == finding.claim)
            (line,) = (line for line in lines if line.startswith(f"<details><summary>{statement} "))
            summary, _, details = line.partition("</summary>")
            assert f"<b>{finding.verdict}</b> · {what}: " in summary
            assert f'<a href="#{each.experiment.name}">' in summary
            assert f"\n### {each.experiment.name}\n" in kept
            assert finding.regime in details
    assert set(HEADLINES) == {finding.claim for each in shown for finding in each.report.findings}


def test_charts_are_plain_numbers(shown: list[Shown]) -> None:
    """They are written down, to know which figures have to be drawn again."""
    for each in shown:
        for chart in each.report.charts:
            assert chart.name in json.dumps(asdict(chart))


def test_every_claim_that_an_experiment_bears_on_is_judged(shown: list[Shown]) -> None:
    judged = [finding.claim for each in shown for finding in each.report.findings]
    assert len(judged) == len(set(judged))
    assert all(bool(f.regime) == (f.verdict == "holds when") for each in shown for f in each.report.findings)
    assert set(judged) <= {claim.name for claim in CLAIMS}
    assert {claim.name for claim in CLAIMS} == set(judged)


def test_the_verdicts_that_advice_cites(shown: list[Shown]) -> None:
    """Of where a claim holds, advice keeps what is decided."""
    findings = [finding for each in shown for finding in each.report.findings]
    where = {f.claim: [part for part in f.regime.split("; ") if " is undecided " not in part] for f in findings}
    found = {f.claim: (f.verdict, "; ".join(where[f.claim])) for f in findings}
    assert {claim: found[claim] for claim in VERDICTS} == VERDICTS


def test_reference_numbers_agree(shown: list[Shown]) -> None:
    """All of them, the gap of Figure 4 within the error of the reference's small sample."""
    comparisons = compared([number for each in shown for number in each.report.numbers])
    assert len(comparisons) == len(references()[0])
    outcomes = {each.reference.name: each.outcome for each in comparisons if each.outcome != "agrees"}
    assert outcomes == {"fig4 gap": "within the reference's sampling error"}
