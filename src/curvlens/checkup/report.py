"""All that the doctor found, the worst first."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from html import escape
from typing import Any, overload

from curvlens.checkup.finding import RANK, Finding, Severity
from curvlens.errors import CurvlensError
from curvlens.results import Result


class Report(Result, Sequence[Finding]):
    """Findings, the most severe first; print it, look at it in a notebook, or keep it by ``save`` and `curvlens.load`.

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
    def ok(self) -> bool:
        """Whether there is no error."""
        return not self.errors

    @property
    def errors(self) -> tuple[Finding, ...]:
        """What makes results wrong or impossible."""
        return self._of("error")

    @property
    def warnings(self) -> tuple[Finding, ...]:
        """What costs digits or meaning."""
        return self._of("warning")

    @property
    def notes(self) -> tuple[Finding, ...]:
        """What is good to know."""
        return self._of("note")

    def _of(self, severity: Severity) -> tuple[Finding, ...]:
        return tuple(f for f in self._findings if f.severity == severity)

    def require(self, allow: str | Iterable[str] = ()) -> None:
        """Raise if there are errors, other than those whose names are allowed."""
        allowed = {allow} if isinstance(allow, str) else set(allow)
        bad = [f for f in self.errors if f.name not in allowed]
        if bad:
            lines = "\n".join(f"- {f}" for f in bad)
            names = ", ".join(repr(name) for name in dict.fromkeys(f.name for f in bad))
            raise CurvlensError(f"The doctor found what makes results wrong:\n{lines}\nTo go on all the same: {names}.")

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
        counts = ((len(self._of(severity)), severity) for severity in ("error", "warning", "note"))
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
