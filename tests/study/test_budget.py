"""Budgets as users say them."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from curvlens import CurvlensError
from curvlens.study import Budget, parse_budget


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        *(("90s", 90), ("10m", 600), ("1h", 3600), ("1.5 h", 5400), ("2 min", 120), ("2 minutes", 120), ("1 sec", 1)),
        *(("30 seconds", 30), ("2 hours", 7200), ("2hrs", 7200), (" 1e2s ", 100), (45, 45), (0.5, 0.5)),
    ],
)
def test_times(text: str | float, seconds: float) -> None:
    found = parse_budget(text)
    assert found is not None
    assert (found.seconds, found.gradients) == (seconds, None)


@pytest.mark.parametrize(("text", "amount"), [("200 gradients", 200), ("1 gradient", 1), ("1e6gradients", 1e6)])
def test_gradients(text: str, amount: float) -> None:
    assert parse_budget(text) == Budget(gradients=amount, text=text)


@pytest.mark.parametrize(
    ("budget", "said"),
    [
        ("10 parsecs", "budget='10 parsecs' has the unknown unit 'parsecs'. Give a time, as budget='90s'"),
        ("10", "budget='10' has no unit"),
        ("-3s", "is not a finite number above zero"),
        ("0m", "budget='0m' is not above zero"),
        ("nan s", "is not a finite number above zero"),
        ("1e400m", "is not a finite number above zero"),
        ("1e999 gradients", "is not a finite number above zero"),
        ("inf h", "is not a finite number above zero"),
        ("soon", "is not an amount with a unit"),
        ("", "is not an amount with a unit"),
        (0, "budget=0 is not a finite number above zero"),
        (-1.5, "budget=-1.5 is not a finite number above zero"),
        (float("nan"), "budget=nan is not a finite number above zero"),
        (float("inf"), "budget=inf is not a finite number above zero"),
        (True, "budget=True has the type bool"),
        ([], "has the type list"),
    ],
)
def test_what_is_no_budget(budget: Any, said: str) -> None:
    with pytest.raises(CurvlensError) as told:
        parse_budget(budget)
    assert said in str(told.value)
    assert "'200 gradients'" in str(told.value)


def test_none_and_a_budget_are_themselves() -> None:
    assert parse_budget(None) is None
    assert parse_budget(found := Budget(seconds=3)) is found
    assert (str(found), str(Budget(gradients=200)), str(parse_budget("2 min"))) == ("3s", "200 gradients", "2 min")


@pytest.mark.parametrize("wrong", [{}, {"seconds": 1, "gradients": 1}, {"seconds": 0}, {"gradients": float("nan")}])
def test_a_budget_is_one_amount_above_zero(wrong: dict[str, float]) -> None:
    with pytest.raises(CurvlensError, match="budget"):
        Budget(**wrong)  # type: ignore[arg-type]


@given(st.text() | st.floats() | st.integers() | st.none() | st.booleans())
def test_anything_is_a_budget_or_an_error(budget: Any) -> None:
    try:
        found = parse_budget(budget)
    except CurvlensError:
        return
    assert found is None or (found.seconds or found.gradients or 0) > 0
