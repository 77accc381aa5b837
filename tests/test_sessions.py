"""The same point at several times: what is one session, what its sessions come to, and what a published set says of
records with known faults."""

import dataclasses
import itertools
import math
import re
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import ROOT, Main
from test_comparability import judged
from test_pairs import sides

from duel.job import Job
from duel.launch import cluster, local, script
from duel.record import Row
from duel.report import markdown, points, sessions
from duel.report.itself import itself
from duel.report.pairs import Outcome, outcomes
from duel.report.sessions import over_sessions
from duel.results import Results
from duel.states import CANCELLED, FINISHED, QUEUED, TERMINAL
from duel.status import LaunchRecord, this_process
from duel.table import read_rows, write_rows

NAMED = itertools.count()


def session(ratios: list[float], hour: float = 0.0, **change: Any) -> list[Row]:
    """One group of pairs, JAX so many times as fast, in the order A B B A, begun at an ``hour`` of the day."""
    number = next(NAMED)
    names: dict[str, Any] = {"group": f"g{number}", "run_id": f"paired_mnist_1-{number:04d}", "pair": "p", "row": 0}
    rows = [dataclasses.replace(row, repeats=len(ratios), **names | change) for row in sides(ratios)]
    for number, row in enumerate(rows):
        repeat, side = divmod(number, 2)
        begin = 3600 * hour + 60 * repeat + 20 * (side if repeat % 2 == 0 else 1 - side)
        rows[number] = dataclasses.replace(row, started=_time(begin), ended=_time(begin + 19), row=number)
    return rows


def _time(seconds: float) -> str:
    return f"2026-11-22T{int(seconds // 3600):02d}:{int(seconds // 60 % 60):02d}:{int(seconds % 60):02d}Z"


def found(*measured: list[Row]) -> list[Outcome]:
    return over_sessions(outcomes(judged([row for rows in measured for row in rows])))


def test_pairs_within_an_hour_on_one_host_are_one_session() -> None:
    near = [session([1.5] * 2, hour) for hour in (0.0, 0.5, 1.4)]
    (outcome,) = found(*near)
    assert [len(pairs) for pairs in outcome.sessions] == [6]
    assert outcome.reach == "within this session"
    far = [*near, session([1.5] * 2, 3.0), session([1.5] * 2, 0.2, host="node2")]
    (outcome,) = found(*far)
    assert [len(pairs) for pairs in outcome.sessions] == [6, 2, 2]
    assert outcome.reach == "over 3 sessions"


@pytest.mark.parametrize(
    ("ratios", "kind"),
    [
        ([1.0, 1.0, 1.0], "equal within 5 %"),
        ([1.02, 1.021, 1.019], "equal within 5 %"),
        ([1.5, 1.51, 1.49], "JAX is faster"),
        ([0.7, 0.71, 0.69], "PyTorch is faster"),
        ([1.5, 1.0, 0.7], "undecided"),  # three that disagree
        ([1.1, 1.3, 1.0], "undecided"),
    ],
)
def test_planted_ratios_over_three_sessions_are_reported_truly(ratios: list[float], kind: str) -> None:
    near = np.array([1.0, 1.004, 0.996, 1.0])
    (outcome,) = found(*(session(list(ratio * near), 2 * n) for n, ratio in enumerate(ratios)))
    assert (outcome.kind, outcome.reach) == (kind, "over 3 sessions")
    assert outcome.found is not None
    assert outcome.found.ratio == pytest.approx(math.prod(ratios) ** (1 / 3), rel=1e-4)


def test_a_drift_of_the_machine_cancels_in_each_quad() -> None:
    """Each process 2 % slower than the one before: to the pairs it adds and takes 2 % in turn."""
    drifting = [1.5 * 1.02, 1.5 / 1.02, 1.5 * 1.02, 1.5 / 1.02]
    (outcome,) = found(session(drifting))
    assert outcome.found is not None
    assert (outcome.found.ratio, outcome.found.low, outcome.found.high) == pytest.approx((1.5, 1.5, 1.5))


@pytest.mark.parametrize(("odd", "kind"), [(0.2, "undecided: one process far off"), (0.8, "JAX is faster")])
def test_one_process_far_off_in_one_of_three_sessions_is_named(odd: float, kind: str) -> None:
    """And leaves the verdict open, unless all sessions say the same in spite of it."""
    good = [1.5, 1.51, 1.49, 1.5]
    (outcome,) = found(session(good), session([1.5, 1.5, 1.5, odd], 2.0), session(good, 4.0))
    assert [name.partition(" of ")[0] for name in outcome.far] == ["jax at place 4"]
    assert outcome.kind == kind
    (line,) = points.lines([outcome])
    assert line.far_off == outcome.far[0]


def test_of_a_session_that_has_lost_a_pair_or_has_no_figure_nothing_is_used_and_that_is_said() -> None:
    lost = [row for row in session([1.5] * 4, 6.0) if row.repeat != 2]
    bad = session([1.5] * 4, 8.0)
    bad[3] = dataclasses.replace(bad[3], throughput=0.0)
    barred = session([1.5] * 4, 10.0, restarts=1)
    good = [session([1.5, 1.51, 1.49, 1.5], hour) for hour in (0.0, 2.0, 4.0)]
    (outcome,) = found(*good, lost, bad, barred)
    assert (outcome.kind, outcome.reach) == ("JAX is faster", "over 3 sessions")
    assert [text.partition(": ")[2] for text in outcome.apart] == [
        "pair 3 of 4 lacks a row",
        f"pytorch in {bad[3].run_id}, row 3: throughput 0.0",
        "NOT COMPARABLE: restarts (jax and pytorch: 1)",
    ]


@pytest.mark.parametrize("name", sessions.ALIKE)
def test_sessions_of_other_code_or_versions_are_kept_apart_and_said(name: str) -> None:
    good = [session([1.5] * 4, hour) for hour in (0.0, 2.0, 4.0)]
    other = session([0.5] * 4, 6.0, **{name: '{"target": {"CXX": "g++"}}' if name == "variables" else "other"})
    one, two = found(*good, other)
    assert (one.reach, two.reach) == ("over 3 sessions", "within this session")
    assert one.apart == [f"{other[0].run_id}: other {name} of jax, {name} of pytorch"]
    assert len(two.apart) == 3


def test_sessions_of_one_pair_each_are_enough_from_three_on() -> None:
    each = [session([ratio], hour) for ratio, hour in ((1.5, 0.0), (1.51, 2.0), (1.49, 4.0))]
    (outcome,) = found(*each)
    assert (outcome.kind, outcome.reach, outcome.floor) == ("JAX is faster", "over 3 sessions", None)
    (outcome,) = found(*each[:2])
    assert (outcome.found, outcome.kind) == (None, "indicative")
    assert "but 2 pairs in 2 sessions; 4 pairs in one session or 3 sessions are needed: repeat the" in outcome.why


@pytest.mark.parametrize("pairs", [2, 3])
def test_the_noise_floor_is_of_processes_of_one_session_alone(pairs: int) -> None:
    """A machine that is half as fast at another time makes no side differ from itself."""
    each = []
    for hour, scale in ((0.0, 1.0), (2.0, 0.5), (4.0, 0.9)):
        rows = session([1.1] * pairs, hour)
        each.append([dataclasses.replace(row, throughput=scale * (row.throughput or 0.0)) for row in rows])
    (outcome,) = found(*each)
    assert outcome.floor == pytest.approx(1.0)
    assert outcome.kind == "JAX is faster"


def test_a_framework_is_compared_with_itself_in_a_mode_with_the_same_switches() -> None:
    """As in 'tuned' where 'default' was the fastest: with one pair in a session there is no other way."""
    default = [session([1.5], 2.0 * hour, pair="d", mode="default") for hour in range(3)]

    def tuned(after: float) -> list[list[Row]]:
        each = [session([1.5 * (1 + 0.01 * n)], 2.0 * n + after, pair="t", mode="tuned") for n in range(3)]
        return [[row.replace(switches="x") if row.framework == "pytorch" else row for row in rows] for rows in each]

    first, second = points.lines(found(*default, *tuned(0.2)))
    newer = [[row.replace(packages_sha256="9") for row in rows] for rows in tuned(0.2)]
    for others in (newer, tuned(4.5)):  # of another environment; all after those in 'default'
        assert [line.jax_itself for line in points.lines(found(*default, *others))] == [None] * 2
    assert first.jax_itself is None
    assert first.pytorch_itself is None
    assert second.jax_itself == pytest.approx(1.01, abs=0.001), "the middle one of the three is 1 % faster"
    assert second.pytorch_itself is None, "its switches differ"
    assert second.jax_itself_low is not None
    assert second.jax_itself_low < 1.01


def test_a_framework_that_drifts_within_every_session_differs_from_itself() -> None:
    """By as much in each of three sessions: the later of two processes is a tenth slower. The other does not."""
    each = []
    for hour, jitter in ((0.0, 1.0), (2.0, 1.003), (4.0, 0.998)):
        rows = session([1.0, jitter], hour)
        slower = [row.framework == "jax" and row.repeat == 1 for row in rows]
        pairs = zip(rows, slower, strict=True)
        each.append([row.replace(throughput=(row.throughput or 0.0) / (1.1 if slow else 1.0)) for row, slow in pairs])
    (outcome,) = found(*each)
    jax, pytorch = itself(outcome.sessions)
    assert (jax.differs, jax.sessions, jax.found.ratio) == (True, 3, pytest.approx(1.1, rel=0.01))
    assert (pytorch.differs, pytorch.found.ratio) == (False, pytest.approx(1.0))
    (line,) = points.lines([outcome])
    assert (line.jax_itself, line.pytorch_itself_low) == (jax.found.ratio, pytorch.found.low)
    shown = markdown.table([line])
    assert "JAX differs from itself at 1 of 1 points and PyTorch differs from itself at 0 of 1 points" in shown
    (outcome,) = found(*each[:2])
    assert itself(outcome.sessions) == []


@pytest.mark.parametrize("two_scripts", [False, True])
def test_what_claims_nothing_or_was_not_measured_in_turn_is_no_session(two_scripts: bool) -> None:
    each = [session([1.5] * 4, hour) for hour in (0.0, 2.0, 4.0)]
    for rows in each:
        for place, row in enumerate(rows):
            change = {"run_id": f"{row.framework}_{row.run_id}"} if two_scripts else {"preset": "smoke"}
            rows[place] = dataclasses.replace(row, **change)
    assert [outcome.reach for outcome in found(*each)] == ["" if two_scripts else "within this session"] * 3


def test_points_that_differ_in_devices_products_or_modes_are_never_one_line(tmp_path: Path) -> None:
    """Three numbers of devices, two products, two modes, two microbatches: each is a line of ratios.csv."""
    changes: list[dict[str, Any]] = [
        *({"device_count": count, "scaling": "weak", "use_case": 2} for count in (2, 4, 8)),
        *({"use_case": 3, "product": product, "microbatch": 8} for product in ("norms", "clipped_sum")),
        {"use_case": 3, "product": "norms", "microbatch": 16},
        {"mode": "tuned"},
        {},
    ]
    measured = [
        session([1 + number / 10] * 4, hour, pair=f"p{number}", **change)
        for number, change in enumerate(changes)
        for hour in (0.0, 2.0, 4.0)
    ]
    lines = points.lines(found(*measured))
    assert [round(line.ratio or 0, 1) for line in lines] == [1 + number / 10 for number in range(len(changes))]
    points.write(tmp_path / points.NAME, lines)
    assert points.read(tmp_path / points.NAME) == lines
    shown = markdown.table(lines)
    assert shown.count("| train_multi, 4 devices, weak |") == 1
    assert len({line for line in shown.splitlines() if line.startswith("| mnist")}) == len(changes)


def test_many_comparisons_are_corrected_for_and_marked() -> None:
    """Of twelve points one is beyond its interval by little: alone it would be a difference."""
    rng = np.random.default_rng(1)
    measured = []
    for number in range(12):
        means = [1.3, 1.31, 1.29] if number == 0 else [1.1, 1.16, 1.12] if number == 1 else rng.normal(1, 0.1, 3)
        measured += [session([mean] * 4, 2 * n, pair=f"p{number}") for n, mean in enumerate(means)]
    lines = points.lines(found(*measured))
    assert [line.marked for line in lines[:2]] == ["JAX is faster", "JAX is faster*"]
    assert "A * after a verdict: significant alone, but not after correction" in markdown.table(lines)


def test_means_are_of_the_same_five_benchmarks_in_each_mode_and_one_that_carries_them_is_named() -> None:
    names = ("mnist", "cifar10", "gcn", "bert", "gpt2", "graphnet")
    measured = [
        session([8.0 if name == "gcn" else 1.0] * 4, hour, benchmark=name, mode=mode, pair=f"{name} {mode}")
        for name in names
        for mode in ("default", "tuned")
        for hour in (0.0, 2.0, 4.0)
        if (name, mode) != ("graphnet", "tuned")
    ]
    text = markdown.table(points.lines(found(*measured)))
    assert "- train_single, full, fp32, over bert, cifar10, gcn, gpt2, mnist:\n" in text
    assert text.count(f": {8**0.2:.3f} [0.") == 2  # the fifth root
    assert text.count("; without gcn 1.000") == 2
    few = [rows for rows in measured if rows[0].benchmark != "bert"]
    assert "Geometric means" not in markdown.table(points.lines(found(*few)))


def test_a_table_that_nobody_can_read_is_refused(tmp_path: Path) -> None:
    (tmp_path / points.NAME).write_text("benchmark,ratio\nmnist,fast\n")
    with pytest.raises(ValueError, match="Expected `int`, got `str`"):
        points.read(tmp_path / points.NAME)


@pytest.mark.parametrize("started", [None, "yesterday", "2026-11-22"])
def test_rows_without_times_are_one_session(tmp_path: Path, started: str | None) -> None:
    """Nobody knows how far apart they are."""
    measured = [[dataclasses.replace(row, started=started, ended=None) for row in session([1.5] * 4)] for _ in range(3)]
    (outcome,) = found(*measured)
    assert outcome.reach == "within this session"
    write_rows(tmp_path / "results.csv", [row for rows in measured for row in rows])
    assert len(over_sessions(outcomes(judged(read_rows(tmp_path / "results.csv"))))) == 1


@pytest.mark.parametrize(("number", "pairs"), [(2, 4), (3, 2)])  # two alone claim nothing together
def test_sessions_share_the_pairs_and_begin_apart(main: Main, number: int, pairs: int) -> None:
    asked = ("--benchmark", "mnist,gcn", "--use_case", "1", "--paired", "--sessions", str(number), "--spacing", "90m")
    said = main(*asked, "--dry_run")
    assert said.returncode == 0, said.stderr
    assert f"{4 * number * pairs} rows in {2 * number} scripts" in said.stdout
    assert f"{number} sessions, 1.5 h from the start of one to the next" in said.stdout
    for name in ("", *(f"_session_{n}" for n in range(2, number + 1))):
        assert f"slurm_scripts/paired_mnist_1_pairs_{pairs}{name}.sh" in said.stdout


def test_on_slurm_each_session_has_its_begin_time_and_an_order_of_its_own() -> None:
    target = cluster.load(ROOT / "tests" / "golden" / "cluster.yaml").targets["h100"]
    jobs = [
        Job("paired", "mnist", 1, "standard", "fp32", None, "h100", pairs=1, session=n + 1, delay=7200 * n)
        for n in range(3)
    ]
    texts = [script.render(job, target) for job in jobs]
    assert ["#SBATCH --begin=now+" in text for text in texts] == [False, True, True]
    assert "#SBATCH --begin=now+14400\n" in texts[2]
    assert all(" --pairs 1 " in text for text in texts)
    assert [job.rows()[0].framework for job in jobs] == ["jax", "pytorch", "jax"]
    assert jobs[0].rows()[0].repeats == 1


def test_here_a_session_waits_for_its_time_and_can_be_cancelled_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "LOOK_SECONDS", 0.01)
    results = Results(tmp_path / "results")
    runs = []
    for number, delay in enumerate((0, 1, 3600)):
        job = Job("paired", "mnist", 1, "smoke", "fp32", None, "local", session=number + 1, delay=delay)
        run = results.run(job.run_id())
        record = LaunchRecord(job=job, pair=run.id)
        run.create(job.rows(), script="exit 3\n", launch=record, owner=this_process(), target="local")
        runs.append(run)

    def wait(seconds: float) -> None:
        if runs[1].stored_status().state != QUEUED:
            runs[2].settle(state=CANCELLED, cause="by a test")
        real(seconds)

    real = local.time.sleep
    monkeypatch.setattr(local.time, "sleep", wait)
    local.work(runs, results)
    assert [run.stored_status().exit_code for run in runs] == [3, 3, None]
    assert runs[2].stored_status().state == CANCELLED


def test_here_the_first_session_runs_and_those_that_wait_say_until_when(main: Main, checkout: Path) -> None:
    said = main("--benchmark", "mnist", "--use_case", "1", "--paired", "--sessions", "3", "--preset", "smoke")
    assert said.returncode == 0, said.stdout + said.stderr
    results = Results(checkout / "results")
    first, second, third = results.runs()
    status = main("status").stdout
    assert re.search(rf"{second.id} +queued +- +waits for its session; expected to start .* \(in [12] h ", status)
    # The process that waits for them has the first one, too, and goes on.
    assert f"{second.id} cancelled: cancelled before it started" in main("cancel", second.id).stdout
    until = time.monotonic() + 240
    while first.stored_status().state not in TERMINAL and time.monotonic() < until:
        time.sleep(0.5)
    states = {run.id: run.status().state for run in (first, second, third)}
    assert list(states.values()) == [FINISHED, CANCELLED, QUEUED], states
    planned = third.launch().job
    assert planned is not None
    third.write_launch(job=dataclasses.replace(planned, delay=10**18))
    assert "waits for its turn" in main("status").stdout
    assert main("cancel", third.id).returncode == 0


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--sessions", "3"], "--sessions needs --paired"),
        (["--paired", "--spacing", "2h"], "--spacing needs --sessions"),
        (["--paired", "--sessions", "3", "--spacing", "5m"], "time '5m': give hours or minutes, such as 2h or 90m"),
        (["--paired", "--sessions", "3", "--spacing", "2"], "time '2': give hours or minutes, such as 2h or 90m"),
        (["--paired", "--sessions", "3", "--spacing", "9999h"], "to 336h"),
        (["--paired", "--sessions", "0"], "'0' is not a whole number from 1 to"),
    ],
)
def test_what_sessions_need_is_said(main: Main, more: list[str], words: str) -> None:
    said = main("--benchmark", "mnist", "--use_case", "1", *more, "--dry_run")
    assert (said.returncode, words in said.stderr, "Traceback" in said.stderr) == (2, True, False)
