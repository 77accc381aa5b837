"""Rendered scripts: pinned by golden files, valid for bash, with exactly the planned directives."""

import contextlib
import dataclasses
import io
import json
import re
import shlex
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

import jinja2
import main as main_module
import pytest
from conftest import ROOT, clean_environment
from golden import regenerate
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from duel.catalogue import BENCHMARKS, FRAMEWORKS, MANY, PAIRED, PRECISIONS, PRESETS, PRODUCTS, SCALINGS, USE_CASES
from duel.errors import UserError
from duel.job import EDITED, RENDERED, Job, script_state
from duel.launch import cluster, plan, script
from duel.launch.cluster import Target
from duel.modes import MODES
from duel.options import check_use_cases
from duel.results import Results

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
                    assert planned.run_id()


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
    with pytest.raises(UserError, match="cannot stand in an #SBATCH line"):
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


# Any cluster file with any command line: a script as it was planned, or a clear error.

INJECTIONS = (
    *(
        "'",
        '"',
        "''",
        '"a b"',
        "$(touch x)",
        "`touch x`",
        "${IFS}",
        "a\nb",
        "\n",
        "\r",
        "\t",
        "\x00",
        "\x1b[0m",
        ";",
        "&",
    ),
    *("|", "#", " #SBATCH --x", "\n#SBATCH --x", "%", "%j", "{% raw %}", "{{ 7 }}", "{#", "{nodes}", "{other}", "\\"),
    *(
        "\x85",
        "\u2028",
        "\u2029",
        "\ufeff",
        "\u202e",
        "-",
        "--",
        "-x",
        "--x",
        "=",
        "é",
        "世",
        " ",
        "",
        "()",
        "<<X",
        "}",
    ),
)
odd_text = (
    st.sampled_from(INJECTIONS) | st.lists(st.sampled_from(INJECTIONS), max_size=4).map("".join) | st.text(max_size=9)
)
odd = st.none() | st.booleans() | st.integers() | st.floats() | odd_text | st.lists(odd_text, max_size=2)


def mostly(*good: Any, rarely: st.SearchStrategy[Any] = odd_text) -> st.SearchStrategy[Any]:
    """One of ``good``, and one time in twenty what is less so."""
    return st.integers(0, 19).flatmap(lambda number: rarely if number == 19 else st.sampled_from(good))


value = mostly("python", ".venv/jax/bin/python", "/opt/a b/python", "it's", "$(touch x)", "{{ 7 }}", "#", "-x", "`x`")
directive = mostly(
    *(
        "--partition=gpu",
        "-p gpu -A a",
        "--gres=gpu:{devices_per_node}",
        "--gpus={devices}",
        "--nodes={nodes}",
        "-C a&b",
    ),
    *("--time=10", "-t 1-0", "--mem=0", "--comment='a b'", "--job-name=x", "-o log", "--requeue", "--x={% raw %} # y"),
    rarely=odd_text.map("--x={}".format) | odd_text,
)
line = mostly(
    "module load a", "export A='b c'", "true  # {{ 7 }}", 'echo "$(date)" {name}', "set +u", "{% raw %}", "#SBATCH -x"
)
launcher = mostly("srun", "ibrun", "mpirun -np {tasks}", 'srun --x="$A" apptainer exec a.sif', "env {{ 7 }}")
directive_lists, line_lists = st.lists(directive, max_size=4), st.lists(line, max_size=2)
setups = st.fixed_dictionaries({}, optional=dict.fromkeys(("submit", "job", "node", "task"), line_lists))
span = st.sampled_from([1, 2, "1-2", "2+", "4+"])
variants = st.fixed_dictionaries(
    {
        "when": st.fixed_dictionaries(
            {}, optional={"framework": st.sampled_from(["jax", "pytorch"]), "nodes": span, "devices": span}
        )
    },
    optional={"directives": directive_lists, "launcher": launcher, "setup": setups},
)
KEYS: dict[str, st.SearchStrategy[Any]] = {
    "device": st.sampled_from(["cpu", "gpu", "tpu", "mps"]),
    "nodes": st.integers(1, 4),
    "devices_per_node": st.lists(st.integers(1, 8), min_size=1, max_size=3),
    "max_jobs": st.integers(1, 9),
    "internet": st.booleans(),
    "directives": directive_lists,
    "without": st.lists(st.sampled_from(["--job-name", "--output", "--no-requeue", "--signal"])),
    "shebang": mostly("#!/bin/bash -l", "#!/bin/sh", rarely=odd_text.map("#!{}".format)),
    "submit": mostly("sbatch", "site-submit --x"),
    "pass_variables": st.lists(mostly("SBATCH_ACCOUNT", "A"), max_size=1),
    "pause": st.floats(0, 9),
    "launcher": st.none() | launcher,
    "node_launcher": launcher,
    "setup": setups,
    "variants": st.lists(variants, max_size=2),
    "data": value,
    "wandb": st.fixed_dictionaries({}, optional={"project": value, "mode": st.sampled_from(["auto", "online"])}),
}
pythons = st.fixed_dictionaries({"jax": value, "pytorch": mostly("python", None)})
names = mostly("gpu")
OPTIONS: dict[str, st.SearchStrategy[str]] = {
    "--benchmark": st.sampled_from(list(BENCHMARKS)),
    "--use_case": st.sampled_from(["1", "train_multi", "3", "2,4", "inference"]),
    "--framework": st.sampled_from(list(FRAMEWORKS)),
    "--nodes": mostly("1", rarely=st.integers(0, 4).map(str)),
    "--devices": mostly("1", "2", rarely=st.integers(0, 8).map(str)),
    "--batch_sizes": mostly("8", "1,32"),
    "--products": mostly(*PRODUCTS, "norms,materialised"),
    "--microbatch": mostly("1", "4"),
    "--scaling": st.sampled_from(list(SCALINGS)),
    "--mode": st.sampled_from([*MODES, "default+channels_last", "tuned-compile", "default+threads=1"]),
    "--preset": st.sampled_from(list(PRESETS)),
    "--precision": st.sampled_from(list(PRECISIONS)),
    "--device": mostly("cpu", "gpu", "tpu"),
    "--target": names,
}


@st.composite
def cluster_files(draw: st.DrawFn) -> str:
    """JSON, which is YAML too: mostly a valid one, in one of ten with something that does not belong there."""
    chosen = draw(st.lists(st.sampled_from(sorted(KEYS)), unique=True, max_size=6))
    target = {"scheduler": draw(st.sampled_from(["slurm", "slurm", "local"])), "python": draw(pythons)}
    target |= {key: draw(KEYS[key]) for key in chosen}
    if draw(st.integers(0, 9)) == 9:
        target[draw(st.sampled_from([*KEYS, "scheduler", "python", "gpus", "1"]))] = draw(odd)
    name = draw(names)
    # NaN and surrogates are no YAML in JSON's way of writing, which is an error like another.
    return json.dumps({"default": name, "targets": {name: target}})


@st.composite
def command_lines(draw: st.DrawFn) -> list[str]:
    chosen = {"--benchmark", "--use_case", "--framework", *draw(st.sets(st.sampled_from(sorted(OPTIONS)), max_size=3))}
    words = [word for name in sorted(chosen) for word in (name, draw(OPTIONS[name]))]
    if draw(st.integers(0, 9)) == 9:
        words[draw(st.integers(0, len(words) - 1))] = draw(odd_text)
    return words


def test_any_cluster_file_with_any_command_line_is_a_plan_or_a_clear_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "cluster.yaml"
    parser = main_module.command_line()
    seen: Counter[str] = Counter()

    @settings(max_examples=2000, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])
    @given(
        file=cluster_files(),
        words=command_lines(),
    )
    def each(file: str, words: list[str]) -> None:
        path.write_text(file)
        said = io.StringIO()
        try:
            with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
                args = parser.parse_args(words)
                check_use_cases(parser, args, args.use_case or ())
        except SystemExit as error:
            assert error.code in (0, 2)
            assert error.code == 0 or "main.py: error: " in said.getvalue()
            seen["command line"] += 1
            return
        if args.benchmark is None or args.use_case is None:
            return
        try:
            described = cluster.load(path)
            with contextlib.redirect_stderr(said):
                jobs = plan.jobs(args, described, Results(tmp_path))
            target = described.targets[jobs[0].target]
            texts = [script.render(job, target, CHECKOUT) for job in jobs]
        except UserError as error:
            assert re.match(r"cluster\.yaml|(unknown )?target |several devices|--(micro)?batch|--mode", str(error)), (
                error
            )
            seen["error"] += 1
            return
        seen[target.scheduler] += 1
        for job, text in zip(jobs, texts, strict=True):
            check(text, job, target)

    each()
    assert min(seen[what] for what in ("command line", "error", "local", "slurm")) > 50, seen


def check(text: str, job: Job, target: Target) -> None:
    bash_accepts(text)
    assert script_state(text) == RENDERED
    made = target.for_job(job)
    lines = text.split("\n")
    for own in made.setup.job:
        assert own in lines
    read = read_as_slurm(text)
    assert all(directive.isprintable() for directive in read)
    command = [f"{job.framework}/run.py", *job.options]
    if target.device and not job.device:
        command += ["--device", target.device]
    command.append(f"--data={target.data}")
    command += ["--spawn"] if job.use_case in MANY and target.scheduler == "local" else []
    if target.scheduler == "local":
        assert read == []
        assert lines[-2] == f'exec "$python" {shlex.join(command)}'
    else:
        assert read == script.directives_of(job, made, CHECKOUT)
        added = [directive for directive in read if directive not in made.directives]
        assert [directive.split("=")[0] for directive in added] == [
            name for name in ("--job-name", "--output", "--no-requeue", "--signal") if name in " ".join(added)
        ]
        assert [directive for directive in read if directive not in added] == made.directives
        assert not {directive.split("=")[0] for directive in added} & set(target.without)
        python = shlex.quote(getattr(target.python, job.framework))
        started = f'bash -eo pipefail -c "$task" {job.stem}.sh {python} {shlex.join(command)} &'
        assert lines.count(f"{made.launcher} {started}" if made.launcher else started) == 1
