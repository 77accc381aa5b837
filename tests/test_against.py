"""What has changed since an earlier set: found, named, and rarely where nothing has."""

import math
import random
from pathlib import Path

import numpy as np
import pytest
from test_report import FULL, point, publish, results
from test_sessions import session

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


def test_false_alarms_are_rare_and_three_percent_are_found_with_eight_sessions() -> None:
    """Of 50 points, by simulation of what ``changes`` tests: sessions that vary by 1 %, one point that gains 3 %."""
    from duel.report import ratios

    generator, alarms, hits, runs = np.random.default_rng(0), 0, 0, 400
    for _ in range(runs):
        before, after = generator.normal(0, 0.01, (2, 50, 8))
        after[0] += math.log(1.03)
        chances = ratios.holm([against._welch(list(b), list(a))[3] for b, a in zip(before, after, strict=True)])
        hits += chances[0] < 0.05
        alarms += any(p < 0.05 for p in chances[1:])
    assert alarms / runs <= 0.05 + 2 * math.sqrt(0.05 * 0.95 / runs)
    assert hits / runs >= 0.9


def test_a_set_is_compared_with_a_folder_a_set_or_a_commit(results: Results, tmp_path: Path) -> None:
    publish(results, point(1.5))
    assert against.earlier(results, "planted", "planted").found
    assert against.earlier(results, str(results.folder / "published" / "planted"), "planted").found
    with pytest.raises(UserError, match=r"no folder with a results.csv, no published set, no commit"):
        against.earlier(results, "nothing", "planted")
    assert against.earlier(results, "HEAD", "cpu").name == "HEAD"
