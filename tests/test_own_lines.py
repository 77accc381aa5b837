"""A paired script where each framework needs its own modules, variables or container."""

import json
from pathlib import Path

import pytest
from conftest import Site
from test_sites import CHECKOUT, make_job, make_target
from test_sites import Site as Stand
from test_sites import site as stand  # noqa: F401  (a fixture)
from test_slurm import CPU

from duel.catalogue import FRAMEWORKS, PAIRED
from duel.errors import UserError
from duel.launch import script
from duel.launch.schema import Side

BOTH = make_job(PAIRED)
OWN = {
    "setup": {"job": ["module purge"], "task": ["export COMMON=1"]},
    "variants": [
        {"when": {"framework": "jax"}, "setup": {"job": ["module load jax"], "task": ["export OWN=jax"]}},
        {"when": {"framework": "pytorch"}, "setup": {"job": ["module load torch"]}},
    ],
}


def test_what_both_need_is_the_script_s_and_the_rest_is_each_side_s() -> None:
    found = make_target(**OWN).for_job(BOTH)
    assert found.setup.job == ["module purge"]
    assert found.setup.task == ["export COMMON=1"]
    assert found.sides == {
        "jax": Side(None, ["module load jax"], ["export OWN=jax"]),
        "pytorch": Side(None, ["module load torch"], []),
    }
    assert found.for_job(BOTH) == found
    assert found.for_job(BOTH).sides == found.sides
    assert found.launcher == "srun"
    own = make_target(variants=[{"when": {"framework": "pytorch"}, "directives": ["--account=t"]}])
    assert own.one_sided(BOTH) == [0], "directives of one framework cannot hold for a job of both"


def test_a_target_that_starts_both_alike_has_no_sides() -> None:
    assert make_target(setup={"job": ["module load both"]}).for_job(BOTH).sides == {}
    text = script.render(BOTH, make_target(), CHECKOUT)
    assert "DUEL_START" not in text
    assert "--paired=pytorch=python" in text
    assert "--paired=jax" not in text


def test_lines_that_replace_the_target_s_belong_to_their_side() -> None:
    variants = [{"when": {"framework": "jax"}, "setup_instead": {"job": ["module load rocm"]}}]
    found = make_target(setup={"job": ["module load cuda"]}, variants=variants).for_job(BOTH)
    assert found.setup.job == []
    assert {name: side.job for name, side in found.sides.items()} == {
        "jax": ["module load rocm"],
        "pytorch": ["module load cuda"],
    }


def test_a_line_with_the_framework_s_name_is_each_side_s() -> None:
    found = make_target(setup={"job": ["a", "module load {framework}"]}).for_job(BOTH)
    assert found.setup.job == ["a"]
    assert found.sides == {name: Side(None, [f"module load {name}"], []) for name in FRAMEWORKS}


def test_a_container_for_each_side_is_for_one_device() -> None:
    target = make_target(launcher="srun apptainer exec {framework}.sif", devices_per_node=[1, 2])
    found = target.for_job(BOTH)
    assert found.launcher is None
    assert {name: side.launcher for name, side in found.sides.items()} == {
        name: f"srun apptainer exec {name}.sif" for name in FRAMEWORKS
    }
    with pytest.raises(UserError, match="a launcher for each framework: --paired can use them on one device, not on 2"):
        target.for_job(make_job(PAIRED, devices=2))


def test_what_one_side_is_refused_both_are() -> None:
    target = make_target(variants=[{"when": {"framework": "pytorch"}, "refuse": "no PyTorch here"}])
    assert target.for_job(make_job("jax")).launcher == "srun"
    with pytest.raises(UserError, match=r"\(pytorch\): no PyTorch here"):
        target.for_job(BOTH)


@pytest.mark.parametrize("where", ["setup", "launcher"])
def test_a_side_s_lines_are_checked_by_bash(where: str) -> None:
    wrong = {"setup": {"task": ["if"]}} if where == "setup" else {"launcher": "srun $("}
    with pytest.raises(UserError, match=f"{where} for jax: "):
        script.render(BOTH, make_target(variants=[{"when": {"framework": "jax"}} | wrong]), CHECKOUT)


PYTHON = """
if [[ $* != *--run_folder* ]]; then  # the supervisor starts a process of each side
    for side in JAX PYTORCH; do
        start=DUEL_START_$side
        bash -eo pipefail -c "${!start}" test "$0" --run_folder "$side"
    done
else
    echo "$COMMON ${OWN-none} ${DUEL_VARIABLES//$'\\n'/ }" | grep -o "^1 [a-z]*\\|COMMON\\|OWN" | tr '\\n' ' ' >>"$LOG"
    echo >>"$LOG"
fi
"""


@pytest.mark.parametrize(
    ("scheduler", "launcher"),
    [("local", None), ("slurm", None), ("slurm", "srun"), ("slurm", "srun apptainer exec /images/{framework}.sif")],
)
def test_each_process_has_its_side_s_lines_and_container(stand: Stand, scheduler: str, launcher: str | None) -> None:  # noqa: F811 (the fixture)
    stand.python(PYTHON)
    target = make_target(**OWN, scheduler=scheduler, **({"launcher": launcher} if scheduler == "slurm" else {}))
    assert stand.run(target, BOTH) == 0
    called = [line.strip() for line in stand.called() if not line.startswith("python")]
    expected = ["module purge", *(["srun"] if launcher == "srun" else [])]
    for name, module, own in (("jax", "jax", "jax"), ("pytorch", "torch", "none")):
        expected += [f"module load {module}"]
        expected += ["srun", f"apptainer exec /images/{name}.sif"] if "apptainer" in str(launcher) else []
        expected += [f"1 {own} COMMON" + (" OWN" if own == "jax" else "")]
    assert called == expected


SIDES = """
    variants:
      - when: {framework: jax}
        setup: {task: ['echo "jax $1" >> started', export JAX_TRACEBACK_FILTERING=off OMP_NUM_THREADS=1]}
      - when: {framework: pytorch}
        setup: {task: ['echo "pytorch $1" >> started', export TORCH_SHOW_CPP_STACKTRACES=0]}
"""


def test_each_measuring_process_of_a_paired_job_has_its_framework_s_lines(site: Site) -> None:
    site.target(*CPU, more=SIDES)
    site.main("--benchmark", "gcn", "--use_case", "1", "--preset", "smoke", "--paired", "--wait")
    run = site.only()
    assert [(row.framework, row.status) for row in run.rows()] == [(name, "finished") for name in FRAMEWORKS]
    set_by_target = {row.framework: json.loads(str(row.variables)).get("target", {}) for row in run.rows()}
    assert set_by_target == {
        "jax": {"JAX_TRACEBACK_FILTERING": "off"},  # threads are Duel's business
        "pytorch": {"TORCH_SHOW_CPP_STACKTRACES": "0"},
    }
    assert json.loads(str(run.rows()[0].variables)).get("unnamed", {}) == {}
    started = (site.folder / "started").read_text().split("\n")[:-1]
    pythons = {line.partition(" ")[0]: line.partition(" ")[2] for line in started}
    assert list(pythons) == list(FRAMEWORKS)
    assert len(started) == len(FRAMEWORKS), "once for each process, and not for the supervisor"
    assert all(Path(python).parent.parent.name == name for name, python in pythons.items())
