"""``--mode tuned``: the file that a search leaves, and what a row makes of it."""

import dataclasses
import json
import subprocess
from pathlib import Path

import pytest
from conftest import Main, clean_environment, interpreter, rows_of
from scipy import stats

from duel import ROOT, modes, tuned
from duel.catalogue import CLAIM_SESSIONS, FRAMEWORKS, TRIAL
from duel.files import Damaged
from duel.job import Job
from duel.record import Row
from duel.report import against, points, ratios
from duel.report.figure_data import label
from duel.report.itself import level, overlap
from duel.report.pairs import outcomes
from duel.report.sessions import over_sessions
from duel.results import Results
from duel.states import FAILED, FINISHED
from duel.table import read_rows
from duel.tuned import Choice, Trial

SET = "default+compile+channels_last+fused_optimizer"


def quiet(checkout: Path) -> None:
    """Where tests run beside each other, each would disturb the others' trials; and near modes are repeated once."""
    for name, line, other in (
        ("comparability.py", "FOREIGN_LOAD = 0.05", "FOREIGN_LOAD = 9.0"),
        ("measure/watch.py", "FOREIGN_LOAD = 0.05", "FOREIGN_LOAD = 9.0"),
        ("measure/search.py", "ROUNDS = 3", "ROUNDS = 1"),
    ):
        file = checkout / "duel" / name
        assert file.read_text().count(line) == 1
        file.write_text(file.read_text().replace(line, other))


CHOICE = Choice(
    *("pytorch", "mnist", "tiny", "fp32", "training", None, 16, SET),
    trials=[Trial("default", 1.0), Trial(SET, 2.0), Trial(SET, 2.0), Trial("default", 1.0)],
    seconds=12.5,
    framework_version="2.14.1",
    code_sha256="c0de",
    cpus=2,
    run_id="paired_mnist_1_trial-260101-000000-00abcd",
)
UNKNOWN = dataclasses.asdict(CHOICE) | {"mode": "fast"}
MNIST = Row(
    **{name: getattr(CHOICE, name) for name in ("framework", "benchmark", "size", "precision", "framework_version")},
    code_sha256="c0de",
    cpus=2,
    use_case=1,
    batch_size=16,
    device_count=1,
    device_kind="cpu",
    device_name="AMD EPYC 9B14",
)


def test_a_choice_is_found_for_its_point_alone_and_on_many_devices(tmp_path: Path) -> None:
    tuned.keep(tmp_path, "AMD EPYC 9B14", CHOICE)
    tuned.keep(tmp_path, "AMD EPYC 9B14", dataclasses.replace(CHOICE, samples=32, mode="default"))
    tuned.keep(tmp_path, "AMD EPYC 9B14", dataclasses.replace(CHOICE, run_id="later"))
    stored = tuned.read(tmp_path / "tuned" / "amd-epyc-9b14.json")
    assert stored is not None
    assert [choice.samples for choice in stored.choices] == [16, 32]
    assert tuned.found_for(MNIST, tmp_path) == (SET, "the best of 2 by later")
    two = dataclasses.replace(MNIST, use_case=2, batch_size=32, device_count=2)
    assert tuned.found_for(two, tmp_path)[0] == SET
    for change in ({"batch_size": 8}, {"use_case": 5}, {"size": "full"}, {"precision": "bf16"}, {"framework": "jax"}):
        mode, said = tuned.found_for(dataclasses.replace(MNIST, **change), tmp_path)
        assert (mode, said) == (None, "not searched in results/tuned/amd-epyc-9b14.json, the set for a cpu")


def test_a_choice_of_other_things_says_so(tmp_path: Path) -> None:
    other = dataclasses.replace(CHOICE, framework_version="2.13.0", code_sha256="other", cpus=64)
    tuned.keep(tmp_path, "AMD EPYC 9B14", other)
    assert tuned.found_for(MNIST, tmp_path) == (
        SET,
        f"the best of 2 by {CHOICE.run_id}; of pytorch 2.13.0, this is 2.14.1; of other code; of 64 CPUs, this has 2",
    )


def test_a_cpu_whose_generation_is_told_has_its_own_choices_then_those_of_the_plain_name(tmp_path: Path) -> None:
    milan = "AMD EPYC (family 25, model 1)"
    here = dataclasses.replace(MNIST, device_name=milan)
    tuned.keep(tmp_path, "AMD EPYC", CHOICE)
    tuned.keep(tmp_path, milan, dataclasses.replace(CHOICE, samples=32))
    said = f"the best of 2 by {CHOICE.run_id}; of AMD EPYC, this is {milan}"
    assert tuned.found_for(here, tmp_path) == (SET, said)
    tuned.keep(tmp_path, milan, dataclasses.replace(CHOICE, mode="default", run_id="own"))
    assert tuned.found_for(here, tmp_path) == ("default", "the best of 2 by own")
    said = "not searched in results/tuned/amd-epyc.json, the set for a cpu"
    assert tuned.found_for(dataclasses.replace(here, size="full"), tmp_path) == (None, said)


def test_a_file_of_another_device_is_not_taken(tmp_path: Path) -> None:
    there = dataclasses.replace(MNIST, device_name="NVIDIA H100 80GB HBM3", device_kind="gpu")
    assert tuned.found_for(there, tmp_path) == (None, "no search on this device, the set for a gpu")
    tuned.keep(tmp_path, "AMD EPYC 9B14", CHOICE)
    tuned.path(tmp_path, "AMD EPYC 9B14").rename(tuned.path(tmp_path, str(there.device_name)))
    said = "results/tuned/nvidia-h100-80gb-hbm3.json is of AMD EPYC 9B14, the set for a gpu"
    assert tuned.found_for(there, tmp_path) == (None, said)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "is damaged: "),
        ("[]", "it is not a JSON object"),
        ('{"format": 2, "device_name": "x", "choices": []}', "another version"),
        ('{"device_name": "x", "choices": [{}]}', "is damaged: "),
        (json.dumps({"device_name": "x", "choices": [UNKNOWN]}), "unknown mode 'fast'"),
    ],
)
def test_a_damaged_file_is_named(tmp_path: Path, text: str, words: str) -> None:
    file = tuned.path(tmp_path, str(MNIST.device_name))
    file.parent.mkdir()
    file.write_text(text)
    with pytest.raises(Damaged, match=f"^amd-epyc-9b14.json .*{words}"):
        tuned.found_for(MNIST, tmp_path)


def test_a_search_plans_one_row_a_side_and_no_pairs() -> None:
    rows = Job("paired", "mnist", 5, TRIAL, "fp32", None, "local", trials=4, batch_sizes=(1, 8)).rows()
    assert [(row.framework, row.batch_size) for row in rows] == [(f, n) for n in (1, 8) for f in FRAMEWORKS]
    assert len({row.point for row in rows}) == len(rows)


def test_a_search_and_what_it_found_in_force(main: Main, checkout: Path) -> None:
    quiet(checkout)
    asked = ("--benchmark", "mnist", "--use_case", "5", "--batch_sizes", "8", "--device", "cpu")
    said = main("tune", *asked, "--size", "tiny", "--trials", "2", "--wait", timeout=1800, WANDB_MODE="disabled")
    assert said.returncode == 0, said.stdout + said.stderr
    (file,) = (checkout / "results" / "tuned").glob("*.json")
    stored = tuned.read(file)
    assert stored is not None
    assert [choice.framework for choice in stored.choices] == list(FRAMEWORKS)
    for choice in stored.choices:
        assert choice.mode == tuned.chosen(choice.trials)
        assert choice.count == 2
        assert choice.seconds > 0
    tried = {row["mode"] for row in rows_of(checkout)}
    assert tried == {"default", "default+convolution=products", "default+compile+channels_last"}
    assert "nothing to publish" in main("publish", "--name", "here").stderr
    said = main(*asked, "--preset", "smoke", "--mode", "tuned", "--wait", WANDB_MODE="disabled")
    assert said.returncode == 0, said.stdout + said.stderr
    run_id = stored.choices[0].run_id
    for choice in stored.choices:
        assert f"Tuned, {choice.framework}: the best of 2 by {run_id}." in said.stdout
        (row,) = (r for r in rows_of(checkout) if (r["framework"], r["mode"]) == (choice.framework, "tuned"))
        switches = modes.settings(choice.mode, choice.framework, "mnist", 5, "fp32", "cpu")
        assert row["switches"] == modes.said(switches)


def searched_by_hand(checkout: Path) -> "subprocess.CompletedProcess[str]":
    """A search by the command of its script."""
    command = [interpreter("jax"), "jax/run.py", "--benchmark", "mnist", "--use_case", "5", "--batch_sizes", "8"]
    command += ["--preset", TRIAL, "--size", "tiny", "--trials", "1", "--paired", f"pytorch={interpreter('pytorch')}"]
    environment = clean_environment() | {"WANDB_MODE": "disabled"}
    return subprocess.run(
        command, cwd=checkout, env=environment, capture_output=True, text=True, timeout=900, check=False
    )


def test_a_side_of_which_nothing_runs_is_named_and_nothing_is_kept_of_it(checkout: Path) -> None:
    quiet(checkout)
    model = checkout / "jax" / "models" / "mnist.py"
    model.write_text(model.read_text().replace("    def __call__(", "    def gone("))
    said = searched_by_hand(checkout)
    assert said.returncode == 1, said.stdout + said.stderr
    results = Results(checkout / "results")
    (run,) = results.runs()
    assert run.status().state == FAILED
    assert {row.status for row in run.rows() if row.framework == "pytorch"} == {FINISHED}
    (file,) = (checkout / "results" / "tuned").glob("*.json")
    stored = tuned.read(file)
    assert stored is not None
    assert [choice.framework for choice in stored.choices] == ["pytorch"]


def shipped() -> list[Path]:
    return sorted((ROOT / "results" / "tuned").glob("*.json"))


def test_there_is_a_shipped_file() -> None:
    assert shipped()


@pytest.mark.parametrize("file", shipped(), ids=lambda file: file.stem)
def test_what_a_shipped_file_chooses_was_faster_than_default(file: Path) -> None:
    stored = tuned.read(file)
    assert stored is not None
    assert file == tuned.path(ROOT / "results", stored.device_name)
    for choice in stored.choices:
        assert choice.mode == tuned.chosen(choice.trials), choice.point
    points = {name: {one.point[1:] for one in stored.choices if one.framework == name} for name in FRAMEWORKS}
    assert points["jax"] == points["pytorch"]


def test_the_published_sets_of_this_repository_are_such_as_they_should_be() -> None:
    """A framework against itself differs by chance alone, and what a search chose is not slower than the default."""
    compared = {}
    for file in sorted((ROOT / "results" / "published").glob("*/results.csv")):
        found = over_sessions(outcomes(read_rows(file)))
        lines = points.lines(found)
        for framework in FRAMEWORKS:
            differs, known = points.against_itself(lines, framework)
            assert stats.binom.sf(differs - 1, known, 0.05) > 0.05, f"{framework} differs from itself at {differs}"
        by_line = {id(line): outcome for line, outcome in zip(lines, found, strict=True)}
        slower, chances = [], []
        for by_mode in points.by_mode(lines).values():
            for place, framework in enumerate(FRAMEWORKS if {"default", "tuned"} <= by_mode.keys() else ()):
                both = (by_line[id(by_mode[mode])].sessions for mode in ("default", "tuned"))
                sides = [[[pair[place] for pair in session] for session in sessions] for sessions in both]
                logs = [[level(session) for session in sessions] for sessions in sides]
                if min(map(len, logs)) >= CLAIM_SESSIONS and overlap(*sides):
                    factor, _, _, p = against._welch(*logs)
                    slower.append((framework, label(by_mode["tuned"]), factor))
                    chances.append(p)
        wrong = [one for one, p in zip(slower, ratios.holm(chances), strict=True) if p < 0.05 and one[2] < 1]
        assert wrong == [], "slower in tuned"
        compared[file.parent.name] = len(chances)
    assert compared["cpu"] > 0, "no published point can be compared"
