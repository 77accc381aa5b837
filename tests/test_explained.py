"""Which pairs an explanation is of, and when nothing is concluded from them."""

from pathlib import Path

import pytest
from test_comparability import judged
from test_explain import explained, side
from test_sessions import session

from duel import kinds, profile
from duel.profile import Part, Profile
from duel.record import Row
from duel.report import compare, explain, points, profile_data, shares
from duel.report.pairs import Outcome, outcomes
from duel.report.records import Records
from duel.report.shares import Explained
from duel.results import Results


def test_a_row_whose_profile_is_damaged_or_not_there_is_named_and_the_others_are_explained(tmp_path: Path) -> None:
    (tmp_path / "runs" / "run").mkdir(parents=True)
    pairs: list[tuple[Row, Row]] = []
    for number in (0, 2, 4, 6):
        pair = explained("default", ("", ""), {kinds.PRODUCT: 1.0}, {kinds.PRODUCT: 2.0}).pairs[0]
        for offset, (_, found) in enumerate(pair):
            found.row = number + offset
            profile.write(tmp_path / "runs" / "run", found)
        jax, pytorch = (row.replace(run_id="run", row=number + offset) for offset, (row, _) in enumerate(pair))
        pairs.append((jax, pytorch))
    files = [profile.path(tmp_path / "runs" / "run", number) for number in range(8)]
    files[2].write_text(files[2].read_text()[:100])
    files[5].unlink()
    for never in files[6:]:
        never.unlink()
    whole = shares.explained(Outcome([pairs]), tmp_path)
    assert [pair[0][0].row for pair in whole.pairs] == [0]
    damaged, absent = whole.missing
    assert damaged.startswith("run, row 2, jax: no profile: ")
    assert "002.json" in damaged
    assert absent == "run, row 5, pytorch: no profile: there is no file"


def test_all_sessions_of_a_point_are_explained_together_and_one_without_profiles_is_no_reason_not_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first session was not profiled, the other two were; the report takes the same pairs."""
    results, every = Results(tmp_path), []
    for number in range(3):
        rows = session([1.5] * 4, 2.0 * number)
        for row in rows[:2] if number else []:
            parts = [Part(kinds.PRODUCT, "fc1", "", 1.0)]
            found = Profile(str(row.run_id), row.row or 0, str(row.framework), parts=parts)
            found.step_seconds = found.traced_seconds = row.step_seconds_p50 or 0.0
            (tmp_path / "runs" / found.run_id).mkdir(parents=True, exist_ok=True)
            profile.write(tmp_path / "runs" / found.run_id, found)
        every.append(compare.Group([], rows, [], outcomes(judged(rows))))
    monkeypatch.setattr(compare, "groups", lambda runs, results: every)
    (one,) = explain._explained([], results)
    assert len(one.outcome.pairs) == 12
    assert [pair[0][0].run_id for pair in one.pairs] == [group.rows[0].run_id for group in every[1:]]
    merged = Records("", tmp_path, [], [(one.outcome, line) for line in points.lines([one.outcome])])
    ((same, _),) = profile_data.profiled(merged)
    assert same.pairs == one.pairs


def test_pairs_of_a_session_count_once_in_a_shares_interval() -> None:
    """Nine pairs in three sessions, alike within each: three numbers, not nine."""
    sides = [[(side("jax", 2.0, idle=2.0), side("pytorch", s, idle=s)) for _ in range(3)] for s in (2.0, 3.0, 4.0)]
    outcome = Outcome([[(jax[0], pytorch[0]) for jax, pytorch in session] for session in sides])
    pairs = [pair for session in sides for pair in session]
    (share,) = Explained(outcome, pairs, []).divided(lambda part: part.kind)
    (once,) = Explained(Outcome([]), [session[0] for session in sides], []).divided(lambda part: part.kind)
    assert share.factor is not None
    assert once.factor is not None
    assert (share.factor.low, share.factor.high) == pytest.approx((once.factor.low, once.factor.high))


@pytest.mark.parametrize(("idle", "said"), [(0.05, ""), (0.5, "without them 33% of its step is idle")])
def test_of_a_replayed_graph_nothing_is_concluded_where_the_trace_is_mostly_gaps(idle: float, said: str) -> None:
    parts = {kinds.CONVOLUTION: 1.0, kinds.IDLE: idle}
    one = explained("default", ("command_buffers=on", ""), parts, parts)
    for _, found in one.pairs[0]:
        found.traced_seconds = sum(parts.values())
    assert not one.why
    (jax, pytorch) = ((row.replace(device_kind="gpu"), found) for row, found in one.pairs[0])
    why = Explained(one.outcome, [(jax, pytorch)], []).why
    assert (why != "") == (said != "")
    assert said in why
