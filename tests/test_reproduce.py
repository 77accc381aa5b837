"""A published set measured again: its points, what they take, and how the outcome is judged; and its archive."""

import dataclasses
import hashlib
import subprocess
import zipfile
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT
from test_comparability import judged
from test_report import FULL, point, publish
from test_sessions import session

from duel.errors import UserError
from duel.launch import reproduce
from duel.report import bundle
from duel.report.figure_data import anchor
from duel.report.pairs import Outcome, outcomes
from duel.report.records import Records
from duel.results import Results


@pytest.fixture
def records(tmp_path: Path) -> Records:
    results = Results(tmp_path / "results")
    (results.folder / "runs").mkdir(parents=True)
    many = [*point(1.2, use_case=2, device_count=2, scaling="weak", pair="two")]
    many += point(1.0, use_case=2, device_count=1, scaling="weak", pair="one of two")
    return publish(results, point(1.5), point(1.1, 2, 4, benchmark="bert", pair="b", batch_size=2), many)


def again(ratio: float, **change: Any) -> Outcome:
    """One more session."""
    (found,) = outcomes(judged(session([ratio, ratio], 20.0, **FULL | change)))
    return found


def test_each_point_with_a_ratio_is_listed_with_its_command(
    records: Records, capsys: pytest.CaptureFixture[str]
) -> None:
    chosen = reproduce.points(records, [], None)
    assert [(p.line.benchmark, p.line.devices, p.job.pairs) for p in chosen] == [
        *(("mnist", 1, 2), ("bert", 1, 4), ("mnist", 2, 2))  # what runs on one of two devices is measured beside it
    ]
    assert chosen[0].seconds == pytest.approx(2 * 2 * 19)
    reproduce.show(records, chosen)
    said = capsys.readouterr().out
    assert "--benchmark mnist --use_case 1 --paired" in said
    assert "--sessions 3" in said
    assert "hours on planted" in said
    (one,) = reproduce.points(records, [anchor(chosen[1].line)], "h100")
    assert (one.line.benchmark, one.job.target) == ("bert", "h100")
    with pytest.raises(UserError, match=r"--point 'p1': not in planted; 'main\.py reproduce planted --dry_run' lists"):
        reproduce.points(records, ["p1"], None)


@pytest.mark.parametrize(
    ("ratio", "change", "verdict"),
    [
        (1.501, {}, "agrees"),
        (1.6, {}, "differs"),
        (1.4, {"device_name": "another"}, "differs (on another)"),
    ],
)
def test_one_more_session_agrees_where_it_lies_in_the_prediction_interval(
    records: Records, ratio: float, change: dict[str, str], verdict: str
) -> None:
    first = reproduce.points(records, [], None)[0]
    assert reproduce.judge(first, again(ratio, **change)) == (f"{ratio:.3f}", verdict)


def test_nothing_is_stated_without_sessions_or_without_a_ratio(records: Records) -> None:
    chosen = reproduce.points(records, [], None)
    assert reproduce.judge(chosen[1], again(1.1))[1] == "no statement: it was published from too few sessions"
    assert reproduce.judge(chosen[0], None) == ("", "no statement: nothing was measured")
    (barred,) = outcomes(judged([dataclasses.replace(row, restarts=1) for row in session([1.5] * 2, 20.0, **FULL)]))
    assert reproduce.judge(chosen[0], barred)[1].startswith("no statement: NOT COMPARABLE: restarts")


def test_an_archive_has_everything_with_checksums(records: Records, tmp_path: Path) -> None:
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True)
    rows = [dataclasses.replace(row, git_sha=head.stdout.strip()) for row in records.rows]
    whole = dataclasses.replace(records, rows=rows)
    path = bundle.write(whole, tmp_path / "bundles", print)
    with zipfile.ZipFile(path) as archive:
        names = {name.removeprefix("duel-planted/") for name in archive.namelist()}
        sums = archive.read("duel-planted/SHA256SUMS").decode().splitlines()
        for line in sums:
            digest, name = line.split("  ")
            assert hashlib.sha256(archive.read(f"duel-planted/{name}")).hexdigest() == digest
    assert {"CITATION.cff", "LICENSE", "planted/results.csv", "planted/report/index.html"} <= names
    assert any(name.startswith("code-") for name in names)
    with pytest.raises(UserError, match=r"commit 000000000000.*is not in this clone"):
        bundle.write(records, tmp_path / "bundles", print)
    kept = tmp_path / "kept"
    kept.write_text("kept")
    received = [dataclasses.replace(row, git_sha=f"--output={kept}") for row in records.rows]
    with pytest.raises(UserError, match="is not in this clone"):
        bundle.write(dataclasses.replace(records, rows=received), tmp_path / "bundles", print)
    assert kept.read_text() == "kept"
