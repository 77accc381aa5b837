"""Where the sessions of a study's point stand: as many are missing as the records lack, and each is started somehow."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from test_comparability import judged
from test_sessions import session
from test_studies import CLUSTER, job, loaded, publish, rows

from duel.catalogue import PRESETS
from duel.cli import commands
from duel.errors import UserError
from duel.launch import campaign, directives, preflight, progress, reasons, submit
from duel.launch.estimate import Known
from duel.launch.progress import DONE, MISSING, NEVER, NOT_COMPARABLE, OTHER_CODE, SAME_SESSION, Progress
from duel.launch.schema import Target
from duel.launch.study import Study
from duel.record import Row
from duel.report import document
from duel.results import Results, Run
from duel.states import FAILED, FINISHED
from duel.status import LaunchRecord, this_process

THREE = "about: one point\npoints:\n  - {benchmark: mnist, use_case: 1, sessions: 3}\n"


@pytest.fixture
def results(tmp_path: Path) -> Results:
    found = Results(tmp_path / "results")
    (found.folder / "runs").mkdir(parents=True)
    return found


@pytest.fixture
def mine(results: Results) -> Study:
    return loaded(results, THREE)


def ran(results: Results, number: int, mine: Study, state: str = FINISHED, **status: Any) -> Run:
    """A run of session ``number``, whose rows are those that ``measured`` has."""
    point = mine.points[number - 1]
    run = results.run(point.run_id())
    script = "#!/bin/bash\n#SBATCH --time=01:00:00\n"
    launch = LaunchRecord(job=point, pair=run.id)
    run.create([], script=script, launch=launch, owner=this_process(), target=point.target)
    run.settle(state=state, **status)
    return run


def measured(runs: list[Run], hours: list[float], **change: Any) -> list[Row]:
    """Rows of each of ``runs``, begun at such an hour."""
    names = {name: getattr(rows(1)[0], name) for name in SAME} | change
    found = [session([1.5] * 2, hour, run_id=run.id, **names) for run, hour in zip(runs, hours, strict=True)]
    return judged([row for each in found for row in each])


SAME = ("code_sha256", "preset", "precision", "size", "benchmark", "use_case", "batch_size", "target", "nodes", "mode")
SAME += ("weights", "device_kind", "device_name", "device_count", "cpus")


def states(mine: Study, results: Results) -> list[tuple[str, str]]:
    return [(one.state, one.why) for one in progress.of(mine, results)]


def started(mine: Study, results: Results, **options: Any) -> list[tuple[int, int]]:
    """The session and the delay of each job that 'submit' would start."""
    planned = campaign.planned(progress.of(mine, results), CLUSTER, Known([]), **options)
    return [(one.job.session, one.job.delay) for one in planned]


def test_a_session_that_died_is_the_missing_one_although_later_ones_finished(
    results: Results,
    mine: Study,
) -> None:
    died = ran(results, 1, mine, FAILED, cause="its node went down", why=reasons.INFRASTRUCTURE)
    publish(results, measured([ran(results, number, mine) for number in (2, 3)], [2.0, 4.0]))
    assert states(mine, results) == [(MISSING, "its node went down"), (DONE, ""), (DONE, "")]
    assert started(mine, results) == []
    (again,) = campaign.unfinished(progress.of(mine, results), CLUSTER, Known([]), results, print)
    assert again.again is not None
    assert again.again.seen.id == died.id


def test_sessions_that_ran_back_to_back_are_one_and_the_others_are_measured_anew(
    results: Results,
    mine: Study,
) -> None:
    runs = [ran(results, number, mine) for number in (1, 2, 3)]
    publish(results, measured(runs, [0.0, 0.1, 0.2]))
    assert states(mine, results) == [(DONE, ""), (MISSING, SAME_SESSION), (MISSING, SAME_SESSION)]
    assert started(mine, results) == [(2, 0), (3, 7200)], "the last one ended days ago"
    later = ran(results, 2, mine)
    publish(results, measured([*runs, later], [0.0, 0.1, 0.2, 4.0]))
    assert states(mine, results) == [(DONE, ""), (DONE, ""), (MISSING, SAME_SESSION)]
    assert {run.id for run in (*runs, later)} == progress.of(mine, results)[0].counted


def test_what_other_code_measured_is_measured_anew(results: Results, mine: Study) -> None:
    runs = [ran(results, number, mine) for number in (1, 2, 3)]
    publish(results, measured(runs, [0.0, 2.0, 4.0], code_sha256="0" * 64))
    assert states(mine, results) == [(MISSING, OTHER_CODE)] * 3
    assert started(mine, results) == [(1, 0), (2, 7200), (3, 14400)]
    versions = measured(runs[:2], [0.0, 2.0], framework_version="1") + measured(runs[2:], [4.0], framework_version="2")
    publish(results, versions)
    assert sorted(states(mine, results)) == [(DONE, ""), *[(MISSING, OTHER_CODE)] * 2]


def test_what_is_not_comparable_is_measured_again_only_if_asked_for(results: Results, mine: Study) -> None:
    runs = [ran(results, number, mine) for number in (1, 2, 3)]
    found = measured(runs, [0.0, 2.0, 4.0])
    bad = [dataclasses.replace(row, comparable="not comparable: parity") for row in found if row.run_id == runs[0].id]
    publish(results, bad + [row for row in found if row.run_id != runs[0].id])
    assert states(mine, results) == [(MISSING, NOT_COMPARABLE), (DONE, ""), (DONE, "")]
    assert started(mine, results) == []
    assert started(mine, results, reasons=campaign.AGAIN) == [(1, 0)]


def test_a_session_of_a_smoke_preset_is_refused(results: Results) -> None:
    with pytest.raises(UserError, match=r"preset smoke would never be one ratio: .* preset standard or publication"):
        loaded(results, THREE.replace("sessions: 3", "sessions: 3, preset: smoke"))


@pytest.mark.parametrize(("scaling", "total"), [("weak", 128), ("strong", 64)])
def test_a_batch_on_each_device_is_found_in_rows_which_have_it_over_all(scaling: str, total: int) -> None:
    point = job(use_case=2, devices_per_node=2, scaling=scaling, batch_sizes=(64,))
    row = Row(benchmark="mnist", use_case=2, preset="standard", precision="fp32", mode="default", target="local")
    row = row.replace(size="full", nodes=1, device_count=2, scaling=scaling, batch_size=total, weights="seed 0")
    assert progress.is_of(point, row)
    assert not progress.is_of(point, row.replace(batch_size=192 - total))
    side = row.replace(framework="jax", status=FINISHED, started="2026-11-22T10:00:00Z", ended="2026-11-22T10:00:19Z")
    single = side.replace(device_count=1, batch_size=64)
    known = Known([each.replace(framework=name) for each in (side, single) for name in point.frameworks])
    assert known.job(point.points[0]).source == "measured here"


def test_the_report_of_a_study_has_what_plain_commands_measured(
    results: Results,
    mine: Study,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(UserError, match="nothing of study mine is measured yet"):
        commands._report_study("mine", progress.of(mine, results), results)
    plain = measured([Run(Path("paired_mnist_1-0001"))], [0.0])
    monkeypatch.setattr(progress, "merge", lambda _: plain)
    monkeypatch.setattr("duel.report.records.merge", lambda _: plain)
    written: list[Any] = []
    monkeypatch.setattr(document, "write", lambda sets, *_: written.extend(sets))
    commands._report_study("mine", progress.of(mine, results), results)
    assert [row.run_id for row in written[0].rows] == ["paired_mnist_1-0001"] * 4


SLURM = {"scheduler": "slurm", "python": {"jax": "python", "pytorch": "python"}}


@pytest.mark.parametrize(
    ("own", "partition", "asked", "next_one"),
    [
        (["--time=01:30:00"], None, "01:00:00", ("--time=01:30:00",)),
        (["--time=01:00:00"], None, "01:00:00", None),
        ([], 90.0, "01:00:00", ("--time=01:30:00",)),
        ([], 60.0, "01:00:00", None),
        ([], None, "01:00:00", ("--time=02:00:00",)),
    ],
)
def test_a_second_attempt_has_no_longer_limit_than_its_target_allows(
    results: Results,
    monkeypatch: pytest.MonkeyPatch,
    own: list[str],
    partition: float | None,
    asked: str,
    next_one: tuple[str, ...] | None,
) -> None:
    monkeypatch.setattr(preflight, "most_minutes", lambda lines: partition)
    target = Target.model_validate(SLURM | {"directives": own})
    described = CLUSTER.model_copy(update={"targets": CLUSTER.targets | {"site": target}})
    study = loaded(results, THREE.replace("sessions: 3", "target: site"), described)
    run = ran(results, 1, study, FAILED, cause="Slurm: reached its time limit", why=reasons.TIME_LIMIT)
    run.script.write_text(f"#!/bin/bash\n#SBATCH --time={asked}\n")
    said: list[str] = []
    found = campaign.unfinished(progress.of(study, results), described, Known([]), results, said.append)
    assert [one.job.changes for one in found] == ([next_one] if next_one else [])
    assert ("not started: that was the longest that target 'site' allows" in said[0]) == (next_one is None)


def test_the_longest_limit_of_a_script_is_that_of_its_partitions(monkeypatch: pytest.MonkeyPatch) -> None:
    there = [
        {"PartitionName": "a", "MaxTime": "01:00:00", "State": "UP", "Default": "YES"},
        {"PartitionName": "b", "MaxTime": "1-00:00:00", "State": "UP", "Default": "NO"},
        {"PartitionName": "c", "MaxTime": "UNLIMITED", "State": "UP", "Default": "NO"},
    ]
    monkeypatch.setattr(preflight, "_partitions", lambda: there)
    assert preflight.most_minutes([]) == 60
    assert preflight.most_minutes(["--partition=a,b"]) == 1440
    assert preflight.most_minutes(["--partition=b,c"]) is None
    assert preflight.most_minutes(["--partition=gone"]) is None


def test_an_unpaired_point_is_done_once_all_its_repeats_are(results: Results) -> None:
    text = (
        "about: x\npoints:\n  - {benchmark: mnist, use_case: 1, preset: publication, paired: false, framework: jax}\n"
    )
    study = loaded(results, text)
    run = ran(results, 1, study, FAILED, cause="Slurm: reached its time limit", why=reasons.TIME_LIMIT)
    (one,) = (row for row in rows(1, pairs=1, preset="publication", mode="default") if row.framework == "jax")
    repeats = PRESETS["publication"].repeats
    every = [one.replace(run_id=run.id, repeat=repeat, row=repeat) for repeat in range(repeats)]
    publish(results, every[:-1])
    assert states(study, results) == [(MISSING, "Slurm: reached its time limit")]
    publish(results, every)
    assert states(study, results) == [(DONE, "")]


def test_rows_from_other_weights_are_of_other_points(results: Results, mine: Study) -> None:
    row = rows(1)[0]
    assert progress.is_of(mine.points[0], row)
    assert not progress.is_of(mine.points[0], row.replace(weights="results/weights/a.safetensors"))


def test_jobs_fit_the_limit_of_their_partition_if_their_target_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    target = Target.model_validate({"scheduler": "slurm", "python": {"jax": "python", "pytorch": "python"}})
    described = CLUSTER.model_copy(update={"targets": {"free": target}})
    sizes = PRESETS["standard"].batch_sizes
    found = [Progress(point, MISSING, NEVER) for point in job(use_case=5, target="free").points]
    known = Known([row for size in sizes for row in rows(1, target="free", use_case=5, batch_size=size)])
    for most, whole in ((15.0, False), (None, True)):
        monkeypatch.setattr(preflight, "most_minutes", lambda lines, most=most: most)
        planned = campaign.planned(found, described, known)
        assert (len(planned) == 1) == whole
        asked = [directives.minutes(directives.value(one.job.changes, "--time") or "") or 0 for one in planned]
        assert max(asked) <= (most or 1e9)


def test_a_budget_counts_the_limit_of_what_nothing_is_known_of() -> None:
    keys = {"scheduler": "slurm", "python": {"jax": "python", "pytorch": "python"}, "directives": ["--time=01:00:00"]}
    described = CLUSTER.model_copy(update={"targets": {"new": Target.model_validate(keys)}})
    cases = (job(use_case=case, target="new") for case in (1, 3, 5))
    found = [Progress(point, MISSING, NEVER) for one in cases for point in one.points]
    planned = campaign.planned(found, described, Known([]))
    assert len(planned) > 2
    assert len(campaign.within(planned, 2.0)) == 2, "each may use its hour"
    with pytest.raises(UserError, match=r"the smallest job may take 1 device-hours"):
        campaign.within(planned, 0.5)


def test_a_whole_matrix_says_how_long_it_takes_and_what_cannot_end(results: Results) -> None:
    keys = {"scheduler": "slurm", "python": {"jax": "python", "pytorch": "python"}, "directives": ["--time=00:02:00"]}
    described = CLUSTER.model_copy(update={"targets": {"short": Target.model_validate(keys)}})
    jobs = [job(use_case=case, target="short") for case in (1, 5)]
    hours, long = campaign.told(jobs, described, results)
    assert hours.startswith("at least 0."), "nothing like them was measured"
    assert long.startswith("2 of 2 scripts take longer than their target's limit: 'resubmit' goes on")


def test_a_point_named_with_and_without_the_presets_size_is_one(results: Results) -> None:
    found = loaded(
        results,
        "about: some\npoints:\n  - {benchmark: [mnist, cifar10], use_case: 1}\n"
        "  - {benchmark: mnist, use_case: [1, 5], size: [tiny, full]}\n",
    )
    planned = [one.job for one in campaign.planned(progress.of(found, results), CLUSTER, Known([]))]
    launches = submit.plan(planned, CLUSTER.targets["local"])
    assert len({launch.run_id for launch in launches}) == len(launches) == 5
    with pytest.raises(UserError, match="paired_mnist_1 would be started twice by one command"):
        submit.plan([job(), job(size="full")], CLUSTER.targets["local"])


def test_a_search_takes_its_trials_and_a_training_is_not_estimated(results: Results) -> None:
    one = job(device="cpu")
    assert campaign.told([job(dataset="digits")], CLUSTER, results) == []
    hours = [
        float(text.split()[2])
        for each in (one, dataclasses.replace(one, trials=8))
        for text in campaign.told([each], CLUSTER, results)
        if text.startswith("at least")
    ]
    assert hours[1] == pytest.approx(8 * hours[0], rel=0.1)
