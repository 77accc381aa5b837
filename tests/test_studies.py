"""Studies: which points a file names, what of them is done by records alone, and what the rest takes."""

import dataclasses
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT
from test_comparability import judged
from test_report import point as planted

from duel import certificate
from duel.catalogue import PAIRED, PRESETS
from duel.errors import UserError
from duel.job import Job
from duel.launch import (
    campaign,
    cluster,
    directives,
    estimate,
    local,
    progress,
    reasons,
    resubmit,
    state,
    study,
)
from duel.launch.estimate import Known
from duel.launch.progress import DONE, MISSING, NEVER, WAITING, Progress
from duel.launch.schema import Cluster, Target
from duel.launch.study import Study
from duel.record import Row
from duel.results import Results
from duel.states import FAILED
from duel.status import LaunchRecord, this_process
from duel.table import write_rows

CLUSTER = cluster.load(ROOT / "cluster.yaml")
SMALL = "about: one point\npoints:\n  - {benchmark: mnist, use_case: 1, sessions: 2}\n"


@pytest.fixture
def results(tmp_path: Path) -> Results:
    found = Results(tmp_path / "results")
    (found.folder / "runs").mkdir(parents=True)
    return found


def loaded(results: Results, text: str, described: Cluster = CLUSTER) -> Study:
    file = results.folder.parent / "mine.yaml"
    file.write_text(text)
    return study.load(file, described, results)


def job(**change: Any) -> Job:
    return dataclasses.replace(Job(PAIRED, "mnist", 1, "standard", "fp32", None, "local"), **change)


def rows(sessions: int, ratio: float = 1.5, pairs: int = 4, **change: Any) -> list[Row]:
    code = certificate.code_sha256("mnist", "full")
    names = {"code_sha256": code, "preset": "standard", "precision": "fp32", "size": "full", "benchmark": "mnist"}
    names |= {"use_case": 1, "product": None, "batch_size": 64}
    return judged(planted(ratio, sessions, pairs, **names | change))


def publish(results: Results, measured: list[Row]) -> None:
    folder = results.folder / "published" / "mine"
    folder.mkdir(parents=True, exist_ok=True)
    write_rows(folder / "results.csv", measured)


@pytest.mark.parametrize("name", [file.stem for file in sorted((ROOT / "studies").glob("*.yaml"))])
def test_every_shipped_study_can_be_planned(name: str, results: Results) -> None:
    found = study.load(study.path(ROOT / "studies", name), CLUSTER, results)
    assert len(set(found.points)) == len(found.points)
    assert campaign.planned(progress.of(found, results), CLUSTER, Known([]))


def test_the_earlier_study_has_eight_cells_and_four_more_on_tpus(results: Results) -> None:
    primary = study.load(ROOT / "studies" / "primary.yaml", CLUSTER, results)
    cells = {(p.benchmark, p.target, side) for p in primary.points for side in p.frameworks}
    assert len(cells) == 8
    both = CLUSTER.targets["tpu"].model_copy(update={"python": CLUSTER.targets["cpu"].python})
    with_torch_xla = CLUSTER.model_copy(update={"targets": CLUSTER.targets | {"tpu": both}})
    tpu = study.load(ROOT / "studies" / "tpu.yaml", with_torch_xla, results)
    assert {(p.benchmark, p.framework) for p in tpu.points} == {
        (benchmark, side) for benchmark in ("resnet50", "vit_b16") for side in ("jax", "pytorch")
    }


def test_options_are_combined_and_points_left_out(results: Results) -> None:
    found = loaded(
        results,
        "about: some\npoints:\n  - benchmark: [mnist, gnn]\n    use_case: [1, inference]\n    batch_sizes: [1, 8]\n"
        "    precision: [fp32, bf16]\n    paired: false\n    framework: pytorch\n"
        "without:\n  - {benchmark: graphnet, precision: bf16}\n  - {use_case: 5, batch_sizes: 8}\n",
    )
    named = [(p.benchmark, p.use_case, p.precision, p.batch_sizes, p.framework) for p in found.points]
    assert len(set(named)) == len(named) == 9
    assert ("graphnet", 1, "bf16", (1,), "pytorch") not in named
    assert ("mnist", 5, "bf16", (1,), "pytorch") in named
    assert not any(p.use_case == 5 and p.batch_sizes == (8,) for p in found.points)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("points:\n  - {use_case: 1}", "mine.yaml:3:5: points.0.benchmark: this key is missing"),
        ("points:\n  - {benchmark: mnst, use_case: 1}", "points.0.benchmark: unknown benchmark 'mnst'; did you mean"),
        ("points:\n  - {benchmark: mnist, use_case: 9}", "points.0.use_case: unknown use case '9'"),
        ("points:\n  - {benchmark: mnist, use_case: 3, products: []}", "points.0.products: at least one value is"),
        ("points:\n  - {benchmark: mnist, use_case: 1, batchsize: 3}", "points.0.batchsize: unknown key; valid: bench"),
        (
            "points:\n  - {benchmark: mnist, use_case: 1, target: moon}",
            "points.0: unknown target 'moon'; valid in clus",
        ),
        ("points:\n  - {benchmark: mnist, use_case: 2, target: h100}", "points.0: use cases 2 and 4 need at least 2"),
        (
            "points:\n  - {benchmark: mnist, use_case: 2, target: h100, devices: 16}",
            "mine.yaml:3:5: points.0: target 'h100' has at most",
        ),
        (
            "points:\n  - {benchmark: mnist, use_case: 1, target: tpu}",
            "points.0: target 'tpu' has no interpreter for pytorch: give 'framework' and 'paired: false'",
        ),
        ("points:\n  - {benchmark: mnist, use_case: 1, devices: 2}", "points.0: devices and nodes are for use cases 2"),
        (
            "points:\n  - {benchmark: mnist, use_case: 1, products: norms}",
            "points.0: products is for use cases 3",
        ),
        ("points:\n  - {benchmark: mnist, use_case: 1, scaling: strong}", "points.0: scaling is for use cases 2"),
        ("points:\n  - {benchmark: mnist, use_case: 0}", "points.0: use case 0 is a proof"),
        ("points:\n  - {benchmark: mnist, use_case: 1, framework: jax}", "it needs 'paired: false'"),
        ("points:\n  - {benchmark: mnist, use_case: 1, paired: false, sessions: 3}", "sessions need 'paired: true'"),
        ("points: []", "points: nothing is left to measure"),
        ("points:\n  - {benchmark: mnist, use_case: 1}\nwithout:\n  - {use_case: 5}", "without.0: no point has these"),
        (
            "points:\n  - {benchmark: mnist, use_case: 1}\nversion: 2",
            "version: unknown key; valid: about, points, with",
        ),
    ],
)
def test_what_is_wrong_in_a_study_is_named_with_its_place(results: Results, change: str, said: str) -> None:
    with pytest.raises(UserError) as caught:
        loaded(results, f"about: x\n{change}\n")
    assert said in str(caught.value)


def test_an_unknown_study_is_named_with_those_there_are() -> None:
    for name in ("moon", "../cluster", ""):
        with pytest.raises(UserError, match=r"unknown study .* valid: cpu, laptop, primary, tpu"):
            study.path(ROOT / "studies", name)


def test_sessions_that_are_left_stay_apart_however_long_ago_the_first_was(results: Results) -> None:
    mine = loaded(results, SMALL.replace("sessions: 2", "sessions: 4, spacing: 2h"))
    publish(results, rows(1))  # days ago
    assert [one.point.delay for one in progress.of(mine, results)[1:]] == [0, 7200, 14400]
    now = datetime.now(UTC)
    recent = [row.replace(ended=(now - timedelta(minutes=30)).isoformat()) for row in rows(1)]
    publish(results, recent)
    delays = [one.point.delay for one in progress.of(mine, results)[1:]]
    assert delays == [pytest.approx(5400 + 7200 * number, abs=60) for number in range(3)]


@pytest.mark.parametrize("pairs", [1, 2])
def test_sessions_too_few_for_an_interval_are_still_counted(results: Results, pairs: int) -> None:
    mine = loaded(results, SMALL.replace("sessions: 2", "sessions: 4"))
    for measured in range(1, 5):
        publish(results, rows(measured, pairs=pairs))
        states = [one.state for one in progress.of(mine, results)]
        assert states == [DONE] * measured + [MISSING] * (4 - measured)


def test_sessions_that_died_are_sent_again_apart(results: Results, monkeypatch: pytest.MonkeyPatch) -> None:
    mine = loaded(results, SMALL.replace("sessions: 2", "sessions: 3, spacing: 2h"))
    for point in mine.points:
        run = results.run(point.run_id())
        record = LaunchRecord(job=point, pair=run.id)
        run.create(point.rows(), script="exit 0\n", launch=record, owner=this_process(), target="local")
        run.settle(state=FAILED, cause="its node went down", why=reasons.INFRASTRUCTURE)
    points = progress.of(mine, results)
    assert {one.state for one in points} == {MISSING}
    sent: list[int] = []
    monkeypatch.setattr(resubmit, "start", lambda again, *_: sent.extend(one.job.delay for one in again))
    again = campaign.unfinished(points, CLUSTER, Known([]), results, print)
    campaign.submit_all(again, CLUSTER, results, print)
    assert sent == [0, 7200, 14400]
    assert campaign.within(again, again[0].device_hours * 1.01) == again[:1], "a budget is for these, too"
    look = state.look(results).runs
    apart = resubmit.apart(resubmit.decide(look[1:], look, set(), None))
    assert [one.job and one.job.delay for one in apart] == [0, 7200]


def test_what_a_target_forbids_is_not_asked_for_in_a_second_attempt(results: Results) -> None:
    (point, _) = loaded(results, SMALL).points
    run = results.run(point.run_id())
    launch = LaunchRecord(job=point, pair=run.id)
    script = "#!/bin/bash\n#SBATCH --time=02:00:00\n"
    run.create(point.rows(), owner=this_process(), target="local", launch=launch, script=script)
    run.settle(state=FAILED, cause="Slurm: reached its time limit", why=reasons.TIME_LIMIT)
    points = progress.of(loaded(results, SMALL), results)
    (again,) = campaign.unfinished(points, CLUSTER, Known([]), results, print)
    assert again.job.changes == ("--time=04:00:00",)
    shut = CLUSTER.targets["local"].model_copy(update={"without": ["--time"]})
    described = CLUSTER.model_copy(update={"targets": CLUSTER.targets | {"local": shut}})
    said: list[str] = []
    assert campaign.unfinished(points, described, Known([]), results, said.append) == []
    assert "not started: its target forbids --time" in said[0]


def test_here_what_may_begin_earlier_does_not_wait_for_a_later_session(results: Results) -> None:
    runs = []
    for benchmark, delay in (("mnist", 0), ("mnist", 2), ("cifar10", 0)):
        planned = job(benchmark=benchmark, preset="smoke", session=delay + 1, delay=delay)
        run = results.run(planned.run_id())
        record = LaunchRecord(job=planned, pair=run.id)
        run.create(planned.rows(), script="exit 3\n", launch=record, owner=this_process(), target="local")
        runs.append(run)
    local.work(runs, results)
    ended = [run.stored_status().updated for run in runs]
    assert ended[0] <= ended[2] < ended[1]


def test_what_is_measured_is_done_by_whatever_command(results: Results) -> None:
    mine = loaded(results, SMALL)
    assert [one.state for one in progress.of(mine, results)] == [MISSING, MISSING]
    publish(results, rows(1))
    first, second = progress.of(mine, results)
    assert (first.state, second.state, second.why) == (DONE, MISSING, NEVER)
    assert second.point.delay == 0, "the first session was days ago"
    publish(results, rows(2))
    assert [one.state for one in progress.of(mine, results)] == [DONE, DONE]
    for change in ({"code_sha256": "0" * 64}, {"mode": "tuned"}, {"target": "h100"}, {"precision": "bf16"}):
        publish(results, rows(2, **change))
        assert [one.state for one in progress.of(mine, results)] == [MISSING, MISSING], change


def test_a_point_that_waits_or_failed_is_not_started_again(results: Results) -> None:
    mine = loaded(results, SMALL)
    first, second = mine.points
    for number, point in enumerate((first, second)):
        run = results.run(point.run_id())
        launch = LaunchRecord(job=point, pair="g")
        script = "#!/bin/bash\n#SBATCH --time=02:00:00\n"
        run.create(point.rows(), owner=this_process(), target="local", launch=launch, script=script)
        if number:
            run.write_status(started="2026-11-25T10:00:00Z")
            run.settle(state="failed", cause="Slurm: reached its time limit", why="time limit")
    waits, failed = progress.of(mine, results)
    assert (waits.state, waits.why) == (WAITING, "queued")
    assert (failed.state, failed.why) == (MISSING, "Slurm: reached its time limit")
    assert campaign.planned([waits, failed], CLUSTER, Known([])) == []
    failed_run = results.run(failed.run_id)
    failed_run.write_status(ended="2026-11-25T10:30:00Z")
    shown = campaign.status(mine, [waits, failed], results)
    assert shown.notes == ["local: 1 runs asked for 2.0 h and used 0.5 h"]
    assert shown.title == ["mine: 2 points, 1 waiting or running, 1 missing"]
    assert [line[2] for line in shown.lines] == ["queued", "Slurm: reached its time limit"]


def test_the_time_of_a_row_is_the_best_that_is_known() -> None:
    mine, here = job(), rows(1, target="local", device_kind="cpu", matmul_flops_per_second=1e12)
    assert Known(here).job(mine) == estimate.Estimate(8 * 19.0, estimate.MEASURED)
    assert Known(here).job(dataclasses.replace(mine, mode="tuned")).source == estimate.SIMILAR
    slow = [dataclasses.replace(row, target="there", ended=f"{str(row.started)[:-3]}59Z") for row in here]
    scaled = Known(slow).job(mine)
    assert scaled.source == estimate.ELSEWHERE, "no ceiling of this device is known"
    ceiling = [dataclasses.replace(row, benchmark="gcn", matmul_flops_per_second=2e12) for row in here]
    faster = Known(slow + ceiling).job(mine)
    assert faster.source == estimate.SCALED
    assert faster.seconds < scaled.seconds
    least = Known([]).job(mine)
    assert least.source == estimate.LEAST
    assert least.seconds >= 8 * 15
    assert Known([]).job(dataclasses.replace(mine, preset="publication")).seconds > least.seconds


def test_a_job_is_cut_to_the_limit_of_its_target_and_asks_for_no_more_than_it_needs() -> None:
    target = Target.model_validate(
        {
            "scheduler": "slurm",
            "python": {"jax": "python", "pytorch": "python"},
            "directives": ["--time=00:15:00"],
            "devices_per_node": 4,
        }
    )
    described = CLUSTER.model_copy(update={"targets": {"short": target}})
    whole, sizes = job(use_case=5, target="short"), PRESETS["standard"].batch_sizes
    found = [Progress(point, MISSING, NEVER) for point in whole.points]
    unknown = campaign.planned(found, described, Known([]))
    assert {one.job.changes for one in unknown} == {()}, "the least is no limit: the target's own stays"
    assert f"of {len(unknown)} scripts that is the least" in campaign.table(unknown, "mine").notes[-1]
    known = Known([row for size in sizes for row in rows(1, target="short", use_case=5, batch_size=size)])
    planned = campaign.planned(found, described, known)
    assert [size for one in planned for size in one.job.batch_sizes] == list(sizes)
    assert len(planned) > 1
    for one in planned:
        asked = directives.minutes(directives.value(one.job.changes, "--time") or "")
        assert asked is not None
        assert one.estimate.seconds / 60 < asked <= 15
        assert one.devices == 4
    (short,) = campaign.planned(found[:1], described, known)
    assert directives.value(short.job.changes, "--time") == "00:10:00", "what two jobs ask for differs by ten minutes"
    least = target.model_copy(update={"directives": ["--time=00:15:00", "--time-min=00:12:00"]})
    (longer,) = campaign.planned(found[:1], CLUSTER.model_copy(update={"targets": {"short": least}}), known)
    assert directives.value(longer.job.changes, "--time") == "00:12:00"
    slow = [
        row.replace(ended=str(row.started).replace(":00:00Z", ":30:00Z")) for row in rows(1, target="short", use_case=5)
    ]
    assert "1 scripts take longer than their target's limit: 'resume' goes on with the rows left" in (
        campaign.table(campaign.planned(found[:1], described, Known(slow)), "mine").notes
    )
    free = target.model_copy(update={"without": ["--time"]})
    (plain,) = campaign.planned(found[:1], CLUSTER.model_copy(update={"targets": {"short": free}}), known)
    assert plain.job.changes == ()


def test_a_budget_is_kept_and_one_below_the_smallest_job_is_refused() -> None:
    found = [Progress(point, MISSING, NEVER) for case in (1, 3) for point in job(use_case=case).points]
    planned = campaign.planned(found, CLUSTER, Known([]))
    hours = [one.device_hours for one in planned]
    kept = campaign.within(planned, hours[0] * 1.01)
    assert sum(one.device_hours for one in kept) <= hours[0] * 1.01
    assert kept == planned[:1]
    assert campaign.within(planned, None) == planned
    with pytest.raises(UserError, match=r"--budget 0.001h: the smallest job may take 0\.0\d+ device-hours"):
        campaign.within(planned, 0.001)
    assert f"{sum(hours):.1f} device-hours" in campaign.table(planned, "mine").notes[0]


@pytest.mark.parametrize("points", [[], [0], [0, 1], [0, 1, 2, 3], [0, 3], [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11]])
def test_jobs_measure_exactly_the_points_that_they_are_made_of(points: list[int]) -> None:
    every = [p for size in (1, 8, 32, 64) for p in job(use_case=3, batch_sizes=(size,)).points]
    chosen = [every[number] for number in points]
    made = study.grouped(chosen)
    assert sorted(str(p) for one in made for p in one.points) == sorted(map(str, chosen))
