"""sbatch's options as text: read as sbatch reads them, never refused."""

import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from duel.launch import directives


@pytest.mark.parametrize(
    ("line", "names"),
    [
        ("--partition=gpu", ["--partition"]),
        ("--partition gpu", ["--partition"]),
        ("-p gpu", ["--partition"]),
        ("-pgpu", ["--partition"]),
        ("-p gpu --account=x -N2", ["--partition", "--account", "--nodes"]),
        ("--exclusive", ["--exclusive"]),
        ("--comment='a --mem=1' -n 4", ["--comment", "--ntasks"]),
        ("--mem=0  # not --exclusive", ["--mem"]),
        ("--comment='unbalanced -n 4", ["--comment", "--ntasks"]),
        ("-Z 3", ["-Z"]),
        ("--site-option=a", ["--site-option"]),
        ("--part=gpu --acco x", ["--partition", "--account"]),  # as getopt takes them: only one begins so
        ("--mem=0 --gpu=1", ["--mem", "--gpu"]),  # itself an option; the beginning of several
    ],
)
def test_the_options_of_a_line(line: str, names: list[str]) -> None:
    assert directives.names(line) == names


@pytest.mark.parametrize(
    ("lines", "value"),
    [
        ([], None),
        (["--mem=1"], None),
        (["--time=10"], "10"),
        (["--time 1:00"], "1:00"),
        (["-t 20"], "20"),
        (["-t20"], "20"),
        (["--time='1-0'"], "1-0"),
        (["--time=10", "-p gpu -t 30", "--mem=0"], "30"),
        (["--time-min=5"], None),
        (["--tim=5"], None),
        (["--time"], ""),
        (["--time=1 # --time=2"], "1"),
    ],
)
def test_the_last_value_counts(lines: list[str], value: str | None) -> None:
    assert directives.value(lines, "--time") == value


@pytest.mark.parametrize(
    ("lines", "changes", "result"),
    [
        (["-p a", "--mem=0"], [], ["-p a", "--mem=0"]),
        (["-p a", "--mem=0"], ["--partition=b"], ["--partition=b", "--mem=0"]),
        (["-p a", "--mem=0"], ["--qos=x"], ["-p a", "--mem=0", "--qos=x"]),
        (["-p a", "--mem=0", "-p b"], ["-p c"], ["-p c", "--mem=0"]),
        (["-p a", "--mem=0", "-A x"], ["-A y -p b"], ["-A y -p b", "--mem=0"]),
        (["-p a --mem=0", "-t 1"], ["-p b"], ["-p a --mem=0", "-t 1", "-p b"]),
        (["-p a", "-t 1 -p b"], ["-p c"], ["-t 1 -p b", "-p c"]),
        (["-t 1"], ["-t 2", "--time=3"], ["--time=3"]),
        (["--site=a"], ["--site=b"], ["--site=b"]),
    ],
)
def test_a_change_takes_the_place_of_its_option(lines: list[str], changes: list[str], result: list[str]) -> None:
    before = list(lines)
    assert directives.replace(lines, changes) == result
    assert lines == before


OPTIONS = st.lists(st.sampled_from(["--time=1", "-t 2", "-p a", "--partition=b -t 3", "--mem=0", "-p c --mem=1"]))


@given(lines=OPTIONS, changes=OPTIONS)
def test_after_a_change_sbatch_takes_what_it_says(lines: list[str], changes: list[str]) -> None:
    for name in ("--time", "--partition", "--mem"):
        wanted = directives.value(changes, name)
        expected = directives.value(lines, name) if wanted is None else wanted
        assert directives.value(directives.replace(lines, changes), name) == expected


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("--signal=B:USR2@60", "USR2"),
        ("--signal=USR1@9", "USR1"),
        ("--signal B:SIGUSR1@300", "USR1"),
        ("--signal=RB:10", "10"),
        ("--mem=0", "USR2"),
    ],
)
def test_the_signal_of_the_warning(line: str, name: str) -> None:
    assert directives.warning_signal(["-p a", line]) == name


def test_what_the_site_decides_or_forbids_is_not_added() -> None:
    own = ["--job-name=a", "--no-requeue", "--signal=B:USR2@60"]
    assert directives.without(own, [], []) == own
    assert directives.without(own, ["-J b -p gpu"], []) == own[1:]
    assert directives.without(own, ["--requeue"], ["--signal"]) == own[:1]
    assert directives.without(own, ["--no-requeue"], []) == [own[0], own[2]]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (
            "--partiton=gpu",
            "--partiton is not an sbatch option that Duel knows (did you mean --partition?); it is passed on",
        ),
        ("--zzz", "--zzz is not an sbatch option that Duel knows; it is passed on unchanged"),
        ("--image=/a.sif", "--image is not an sbatch option that Duel knows; it is passed on unchanged"),
        ("--comment=run#5", "--comment=run#5: Slurm ignores everything from '#' on: quote the value"),
        ("--output=$HOME/%j", "--output=$HOME/%j: Slurm does not expand $HOME in a directive"),
        ("-Z 3", "-Z is not an sbatch option that Duel knows"),
        ("--gpus-per-task=1", "--gpus-per-task: each process sees fewer devices"),
        ("--gpu-bind=closest", "--gpu-bind: each process sees fewer devices"),
        ("--requeue", "--requeue: a requeued measurement begins again"),
        ("-a 1-4", "--array: each of its tasks repeats the whole job"),
        ("--export=NONE", "--export=NONE: srun starts without the script's variables"),
        ("--export=MY_DATA", "--export=MY_DATA: srun starts without the script's variables"),
        ("--signal=B:TERM@60", "--signal: a run cannot tell TERM from a cancellation"),
    ],
)
def test_what_looks_wrong_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, line: str, said: str) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))  # no sbatch here
    (remark,) = directives.warnings(["--mem=0", line])
    assert remark.startswith(said)


def test_what_every_sbatch_knows_is_not_remarked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert directives.warnings(["-p gpu -A a", "--gres=gpu:1", "--time=1", "--export=ALL", "--exclusive --mem=0"]) == []
    assert directives.warnings(["--gpu-bind=none", "--part=gpu", "--time=1  # short", "--comment='run#5'"]) == []


def test_this_site_s_own_sbatch_is_asked_for_options_that_duel_does_not_know(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    sbatch = tmp_path / "sbatch"  # a stand-in
    sbatch.write_text('#!/bin/sh\necho "      --container-image=[USER@]PATH  of the plug-in"\n')
    sbatch.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert directives.warnings(["--container-image=a"]) == []
    assert directives.warnings(["--requeue"], continues=True) == [], "as Duel itself sets for a training"
    assert len(directives.warnings(["--requeue"])) == 1
    (remark,) = directives.warnings(["--container-imag=a"])
    assert "(did you mean --container-image?)" in remark


@pytest.mark.parametrize(
    ("text", "minutes"),
    [
        ("30", 30),
        ("1:30", 1.5),
        ("02:00:00", 120),
        ("1-0", 1440),
        ("1-2", 1560),
        ("1-2:30", 1590),
        ("1-02:30:30", 1590.5),
        (" 5 ", 5),
        ("0", None),
        ("0:00", None),
        ("", None),
        ("UNLIMITED", None),
        ("infinite", None),
        ("1:2:3:4", None),
        ("-5", None),
        ("1.5", None),
    ],
)
def test_time_limits_are_read_in_all_of_sbatch_s_forms(text: str, minutes: float | None) -> None:
    assert directives.minutes(text) == minutes


@given(seconds=st.integers(1, 10**7))
def test_a_time_limit_is_read_as_it_is_written(seconds: int) -> None:
    read = directives.minutes(directives.limit(seconds / 60))
    assert read is not None
    assert math.isclose(read * 60, seconds)


def test_a_time_limit_is_written_as_sbatch_shows_it() -> None:
    assert [directives.limit(minutes) for minutes in (0.5, 90, 1440, 3000)] == [
        "00:00:30",
        "01:30:00",
        "1-00:00:00",
        "2-02:00:00",
    ]


@given(text=st.text())
def test_any_line_can_be_read(text: str) -> None:
    line = f"--x={text}"
    assert directives.names(line)[0].startswith("--x")
    directives.value([line], "--time")
    directives.replace([line], [line])
    directives.minutes(text)


@pytest.mark.parametrize(
    ("line", "doubled"),
    [
        ("--mem=64GB", "--mem=128GB"),
        ("--mem=8000", "--mem=16000"),
        ("--mem=0", ""),
        ("--mem-per-cpu=2g", "--mem-per-cpu=4g"),
    ],
)
def test_memory_is_doubled_in_every_form(line: str, doubled: str) -> None:
    assert directives.more_memory([line]) == doubled
