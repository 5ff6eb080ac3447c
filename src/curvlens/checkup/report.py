"""The findings of the doctor, the most severe first."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from html import escape
from typing import Any, get_args, overload

import torch

from curvlens.checkup.finding import RANK, Finding, Severity
from curvlens.errors import CurvlensError
from curvlens.results import ByBlock, Estimate, Result, Status

SEVERITIES: tuple[Severity, ...] = get_args(Severity)


class Report(Result, Sequence[Finding]):
    """Findings, the most severe first. Print it, show it in a notebook, or keep it with ``save`` and `curvlens.load`.

    Apply the ``fix`` of each finding in `errors`, then call `doctor` again; `ok` is True when none is left.

    >>> report = Report([Finding("frozen-parameters", "note", "Some.", "Fewer rows.", "pass")])
    >>> report.ok, len(report), report[0].name
    (True, 1, 'frozen-parameters')
    """

    def __init__(self, findings: Iterable[Finding] = ()) -> None:
        self._findings = tuple(sorted(findings, key=lambda f: RANK[f.severity]))

    @overload
    def __getitem__(self, index: int) -> Finding: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Finding]: ...
    def __getitem__(self, index: int | slice) -> Finding | Sequence[Finding]:
        return self._findings[index]

    def __len__(self) -> int:
        return len(self._findings)

    @property
    def status(self) -> Status:
        """Always complete: all checks ran. See `ok` for their outcome."""
        return Status.COMPLETE

    @property
    def ok(self) -> bool:
        """Whether there is no error."""
        return not self.errors

    @property
    def errors(self) -> tuple[Finding, ...]:
        """Findings that make results wrong or impossible. Fix them first."""
        return self._of("error")

    @property
    def warnings(self) -> tuple[Finding, ...]:
        """Findings that cost digits or meaning."""
        return self._of("warning")

    @property
    def notes(self) -> tuple[Finding, ...]:
        """Findings for information; results are right."""
        return self._of("note")

    def _of(self, severity: Severity) -> tuple[Finding, ...]:
        return tuple(f for f in self._findings if f.severity == severity)

    def require(self, allow: str | Iterable[str] = ()) -> None:
        """Raise a `CurvlensError` if there are errors, except those named in ``allow``."""
        allowed = {allow} if isinstance(allow, str) else set(allow)
        bad = [f for f in self.errors if f.name not in allowed]
        if bad:
            lines = "\n".join(f"- {f}" for f in bad)
            names = list(dict.fromkeys(f.name for f in bad))
            raise CurvlensError(
                f"The doctor found errors that make results wrong:\n{lines}\n"
                f"To proceed anyway, call report.require(allow={names})."
            )

    def table(self) -> list[dict[str, Any]]:
        """A record for each finding: name, severity, what, effect, fix, size, unit."""
        return [f.to_dict() for f in self._findings]

    def _pictured(self) -> ByBlock:
        """The number of findings of each severity."""
        counts = {severity: torch.tensor(float(len(self._of(severity)))) for severity in SEVERITIES}
        return ByBlock({name: Estimate(n, torch.zeros_like(n), 0) for name, n in counts.items()}, "findings")

    def to_dict(self) -> dict[str, Any]:
        """Plain texts and numbers."""
        return {"ok": self.ok, "findings": [f.to_dict() for f in self._findings]}

    def _fields(self) -> dict[str, Any]:
        return {"findings": [dataclasses.asdict(f) for f in self._findings]}

    @classmethod
    def _from_fields(cls, fields: dict[str, Any]) -> Report:
        return cls(Finding(**finding) for finding in fields["findings"])

    def _headline(self) -> str:
        if not self:
            return "curvlens doctor: nothing found"
        counts = ((len(self._of(severity)), severity) for severity in SEVERITIES)
        return "curvlens doctor: " + ", ".join(f"{n} {severity}{'s' * (n > 1)}" for n, severity in counts if n)

    def __repr__(self) -> str:
        return f"Report({', '.join(f'{f.severity} {f.name}' for f in self._findings)})"

    def __str__(self) -> str:
        lines = [self._headline()]
        for f in self._findings:
            lines += [f"{f.severity:<8}{f.headed}", f"        {f.what}", f"        {f.effect}"]
            lines.append(f"        fix: {f.fix}")
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        head = "".join(f"<th>{title}</th>" for title in ("", "finding", "size", "what", "effect", "fix"))
        rows = []
        for f in self._findings:
            size = f.measured.removeprefix("size ")
            cells = "".join(f"<td>{escape(text)}</td>" for text in (f.severity, f.name, size, f.what, f.effect))
            rows.append(f"<tr>{cells}<td><code>{escape(f.fix)}</code></td></tr>")
        table = f"<table><tr>{head}</tr>{''.join(rows)}</table>" if rows else ""
        return f"<p>{escape(self._headline())}</p>{table}"
