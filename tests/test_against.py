"""What has changed since an earlier set: found, named, and rarely where nothing has."""

import argparse
import math
import random
from pathlib import Path

import numpy as np
import pytest
from test_report import FULL, point, publish, results
from test_sessions import session

from duel.cli import commands
from duel.errors import UserError
from duel.report import against
from duel.results import Results

__all__ = ["results"]  # the fixture


def changed(results: Results, factor: float, sessions: int, spread: float, seed: int) -> list[against.Change]:
    """What is said of a set of 12 points, of which JAX's side of the first has become ``factor`` times as fast."""
    generator = random.Random(seed)
    sets = []
    for name, first in (("before", 1.0), ("after", factor)):
        rows = []
        for number in range(12):
            for place in range(sessions):
                ratio = math.exp(generator.gauss(0, spread)) * (first if number == 0 else 1.0)
                rows += session([ratio], 2.0 * place, batch_size=number + 1, pair=f"p{number}", **FULL)
        sets.append(publish(Results(results.folder / f"{seed}"), rows, name=name))
    found, left_out = against.changes(*sets)
    assert left_out == []
    return found


def test_a_change_since_an_earlier_set_is_found_and_named(results: Results) -> None:
    found = changed(results, 0.9, 6, 0.01, 0)
    ratio = {(c.line.batch_size, c.quantity): c.verdict for c in found}
    assert ratio[1, "JAX / PyTorch"] == ratio[1, "JAX"] == "slower"
    assert {verdict for (size, _), verdict in ratio.items() if size != 1} <= {"equal within 3 %", "undecided"}
    assert {verdict for (_, quantity), verdict in ratio.items() if quantity == "PyTorch"} == {"equal within 3 %"}
    assert against.is_slower(found)


@pytest.mark.parametrize("version", ["0.10.2", "9.9"])
def test_of_a_set_that_has_grown_only_what_is_new_is_compared(results: Results, version: str) -> None:
    """'publish' adds to a set: its earlier state is still in it."""
    old = [session([1.0 + 0.001 * hour], 2.0 * hour, pair="p", **FULL) for hour in range(3)]
    new = [session([0.5 + 0.001 * hour], 2.0 * hour, pair="p", **FULL) for hour in range(3)]
    new = [[row.replace(framework_version=version) for row in rows] for rows in new]
    before = publish(results, *old, name="before")
    after = publish(results, *old, *new, name="after")
    changes, left_out = against.changes(before, after)
    assert left_out == []
    factors = {change.quantity: change.factor for change in changes}
    assert factors["JAX"] == pytest.approx(0.5, rel=0.01)
    _, nothing = against.changes(after, after)
    assert [text.endswith(": not in after") for text in nothing] == [True]


def simulated(generator: np.random.Generator, points: int, sessions: int, gain: float, spread: float) -> list[str]:
    """What ``corrected`` says of each quantity at each point, where JAX gains at the first."""
    jax, pytorch = generator.normal(0, spread, (2, 2, points, sessions))  # before and after
    jax[1, 0] += math.log(gain)
    found = [
        (None, name, *against._welch(list(before), list(after)))
        for name, logs in zip(against.QUANTITIES, (jax, pytorch, jax - pytorch), strict=True)
        for before, after in zip(*logs, strict=True)
    ]
    return [change.verdict for change in against.corrected(found)]  # type: ignore[arg-type]  # no lines


def test_false_alarms_are_rare_over_all_points_and_quantities_together() -> None:
    """With sessions that vary so much that chance is not called equal within 3 %."""
    generator, runs = np.random.default_rng(0), 100
    alarms = sum(bool({"faster", "slower"} & set(simulated(generator, 10, 8, 1.0, 0.05))) for _ in range(runs))
    assert alarms / runs <= 0.05 + 2 * math.sqrt(0.05 * 0.95 / runs)


def test_three_percent_at_one_of_fifty_points_are_found_with_nine_sessions() -> None:
    generator, runs = np.random.default_rng(0), 100
    hits = sum(simulated(generator, 50, 9, 1.03, 0.01)[0] == "faster" for _ in range(runs))
    assert hits / runs >= 0.92 - 2 * math.sqrt(0.92 * 0.08 / runs)


def test_a_later_measurement_without_an_interval_hides_no_change(results: Results) -> None:
    """Nor does an earlier one of the same day: the last that has an interval over sessions counts."""
    old = [session([1.0 + 0.001 * hour], 2.0 * hour, pair="p", **FULL) for hour in range(3)]
    slow = [session([0.5 + 0.001 * hour], 8.0 + 2.0 * hour, pair="p", **FULL) for hour in range(3)]
    new = FULL | {"code_sha256": "d" * 64}
    fast = [session([2.0 + 0.001 * hour], 2.0 * hour, pair="p", **new) for hour in range(3)]
    single = session([1.0], 20.0, pair="p", **FULL | {"code_sha256": "e" * 64})
    before = publish(results, *old, name="before")
    changes, _ = against.changes(before, publish(results, *slow, *fast, single, name="after"))
    assert {change.quantity: round(change.factor, 1) for change in changes}["JAX"] == 0.5
    assert against.is_slower(changes)


def test_where_nothing_can_be_compared_the_title_says_so(results: Results) -> None:
    one, other = (publish(results, session([1.0], pair=name, **FULL), name=name) for name in ("one", "other"))
    assert against.table(*against.changes(one, other), "one").title == ["Against one: no point can be compared"]


def test_a_set_is_compared_with_a_folder_a_set_or_a_commit(results: Results, tmp_path: Path) -> None:
    publish(results, point(1.5))
    assert against.earlier(results, "planted", "planted").found
    assert against.earlier(results, str(results.folder / "published" / "planted"), "planted").found
    with pytest.raises(UserError, match=r"no folder with a results.csv, no published set, no commit"):
        against.earlier(results, "nothing", "planted")
    assert against.earlier(results, "HEAD", "cpu").name == "HEAD"


@pytest.mark.parametrize(("before", "after", "code"), [(1.0, 0.5, 1), (1.0, 1.0, 0), (1.0, None, 2)])
def test_the_exit_code_says_whether_something_became_slower(
    results: Results, monkeypatch: pytest.MonkeyPatch, before: float, after: float | None, code: int
) -> None:
    """Or that nothing could be compared, which is no success."""
    monkeypatch.setattr(commands.gc, "disable", lambda: None)
    for name, factor in (("before", before), ("after", after)):
        means = [(factor or 1.0) * (1 + 0.001 * hour) for hour in range(3 if factor else 1)]
        publish(results, *(session([mean], 2.0 * hour, pair="p", **FULL) for hour, mean in enumerate(means)), name=name)
    args = argparse.Namespace(name=["after"], against="before", live=False)
    assert commands.report(args, results) == code
