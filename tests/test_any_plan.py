"""Any cluster file with any command line: a script as it was planned, or a clear error."""

import contextlib
import io
import json
import re
import shlex
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_scripts import CHECKOUT, bash_accepts, read_as_slurm

from duel.catalogue import BENCHMARKS, FRAMEWORKS, MANY, PRECISIONS, PRESETS, PRODUCTS, SCALINGS
from duel.cli import main as cli
from duel.errors import UserError
from duel.job import RENDERED, Job, script_state
from duel.launch import cluster, plan, script
from duel.launch.schema import Target
from duel.modes import MODES
from duel.options import check_use_cases
from duel.results import Results

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
    parser = cli.SUBMIT.parser()
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
                args = parser.parse(words)
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
            assert re.match(
                r"cluster\.yaml|(unknown )?target |use cases 2 and 4 need|--(micro)?batch|--mode|nothing is left",
                str(error),
            ), error
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
