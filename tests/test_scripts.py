"""Rendered scripts: pinned by golden files, valid for bash, with exactly the planned directives."""

import dataclasses
import shlex
import subprocess
from pathlib import Path

import jinja2
import pytest
from conftest import ROOT
from golden import regenerate
from hypothesis import given
from hypothesis import strategies as st

from duel.catalogue import BENCHMARKS, FRAMEWORKS, PRECISIONS, PRESETS, USE_CASES
from duel.errors import UserError
from duel.job import Job
from duel.launch import cluster, script
from duel.launch.cluster import Target

GOLDEN = ROOT / "tests" / "golden"
TARGETS = cluster.load(GOLDEN / "cluster.yaml").targets


def job(framework: str = "jax", target: str = "local", benchmark: str = "resnet50") -> Job:
    return Job(framework, benchmark, 1, "standard", "fp32", None, target)


def bash_accepts(text: str) -> None:
    subprocess.run(["bash", "-n"], input=text, text=True, check=True)


def test_the_scripts_are_the_golden_ones() -> None:
    scripts = regenerate.scripts()
    assert len(scripts) == len(TARGETS) * len(FRAMEWORKS)
    for name, text in scripts.items():
        assert text == (GOLDEN / name).read_text()
        bash_accepts(text)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_the_script_runs_exactly_the_planned_command(framework: str) -> None:
    planned = Job(framework, "mnist", 1, "smoke", "bf16", "cpu", "local")
    text = script.render(planned, TARGETS["local"], Path("/opt/my duel"))
    command = text.splitlines()[-1]
    assert shlex.split(command) == ["exec", "$python", f"{framework}/run.py", *planned.options, "--data", "data"]


def test_slurm_reads_exactly_the_planned_directives() -> None:
    """Slurm takes '#SBATCH' lines up to the first command."""
    lines = script.render(job(target="h100"), TARGETS["h100"], Path("/opt/duel")).splitlines()
    first_command = next(number for number, line in enumerate(lines) if line and not line.startswith("#"))
    directives = [line.removeprefix("#SBATCH ") for line in lines if line.startswith("#SBATCH ")]
    assert directives == [
        "--job-name=jax_resnet50_1",
        "--output=/opt/duel/results/logs/%j_0_log.out",
        "--no-requeue",
        *TARGETS["h100"].directives,
    ]
    assert all(lines.index(f"#SBATCH {directive}") < first_command for directive in directives)
    assert lines[0] == "#!/usr/bin/env bash"


def test_every_job_of_the_catalogue_has_a_script_that_bash_accepts() -> None:
    for benchmark in BENCHMARKS:
        for use_case in USE_CASES:
            for preset in PRESETS:
                for precision in PRECISIONS:
                    planned = Job("jax", benchmark, use_case, preset, precision, "gpu", "h100")
                    bash_accepts(script.render(planned, TARGETS["h100"], Path("/opt/duel")))
                    assert planned.run_id()


def test_an_undefined_value_is_an_error() -> None:
    with pytest.raises(jinja2.UndefinedError):
        script.ENVIRONMENT.get_template("job.sh.j2").render(framework="jax")


HOSTILE = st.text(st.characters(min_codepoint=32, max_codepoint=126), min_size=1, max_size=30)


@given(root=HOSTILE, python=HOSTILE, data=HOSTILE, project=HOSTILE)
def test_no_value_breaks_out_of_its_word(root: str, python: str, data: str, project: str) -> None:
    target = TARGETS["local"]
    hostile = target.model_copy(
        update={
            "python": target.python.model_copy(update={"jax": python}),
            "data": data,
            "wandb": target.wandb.model_copy(update={"project": project}),
        }
    )
    text = script.render(job(), hostile, Path("/" + root))
    bash_accepts(text)
    words = shlex.split(text, comments=True)
    plain = shlex.split(script.render(job(), target, Path("/plain")), comments=True)
    assert len(words) == len(plain)
    assert words[-1] == data
    assert f"WANDB_PROJECT={project}" in words
    assert f"python={python}" in words
    assert str(Path("/" + root)) in words


@pytest.mark.parametrize("root", ["/opt/my duel", "/opt/a;b", "/opt/a#b", "/opt/a'b", '/opt/a"b', "/opt/%j"])
def test_a_checkout_whose_path_cannot_stand_in_a_directive_is_refused_on_slurm(root: str) -> None:
    with pytest.raises(UserError, match="cannot stand in an #SBATCH line"):
        script.render(job(target="h100"), TARGETS["h100"], Path(root))


def test_the_target_s_own_lines_pass_verbatim() -> None:
    line = "module load 'a b' && export X=\"$(echo 1)\"  # mine"
    target: Target = TARGETS["h100"].model_copy(update={"setup": [line], "directives": ["--comment='x y'"]})
    lines = script.render(job(target="h100"), target, Path("/opt/duel")).splitlines()
    assert line in lines
    assert "#SBATCH --comment='x y'" in lines


def test_a_job_says_its_variant_in_its_name_and_nothing_else() -> None:
    plain = job()
    assert plain.stem == "jax_resnet50_1"
    assert dataclasses.replace(plain, target="h100").stem == plain.stem
    assert (
        dataclasses.replace(plain, precision="bf16", preset="smoke", device="gpu").stem
        == "jax_resnet50_1_bf16_smoke_gpu"
    )
