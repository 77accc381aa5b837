"""A published set measured again: its points, what they take, and how the outcome is judged; and its archive."""

import dataclasses
import hashlib
import math
import random
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
from duel.job import Job
from duel.launch import reproduce
from duel.launch.schema import Cluster
from duel.report import bundle, ratios
from duel.report.figure_data import anchor
from duel.report.pairs import Outcome, outcomes
from duel.report.records import Records
from duel.results import Results, Run


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
    assert [(p.line.benchmark, p.line.devices) for p in chosen] == [
        *(("mnist", 1), ("bert", 1), ("mnist", 2))  # what runs on one of two devices is measured beside it
    ]
    assert len(chosen[0].job.rows()) == 8
    assert chosen[0].seconds == pytest.approx(8 * 19), "of the job, whatever the published sessions had"
    reproduce.show(records, chosen)
    said = capsys.readouterr().out
    assert "--benchmark mnist --use_case 1 --paired" in said
    assert "--sessions" not in said, "one session is what it runs, and what the minutes are of"
    assert "hours on planted" in said
    assert "0" * 12 in said, "the commit of each point"
    (one,) = reproduce.points(records, [anchor(chosen[1].line)], "h100")
    assert (one.line.benchmark, one.job.target) == ("bert", "h100")
    reproduce.show(records, [one])
    said = capsys.readouterr().out
    assert "--target h100" in said
    assert "--target local" not in said
    with pytest.raises(UserError, match=r"--point 'p1': not in planted; 'main\.py reproduce planted --dry_run' lists"):
        reproduce.points(records, ["p1"], None)


@pytest.mark.parametrize(
    ("ratio", "change", "verdict"),
    [
        (1.501, {}, "agrees"),
        (1.6, {}, "differs"),
        (1.4, {"device_name": "another"}, "differs (on another)"),
        (1.5, {"framework_version": "9.9"}, "agrees (with jax 9.9, pytorch 9.9)"),
        (1.5, {"code_sha256": "d" * 64}, "agrees (with other code)"),
    ],
)
def test_one_more_session_agrees_where_it_lies_in_the_prediction_interval(
    records: Records, ratio: float, change: dict[str, str], verdict: str
) -> None:
    first = reproduce.points(records, [], None)[0]
    found = reproduce.judge(first, again(ratio, **change))
    assert found.ratio == f"{ratio:.3f}"
    (word,) = reproduce.verdicts([found.p])
    assert reproduce._with_reason(word, found) == verdict


def test_p_is_five_percent_at_the_ends_of_the_prediction_interval(records: Records) -> None:
    first = reproduce.points(records, [], None)[0]
    assert first.line.another_low is not None
    assert first.line.another_high is not None
    for end in (first.line.another_low, first.line.another_high):
        assert reproduce.judge(first, again(end)).p == pytest.approx(0.05)


def test_a_perfect_reproduction_of_many_points_rarely_fails() -> None:
    """Seventeen points of three sessions each: more than half of such sets have one outside its own interval."""
    generator, runs, fails, outside = random.Random(0), 300, 0, 0
    for _ in range(runs):
        chances = []
        for _ in range(17):
            *sessions, more = (generator.gauss(0.3, 0.02) for _ in range(4))
            found = ratios.ratio([[ratios.Pair(log, True)] for log in sessions])
            assert found.another is not None
            chances.append(ratios.chance_of_another(math.exp(more), found.ratio, found.another, 3))
        said = reproduce.verdicts(chances)
        fails += "differs" in said
        outside += said != ["agrees"] * 17
    assert fails / runs <= 0.05 + 2 * math.sqrt(0.05 * 0.95 / runs)
    assert outside / runs > 0.5


def test_what_differs_for_its_point_alone_is_marked() -> None:
    assert reproduce.verdicts([0.02, None, 0.5, 0.04]) == ["differs*", "no statement", "agrees", "differs*"]
    assert reproduce.verdicts([0.002, None, 0.5, 0.04]) == ["differs", "no statement", "agrees", "differs*"]


def test_each_job_runs_once_and_the_exit_code_is_of_all_points(
    records: Records, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Points that were kept apart are measured by one job."""
    first, *_ = reproduce.points(records, [], None)
    rows = judged(session([1.6] * 4, 20.0, **FULL))
    asked: list[Job] = []

    def launch(jobs: list[Job], cluster: Cluster, results: Results, say: object) -> list[Run]:
        asked.extend(jobs)
        return [Run(Path(str(rows[0].run_id)))]

    monkeypatch.setattr(reproduce.submit, "launch", launch)
    monkeypatch.setattr(reproduce.manage, "wait", lambda runs, results: None)
    monkeypatch.setattr(reproduce, "merge", lambda results: rows)
    here: Any = (None, None, print)
    assert reproduce.reproduce([first, first], *here) == 1
    assert asked == [first.job]
    assert "2 differs" in capsys.readouterr().out
    rows = judged(session([1.5] * 4, 20.0, **FULL))
    assert reproduce.reproduce([first], *here) == 0
    assert "chance alone: about 0.1 of 1 outside" in capsys.readouterr().out
    rows = judged([dataclasses.replace(row, restarts=1) for row in rows])
    assert reproduce.reproduce([first], *here) == 2, "no point allows a statement"


def test_nothing_is_stated_without_sessions_or_without_a_ratio(records: Records) -> None:
    chosen = reproduce.points(records, [], None)
    assert reproduce.judge(chosen[1], again(1.1)).why == "it was published from too few sessions"
    assert reproduce.judge(chosen[0], None) == reproduce.Judged(why="nothing was measured")
    (barred,) = outcomes(judged([dataclasses.replace(row, restarts=1) for row in session([1.5] * 2, 20.0, **FULL)]))
    assert reproduce.judge(chosen[0], barred).why.startswith("NOT COMPARABLE: restarts")


def test_a_published_time_that_cannot_be_read_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = point(1.5)
    rows[0] = rows[0].replace(started="yesterday")
    (again,) = reproduce.points(publish(Results(tmp_path), rows), [], None)
    assert again.seconds == pytest.approx(11 * 19 / 6 * 4)
    assert f"{rows[0].run_id}, row 0: damaged: " in capsys.readouterr().err


def test_a_benchmark_that_this_version_lacks_is_named(tmp_path: Path) -> None:
    newer = publish(Results(tmp_path), point(1.5, benchmark="mlp"))
    with pytest.raises(UserError, match=r"planted: this version has no benchmark 'mlp'; valid: resnet50, "):
        reproduce.points(newer, [], None)


def test_a_set_without_ratios_says_so(tmp_path: Path) -> None:
    young = publish(Results(tmp_path), point(1.5, 1, 1))
    with pytest.raises(UserError, match=r"no point of planted has a ratio yet"):
        reproduce.points(young, [], None)


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
    assert {line.split("  ", 1)[1] for line in sums} == names - {"SHA256SUMS"}
    with pytest.raises(UserError, match=r"commit 000000000000.*is not in this clone"):
        bundle.write(records, tmp_path / "bundles", print)
    kept = tmp_path / "kept"
    kept.write_text("kept")
    received = [dataclasses.replace(row, git_sha=f"--output={kept}") for row in records.rows]
    with pytest.raises(UserError, match="is not in this clone"):
        bundle.write(dataclasses.replace(records, rows=received), tmp_path / "bundles", print)
    assert kept.read_text() == "kept"
