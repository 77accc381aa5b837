"""Rendered scripts: pinned by golden files, valid for bash, with exactly the planned directives."""

import dataclasses
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import jinja2
import pytest
from conftest import ROOT, clean_environment
from golden import regenerate
from hypothesis import given
from hypothesis import strategies as st

from duel.catalogue import BENCHMARKS, FRAMEWORKS, PAIRED, PRECISIONS, PRESETS, USE_CASES, VALIDATE
from duel.errors import UserError
from duel.job import EDITED, RENDERED, Job, script_state
from duel.launch import cluster, script
from duel.launch.schema import Target

GOLDEN = ROOT / "tests" / "golden"
TARGETS = cluster.load(GOLDEN / "cluster.yaml").targets
CHECKOUT = Path("/opt/duel")


def make_job(framework: str = "jax", target: str = "local", **more: Any) -> Job:
    return Job(framework, "resnet50", 1, "standard", "fp32", None, target, **more)


def changed(name: str, **keys: Any) -> Target:
    """A golden target with other values, the validators' judgement left out."""
    return TARGETS[name].model_copy(update=keys)


def slurm(**keys: Any) -> Target:
    return Target.model_validate({"scheduler": "slurm", "python": {"jax": "python", "pytorch": "python"}} | keys)


def bash_accepts(text: str) -> None:
    done = subprocess.run(["bash", "-n"], input=text, text=True, capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def read_as_slurm(text: str) -> list[str]:
    """Slurm takes '#SBATCH' lines up to the first line that is neither empty nor a comment."""
    assert text.startswith("#!")
    found = []
    for line in text.split("\n")[1:]:
        if line.startswith("#SBATCH "):
            found.append(line.removeprefix("#SBATCH "))
        elif line.strip() and not line.startswith("#"):
            break
    return found


def test_the_scripts_are_the_golden_ones() -> None:
    scripts = regenerate.scripts()
    assert len(scripts) == len(TARGETS) * len([*FRAMEWORKS, PAIRED])
    for name, text in scripts.items():
        assert text == (GOLDEN / name).read_text(), regenerate.REMEDY
        bash_accepts(text)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_the_script_runs_exactly_the_planned_command(framework: str) -> None:
    planned = Job(framework, "mnist", 1, "smoke", "bf16", "cpu", "local")
    text = script.render(planned, TARGETS["local"], Path("/opt/my duel"))
    command = text.splitlines()[-1]
    assert shlex.split(command) == ["exec", "$python", f"{framework}/run.py", *planned.options, "--data=data"]


def test_slurm_reads_exactly_the_planned_directives() -> None:
    text = script.render(make_job(target="h100"), TARGETS["h100"], CHECKOUT)
    assert text.splitlines()[0] == "#!/usr/bin/env bash"
    assert read_as_slurm(text) == [
        "--job-name=jax_resnet50_1",
        "--output=/opt/duel/results/logs/%j_0_log.out",
        "--no-requeue",
        "--signal=B:USR2@120",
        "--partition=h100",
        "--nodes=1",
        "--ntasks-per-node=1",
        "--cpus-per-task=8",
        "--gpus-per-node=h100:1",
        "--time=00:30:00",
    ]


@pytest.mark.parametrize(
    ("keys", "own"),
    [
        ({}, ["--job-name=jax_resnet50_1", "--output=/opt/duel/results/logs/%j_0_log.out", "--no-requeue", 60]),
        ({"without": ["--job-name", "--no-requeue"]}, ["--output=/opt/duel/results/logs/%j_0_log.out", 60]),
        ({"without": ["--job-name", "--output", "--no-requeue", "--signal"]}, []),
        ({"directives": ["-J mine", "-o log", "--requeue"]}, [60]),
        ({"directives": ["--signal=USR1@9 --job-name mine"], "without": ["--output"]}, ["--no-requeue"]),
        ({"directives": ["-t 1"], "without": ["--job-name", "--output", "--no-requeue"]}, [15]),
        ({"directives": ["-t 5"], "without": ["--job-name", "--output", "--no-requeue"]}, [30]),
        ({"directives": ["--time=2-0"], "without": ["--job-name", "--output", "--no-requeue"]}, [120]),
        ({"directives": ["--time=0"], "without": ["--job-name", "--output", "--no-requeue"]}, [60]),
        ({"directives": ["--time={nodes}"], "without": ["--job-name", "--output", "--no-requeue"]}, [15]),
    ],
)
def test_what_duel_adds_of_its_own_gives_way(keys: dict[str, Any], own: list[str | int]) -> None:
    """To the site's lines for the same option, and to ``without``. A number: seconds from the warning to the limit."""
    expected = [f"--signal=B:USR2@{line}" if isinstance(line, int) else line for line in own]
    read = read_as_slurm(script.render(make_job(), slurm(**keys), CHECKOUT))
    assert read == [*expected, *(line.replace("{nodes}", "1") for line in keys.get("directives", []))]


def test_an_attempt_s_changes_take_the_place_of_what_they_change() -> None:
    job = make_job(target="h100", changes=("--time=02:00:00", "--exclude=h100-7", "--job-name=again"))
    read = read_as_slurm(script.render(job, TARGETS["h100"], CHECKOUT))
    before = read_as_slurm(script.render(make_job(target="h100"), TARGETS["h100"], CHECKOUT))
    before[before.index("--time=00:30:00")] = "--time=02:00:00"
    assert read == ["--job-name=again", *before[1:], "--exclude=h100-7"]


def test_every_job_of_the_catalogue_has_a_script_that_bash_accepts() -> None:
    for benchmark in BENCHMARKS:
        for use_case in USE_CASES:
            for preset in PRESETS:
                for precision in PRECISIONS:
                    planned = Job("jax", benchmark, use_case, preset, precision, "gpu", "h100")
                    bash_accepts(script.render(planned, TARGETS["h100"], CHECKOUT))


def test_an_undefined_value_is_an_error() -> None:
    with pytest.raises(jinja2.UndefinedError):
        script.ENVIRONMENT.get_template("job.sh.j2").render(framework="jax")


def test_the_target_s_device_is_the_job_s_unless_the_command_line_has_one() -> None:
    for asked, expected in ((None, "gpu"), ("cpu", "cpu")):
        job = dataclasses.replace(make_job(target="h100"), device=asked)
        assert re.findall(r"--device (\S+)", script.render(job, TARGETS["h100"], CHECKOUT)) == [expected]
    assert "--device" not in script.render(make_job(), TARGETS["local"], CHECKOUT)


@pytest.mark.parametrize(
    ("internet", "mode", "said"),
    [
        (True, "auto", []),
        (False, "auto", ["offline"]),
        (True, "online", ["online"]),
        (False, "online", ["online"]),
        (True, "disabled", ["disabled"]),
    ],
)
def test_without_internet_weights_and_biases_is_offline_unless_told_otherwise(
    internet: bool, mode: str, said: list[str]
) -> None:
    text = script.render(make_job(), slurm(internet=internet, wandb={"project": "p", "mode": mode}), CHECKOUT)
    assert re.findall(r"^export WANDB_MODE=(.*)$", text, re.MULTILINE) == said


@pytest.mark.parametrize("scheduler", ["local", "slurm"])
def test_a_target_without_the_interpreter_says_so(scheduler: str) -> None:
    target = slurm(scheduler=scheduler, python={"jax": "python", "pytorch": None})
    assert script.render(make_job("jax", "tpu"), target, CHECKOUT)
    with pytest.raises(UserError, match=r"'tpu' has no interpreter for pytorch \(cluster\.yaml: targets\.tpu\.python"):
        script.render(make_job("pytorch", "tpu"), target, CHECKOUT)
    proof = dataclasses.replace(make_job("pytorch", "tpu"), use_case=VALIDATE)
    with pytest.raises(UserError, match="valid: a target with interpreters for both"):
        script.render(proof, target, CHECKOUT)


# What the script itself says when it cannot run the job.


def run(text: str, folder: Path, **environment: str) -> "subprocess.CompletedProcess[str]":
    path = folder / "script.sh"
    path.write_text(text)
    known = clean_environment() | environment
    return subprocess.run(["bash", str(path)], env=known, capture_output=True, text=True, timeout=60, check=False)


def test_a_script_for_slurm_run_by_hand_says_how_to_start_it(tmp_path: Path) -> None:
    target = slurm(setup={"job": ["touch here"], "task": ["touch here"]}, launcher=None)
    done = run(script.render(make_job(), target, tmp_path), tmp_path)
    assert done.returncode == 98
    assert done.stderr == f"{tmp_path}/script.sh is for Slurm: sbatch slurm_scripts/jax_resnet50_1.sh\n"
    assert not (tmp_path / "here").exists()


@pytest.mark.parametrize("scheduler", ["local", "slurm"])
def test_a_script_whose_interpreter_or_checkout_is_not_there_says_so(tmp_path: Path, scheduler: str) -> None:
    keys = {"launcher": None} if scheduler == "slurm" else {}
    target = slurm(scheduler=scheduler, python={"jax": ".venv/no/python", "pytorch": None}, **keys)
    done = run(script.render(make_job(target="mine"), target, tmp_path), tmp_path, SLURM_JOB_ID="1")
    assert done.returncode == 96
    where = "no interpreter .venv/no/python (cluster.yaml: targets.mine.python.jax); make jax-env makes one"
    assert where in done.stderr
    done = run(script.render(make_job(), target, tmp_path / "gone"), tmp_path, SLURM_JOB_ID="1")
    assert done.returncode == 97
    assert "gone: No such file or directory" in done.stderr


def test_a_script_changed_by_hand_is_told_apart() -> None:
    for name in TARGETS:
        text = script.render(make_job(target=name), TARGETS[name], CHECKOUT)
        assert script_state(text) == RENDERED
        for other in (
            text + "\n",
            text[:-1],
            text.replace("--precision fp32", "--precision bf16"),
            text.replace("#!/usr/bin/env bash", "#!/bin/bash"),
            text.replace("\n", "\r\n"),
            text.split("\n", 2)[0] + "\n" + text.split("\n", 2)[2],
            "",
            "#!/bin/bash",
        ):
            assert script_state(other) == EDITED


# What is the site's own passes as it stands; what is a value can be nothing else.


def test_the_target_s_own_lines_pass_verbatim() -> None:
    line = "module load 'a b' && export X=\"$(echo 1)\" {% raw %} {{ 7 }}  # mine"
    setup = {scope: [line] for scope in ("job", "node", "task")}
    target = slurm(directives=["--comment='x y' # {% raw %}"], setup=setup, launcher='srun --x="$(echo {{ 7 }})"')
    text = script.render(make_job(), target, CHECKOUT)
    lines = text.splitlines()
    assert lines.count(line) == 1, "the batch shell's"
    quoted = shlex.quote(line)[1:-1]
    assert text.count(quoted) == 2, "a node's and a task's, inside of a word"
    assert "#SBATCH --comment='x y' # {% raw %}" in lines
    assert any(found.startswith('srun --x="$(echo {{ 7 }})" bash ') for found in lines)


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"setup": {"job": ["echo 'a"]}}, "setup.job: line 1: unexpected EOF while looking for matching"),
        ({"setup": {"job": ["if true; then"]}}, "setup.job: line 2: syntax error: unexpected end of file"),
        ({"setup": {"task": ["fi"]}}, "setup.task: line 1: syntax error near unexpected token `fi'"),
        ({"setup": {"node": ["}", "{ :"]}}, "setup.node: line 1: syntax error near unexpected token `}'"),
        ({"setup": {"submit": ["cat <<END", "a"]}}, "setup.submit: line 2: warning: here-document"),
        ({"setup": {"job": ["module load a \\"]}}, "setup.job: the last line ends in a backslash"),
        ({"launcher": "srun ("}, "launcher: line 1: syntax error near unexpected token"),
        ({"launcher": "srun <<END"}, "launcher: line 1: warning: here-document"),
        ({"node_launcher": "if srun"}, "node_launcher: line 2: syntax error"),
    ],
)
def test_lines_that_would_swallow_the_script_are_named_before_it_is_written(keys: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match="^cluster.yaml: targets.mine." + re.escape(said)):
        script.render(make_job(target="mine"), slurm(**keys), CHECKOUT)


@pytest.mark.parametrize(
    "setup", [["if true; then", "    module load a", "fi"], ["cat <<END", "a", "END"], ["module load a \\", "    b"]]
)
def test_lines_may_belong_together(setup: list[str]) -> None:
    text = script.render(make_job(), slurm(setup={"job": setup, "task": setup}), CHECKOUT)
    bash_accepts(text)
    assert "\n".join(setup) in text


HOSTILE = st.text(st.characters(exclude_categories=("C", "Zl", "Zp", "Zs"), include_characters=" "), min_size=1)
HOSTILE |= st.lists(
    st.sampled_from(["'", '"', "$(x)", "`x`", ";", "#", "%j", "{% raw %}", "{{ 7 }}", "{name}", "-x", "\\", " ", "&"]),
    min_size=1,
).map("".join)


@given(root=HOSTILE, python=HOSTILE, data=HOSTILE, project=HOSTILE, name=st.sampled_from(["local", "h100"]))
def test_no_value_breaks_out_of_its_word(root: str, python: str, data: str, project: str, name: str) -> None:
    keys = {
        "python": TARGETS[name].python.model_copy(update={"jax": python}),
        "data": data,
        "wandb": TARGETS[name].wandb.model_copy(update={"project": project}),
        "without": ["--output"],
    }
    hostile = script.render(make_job(target=name), changed(name, **keys), Path("/" + root))
    bash_accepts(hostile)
    plain = script.render(make_job(target=name), changed(name, without=["--output"]), Path("/plain"))
    assert read_as_slurm(hostile) == read_as_slurm(plain)
    words = shlex.split(hostile, comments=True)
    assert len(words) == len(shlex.split(plain, comments=True))
    assert f"WANDB_PROJECT={project}" in words
    assert f"--data={data}" in words
    assert (python if name == "h100" else f"python={python}") in words
    assert str(Path("/" + root)) in words
    if name == "h100":  # and in the word that each task's shell gets
        inner = [
            shlex.split(word[5:]) for text in (hostile, plain) for word in shlex.split(text) if word[:5] == "task="
        ]
        assert len(inner[0]) == len(inner[1])
        assert str(Path("/" + root)) in inner[0]


@pytest.mark.parametrize(
    "root",
    ["/opt/my duel", "/opt/a;b", "/opt/a#b", "/opt/a'b", '/opt/a"b', "/opt/%j", "/opt/a\\b", "/opt/a\nb", "/\u2028"],
)
def test_a_checkout_whose_path_cannot_stand_in_a_directive_is_refused_on_slurm(root: str) -> None:
    with pytest.raises(UserError, match="cannot appear in an #SBATCH line"):
        script.render(make_job(target="h100"), TARGETS["h100"], Path(root))
    assert script.render(make_job(target="h100"), changed("h100", without=["--output"]), Path(root))


def test_a_job_says_its_variant_in_its_name_and_nothing_else() -> None:
    plain = make_job()
    assert plain.stem == "jax_resnet50_1"
    assert dataclasses.replace(plain, target="h100").stem == plain.stem
    assert (
        dataclasses.replace(plain, precision="bf16", preset="smoke", device="gpu").stem
        == "jax_resnet50_1_bf16_smoke_gpu"
    )
