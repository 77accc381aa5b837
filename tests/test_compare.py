"""``main.py compare``: which runs it sets side by side, and what it prints from records alone."""

import dataclasses
import json
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT, Main
from test_comparability import GOOD, alike, judged
from test_pairs import outcomes

from duel import terminal
from duel.catalogue import FRAMEWORKS, INFERENCE, PAIRED, PRESETS, VALIDATE, WEAK
from duel.cli import main as cli
from duel.errors import UserError
from duel.evidence import sha256
from duel.job import Job
from duel.launch import cluster, display, manage, plan, state
from duel.measure.supervisor import _print_verdicts
from duel.modes import DEFAULT
from duel.record import Row
from duel.report import compare
from duel.report.command import paired_command
from duel.results import Results, Run
from duel.states import CANCELLED, FINISHED, QUEUED, RUNNING
from duel.status import LaunchRecord, this_process
from duel.table import merge

UNPROVED = "unverified: no certificate; run 'python main.py validate --benchmark mnist --size full --target local'"
# What a job finds out, of a test's rows.
FOUND = (
    *("status", "host", "device_kind", "device_id", "weights_sha256", "data_sha256", "blocks", "left_out_blocks"),
    *("steady", "loss_first", "clock_mhz", "throughput", "step_seconds_p50"),
)
BATCH_SIZE = 64
STAMPS = ("261124-100000-00aaaa", "261124-100001-00bbbb", "261124-100002-00cccc")


def measured(row: Row, group: str, **changes: Any) -> Row:
    values = {name: getattr(GOOD, name) for name in FOUND} | {"group": group, "parity": UNPROVED}
    batch_size = (row.batch_size or BATCH_SIZE) * ((row.device_count or 1) if row.scaling == WEAK else 1)
    return row.replace(**values | {"code_sha256": "d" * 64, "batch_size": batch_size} | changes)


def make(results: Results, job: Job, stamp: str, pair: str = "", **changes: Any) -> Run:
    """A finished run of ``job`` as the driver makes it, and its job leaves it."""
    run = results.run(job.run_id(stamp))
    group = pair or run.id.partition("_")[2]
    run.create(job.rows(), launch=LaunchRecord(job=job, pair=group), owner=this_process(), target=job.target)
    for row in run.rows():
        file = run.evidence_file(row.row or 0, 0)
        file.parent.mkdir(exist_ok=True)
        file.write_bytes(alike(row)[0].to_bytes())
        run.write_row(measured(row, group, evidence_sha256=sha256([file.read_bytes()]), **changes))
    run.settle(state=FINISHED, cause="")
    return run


def job(framework: str, benchmark: str = "mnist", use_case: int = 1, preset: str = "standard", **more: Any) -> Job:
    precision, device, target = more.pop("precision", "fp32"), more.pop("device", None), more.pop("target", "local")
    return Job(framework, benchmark, use_case, preset, precision, device, target, **more)


def make_pair(results: Results, stamp: str, **more: Any) -> list[Run]:
    """Two scripts of one command, JAX 1.5 times as fast."""
    throughput = {"jax": 150.0, "pytorch": 100.0}
    return [make(results, job(name, **more), stamp, throughput=throughput[name]) for name in FRAMEWORKS]


def chosen(results: Results, *arguments: str) -> list[Run]:
    return manage.to_compare(cli.parsed(["compare", *arguments])[1], results)


def printed(runs: list[Run], results: Results, default_target: str | None = None) -> str:
    return terminal.plain(compare.report(runs, results, default_target))


def test_without_a_choice_it_is_what_the_last_command_started(results: Results) -> None:
    make_pair(results, STAMPS[0])
    last = [*make_pair(results, STAMPS[1]), *make_pair(results, STAMPS[1], benchmark="gcn")]
    for framework in FRAMEWORKS:
        make(results, job(framework, use_case=VALIDATE), STAMPS[2])
    assert {run.id for run in chosen(results)} == {run.id for run in last}


def test_one_run_brings_its_partner_and_the_other_attempts_of_its_group(results: Results) -> None:
    jax, pytorch = make_pair(results, STAMPS[0])
    make_pair(results, STAMPS[1], benchmark="gcn")
    again = make(results, job("pytorch", attempt=2), STAMPS[2], pair=jax.id.partition("_")[2])
    for arguments in (
        [jax.id],
        ["pytorch_mnist_1-261124-100000"],
        [again.id],
        ["--framework", "jax", "--benchmark", "mnist"],
        ["--group", jax.id.partition("_")[2]],
    ):
        assert chosen(results, *arguments) == [jax, pytorch, again]
    assert len(chosen(results, "--benchmark", "gcn")) == 2
    assert len(chosen(results, "--framework", "jax")) == 5


def test_each_group_has_a_table_of_its_own(results: Results) -> None:
    """Two measurements of the same must not be taken for one."""
    runs = [*make_pair(results, STAMPS[0]), *make_pair(results, STAMPS[1])]
    said = printed(runs, results)
    assert said.count("throughput (images/s)") == said.count("indicative: JAX / PyTorch 1.5\n") == 2


def test_bad_choices_are_named(results: Results) -> None:
    with pytest.raises(UserError, match=r"no runs yet; 'python main\.py --benchmark resnet50"):
        chosen(results)
    validation = make(results, job("jax", use_case=VALIDATE), STAMPS[0])
    with pytest.raises(UserError, match="no runs yet"):
        chosen(results)
    make_pair(results, STAMPS[1])
    with pytest.raises(UserError, match="a validation measures nothing"):
        chosen(results, validation.id)
    with pytest.raises(UserError, match=r"no run 'jax_mnist_9' in .*did you mean jax_mnist_1-"):
        chosen(results, "jax_mnist_9")
    with pytest.raises(UserError, match=rf"no run matches --group mnist; available: group: .*mnist_1-{STAMPS[1]}"):
        chosen(results, "--group", "mnist")


@pytest.mark.parametrize("status", [QUEUED, RUNNING])
def test_a_side_that_has_not_finished_is_said_and_what_there_is_is_shown(results: Results, status: str) -> None:
    runs = make_pair(results, STAMPS[0])
    runs[1].write_status(state=status)
    runs[1].write_row(runs[1].read_row(0).replace(status=status))
    said = printed(runs, results)
    assert f"{runs[1].id} is {status}; 'python main.py logs {runs[1].id} --follow' follows it" in said
    assert f"no ratio: not finished yet: pytorch is {status}" in said
    assert " 150 " in said


def test_a_cancelled_side_bars_the_pair(results: Results) -> None:
    runs = make_pair(results, STAMPS[0])
    runs[1].write_row(runs[1].read_row(0).replace(status=RUNNING))
    runs[1].settle(state=CANCELLED, cause="ended by SIGTERM")
    assert ": NOT COMPARABLE: status (pytorch: cancelled: ended by SIGTERM)\n" in printed(runs, results)


def test_two_scripts_give_an_indicative_ratio_and_the_command_of_a_verdict(results: Results) -> None:
    runs = make_pair(results, STAMPS[0], precision="bf16", mode="default+compile")
    said = printed(runs, results, "local")
    what = "mnist (full, bf16), train_single, mode default+compile, batch size 64"
    assert said.startswith(f"\n{what}: indicative: JAX / PyTorch 1.5\n")
    assert "\nindicative: one process each, not in turn, no interval: not a verdict\n" in said
    command = "python main.py --benchmark mnist --use_case 1 --paired --precision bf16 --mode default+compile"
    assert f"\nfor a verdict: {command}\n" in said
    assert "\nno float64 certificate: the proof is as sharp as bf16 rounding\n" in said
    assert "\nfor a sharper proof: python main.py validate --benchmark mnist --size full --target local\n" in said


def test_a_certificate_of_other_code_is_said_beside_the_verdict(results: Results) -> None:
    runs = make_pair(results, STAMPS[0])
    rows = [
        row.replace(parity="unverified: the certificate is for other code; run 'x'")
        for run in runs
        for row in run.rows()
    ]
    said = compare.standing(outcomes(rows), rows)
    assert "the certificate is for other code: the proof is as sharp as fp32 rounding" in said
    proved = [row.replace(parity="verified") for row in rows]
    assert "sharp" not in "".join(compare.standing(outcomes(proved), proved))


ASKED: tuple[dict[str, Any], ...] = (
    {},
    {"preset": "smoke"},
    {"preset": "publication"},
    {"preset": "smoke", "size": "full"},
    {"size": "tiny", "device": "cpu", "batch_sizes": (4, 8)},
    {"use_case": 2, "devices_per_node": 2, "scaling": "strong", "batch_sizes": (8,)},
    {"use_case": 2, "devices_per_node": 2, "preset": "smoke"},
    {"use_case": 3, "products": ("norms", "clipped_sum"), "microbatch": 2, "batch_sizes": (4,)},
    {"use_case": 5},
    {"use_case": 5, "preset": "smoke"},
    {"mode": "tuned-channels_last", "precision": "bf16"},
    {"pairs": 2, "session": 2, "delay": 7200},
)
POINT = (
    *("benchmark", "use_case", "precision", "mode", "size", "target", "batch_size", "product", "microbatch"),
    *("device_count", "nodes", "scaling", "weights"),
)


def points(job: Job) -> set[tuple[Any, ...]]:
    return {tuple(getattr(row, name) for name in POINT) for row in job.rows()}


@pytest.mark.parametrize("asked", ASKED, ids=str)
def test_the_command_of_a_verdict_measures_the_same_points(results: Results, asked: dict[str, Any]) -> None:
    """By main.py's own reading of it: all points, in turn, as often as a claim needs."""
    planned = job("pytorch", **asked)
    run = make(results, planned, STAMPS[0])
    rows = run.rows()
    again = read(paired_command(run, [(row, row) for row in rows], "local"), results)
    assert (again.framework, again.device) == (PAIRED, planned.device)
    assert points(again) == points(planned)
    assert max(row.repeat or 0 for row in again.rows()) >= 3


@pytest.mark.parametrize("asked", ASKED, ids=str)
def test_of_a_run_by_hand_the_command_names_what_its_job_found(results: Results, asked: dict[str, Any]) -> None:
    planned = job(PAIRED, **asked)
    run = make(results, planned, STAMPS[0])
    run.launch_file.unlink()
    again = read(paired_command(run, [(row, row) for row in run.rows()], None), results)
    found = PRESETS[planned.preset].batch_sizes if planned.use_case == INFERENCE else (BATCH_SIZE,)
    assert (again.device, again.batch_sizes) == (GOOD.device_kind, planned.batch_sizes or found)
    assert points(again) == points(dataclasses.replace(planned, batch_sizes=again.batch_sizes))


def read(command: str, results: Results) -> Job:
    """The one job that a command of ours starts."""
    args = cli.parsed(shlex.split(command)[2:])[1]
    (planned,) = plan.jobs(args, cluster.load(ROOT / "cluster.yaml"), results)
    return planned


def test_the_shortest_command_names_nothing_but_the_benchmark_and_the_use_case(results: Results) -> None:
    run, _ = make_pair(results, STAMPS[0], benchmark="resnet50")
    pairs = [(row, row) for row in run.rows()]
    command = "python main.py --benchmark resnet50 --use_case 1 --paired"
    assert paired_command(run, pairs, "local") == command
    assert paired_command(run, pairs, "cluster") == f"{command} --target local"
    weights = "results/weights/my file-1.safetensors"
    run = make(results, job("jax", benchmark="resnet50", weights=weights), STAMPS[1])
    assert paired_command(run, pairs, "local") == f"{command} '--weights={weights}'"


def test_status_shows_what_the_pair_of_a_finished_run_came_to(results: Results) -> None:
    make_pair(results, STAMPS[0])
    alone = make(results, job("jax"), STAMPS[1])
    make(results, job("jax", use_case=5), STAMPS[2])
    make(results, job("pytorch", use_case=5), STAMPS[2], weights_sha256="c" * 64)
    paired = make(results, job(PAIRED, mode=DEFAULT, benchmark="gcn"), STAMPS[2])
    merge(results)
    seen = state.with_verdicts(state.look(results), results)
    said = {one.id: one.verdict for one in seen.runs}
    assert said == {
        f"jax_mnist_1-{STAMPS[0]}": "indicative: JAX / PyTorch 1.5",
        f"pytorch_mnist_1-{STAMPS[0]}": "indicative: JAX / PyTorch 1.5",
        alone.id: "",
        f"jax_mnist_5-{STAMPS[2]}": "4 points: 4 NOT COMPARABLE",
        f"pytorch_mnist_5-{STAMPS[2]}": "4 points: 4 NOT COMPARABLE",
        paired.id: "equal within 5 %: JAX / PyTorch 1.000 [1.000, 1.000] within this session",
    }
    assert "  finished  -    indicative: JAX / PyTorch 1.5\n" in str(display.table(seen))


def test_status_shows_no_verdict_before_both_sides_have_ended(results: Results) -> None:
    _, pytorch = make_pair(results, STAMPS[0])
    pytorch.write_status(state=RUNNING)
    pytorch.write_row(pytorch.read_row(0).replace(status=RUNNING))
    merge(results)
    assert [s.verdict for s in state.with_verdicts(state.look(results), results).runs] == ["", ""]
    pytorch.write_row(pytorch.read_row(0).replace(status=FINISHED))
    pytorch.settle(state=FINISHED, cause="")
    merge(results)
    first, second = state.with_verdicts(state.look(results), results).runs
    assert first.verdict == second.verdict == "indicative: JAX / PyTorch 1.5"


def test_a_paired_job_says_at_its_end_which_pairs_are_comparable(
    results: Results, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make(results, job(PAIRED), STAMPS[0])
    _print_verdicts(run, judged(run.rows()))
    remedy = f"'python main.py compare {run.id}' prints both sides and the ratio\n"
    assert capsys.readouterr().out == f"4 of 4 pairs COMPARABLE\n{remedy}"
    run.write_row(run.read_row(2).replace(weights_sha256="c" * 64))
    _print_verdicts(run, judged(run.rows()))
    said = capsys.readouterr().out
    assert said.startswith("3 of 4 pairs COMPARABLE\n1 of 4 pairs NOT COMPARABLE: weights_sha256 (")
    alone = make(results, job("jax"), STAMPS[1])
    _print_verdicts(alone, judged(alone.rows()))
    assert capsys.readouterr().out == ""


def test_damaged_folders_are_named_and_nothing_ends_in_a_traceback(main: Main, checkout: Path) -> None:
    results = Results(checkout / "results")
    jax, pytorch = make_pair(results, STAMPS[0])
    said = main("compare")
    assert "indicative: JAX / PyTorch 1.5" in said.stdout
    assert said.stdout.count("python main.py --benchmark mnist --use_case 1 --paired\n") == 1
    (checkout / "cluster.yaml").rename(checkout / "other.yaml")
    assert "--use_case 1 --paired --target local\n" in main("compare").stdout
    jax.metrics.write_bytes(b"\xff\xfe{")
    pytorch.launch_file.write_text("{")
    assert "indicative: JAX / PyTorch 1.5" in main("compare").stdout
    jax.row_file(0).write_text('{"run_id": ')
    said = main("compare")
    assert (said.returncode, said.stderr) == (0, "")
    assert "damaged: 000.json is damaged: " in said.stdout
    pytorch.status_file.write_text("[")
    shutil.rmtree(jax.rows_folder)
    shutil.rmtree(pytorch.rows_folder)
    said = main("compare", jax.id)
    assert (said.returncode, said.stderr) == (0, "")
    for run in (jax, pytorch):
        assert f"{run.id} is damaged: results/runs/{run.id}/rows holds no rows" in said.stdout
    said = main("compare", "nothing")
    assert (said.returncode, said.stderr.startswith("main.py: error: no run 'nothing' in ")) == (2, True)
    results.csv.write_text("a,b\n1,2\n")
    said = main("status")
    assert said.returncode == 0
    assert "not known: verdicts: " in said.stdout
    assert "not a table of rows; delete it" in said.stdout
    json.loads(main("status", "--json").stdout)


def test_the_figures_of_a_row_with_fewer_than_two_clean_blocks_are_not_shown(results: Results) -> None:
    runs = make_pair(results, STAMPS[0])
    runs[1].write_row(runs[1].read_row(0).replace(blocks=1, left_out_blocks=49, left_out="49 others on the CPUs"))
    said = printed(runs, results)
    assert "- (1 of 50 blocks are left)" in said
    assert " 100 " not in said


def test_what_is_shown_of_repeats_is_their_median(results: Results) -> None:
    run = make(results, job(PAIRED), STAMPS[0])
    for number, throughput in enumerate((100.0, 90.0, 50.0, 400.0, 300.0, 70.0, 80.0, 200.0)):
        run.write_row(run.read_row(number).replace(throughput=throughput))
    line = next(line for line in printed([run], results).splitlines() if line.startswith("throughput ("))
    assert line.split()[-2:] == ["250", "75"]


def test_of_several_commands_the_same_point_comes_to_one_line_over_sessions(results: Results) -> None:
    runs = []
    for hour, stamp in zip((0, 2, 4), STAMPS, strict=True):
        runs.append(make(results, job(PAIRED), stamp))
        times = {"started": f"2026-11-24T0{hour}:00:00Z", "ended": f"2026-11-24T0{hour}:01:00Z"}
        for row in runs[-1].rows():
            runs[-1].write_row(row.replace(pair="p", **times))
    said = printed(runs, results).splitlines()
    what = "mnist (full, fp32), train_single, batch size 64"
    assert said[1] == f"{what}: equal within 5 %: JAX / PyTorch 1.000 [1.000, 1.000] over 3 sessions"
    assert said[2] == f"{what}: equal within 5 %: JAX / PyTorch 1.000 [1.000, 1.000] within this session"
    assert any("another session may show 1.000 to 1.000" in line for line in said)
