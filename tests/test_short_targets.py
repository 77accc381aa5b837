"""Targets that say less: inherited keys, amounts per device, and what a site refuses or forbids."""

from pathlib import Path

import pytest
from test_cluster import GOOD, error_of, job

from duel.errors import UserError
from duel.launch import cluster, script

SHORT = """\
default: gpu
defaults:
  python: {jax: a/python, pytorch: b/python}
  directives: [--account=mine, --time=30]
targets:
  here: {scheduler: local}
  gpu:
    scheduler: slurm
    nodes: 2
    devices_per_node: 4
    per_device: {cpus: 8}
    directives:
      - --partition=gpu
      - --cpus-per-task={cpus_per_device}
      - --mem={cpus_per_node}G
    setup: {job: [module load cuda], task: [export A=1]}
  long:
    like: gpu
    directives: ["--time=04:00:00"]
    variants:
      - when: {nodes: 2}
        refuse: one node at a time
      - when: {framework: jax}
        launcher: null
        setup_instead: {job: [module load rocm]}
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "cluster.yaml"


def test_a_target_starts_from_another_or_from_the_defaults(path: Path) -> None:
    path.write_text(SHORT)
    loaded = cluster.load(path)
    assert loaded.targets["here"].directives == []
    assert loaded.targets["here"].python.jax == "a/python"
    plain = ["--partition=gpu", "--cpus-per-task=8", "--mem=32G"]
    assert loaded.targets["gpu"].for_job(job(target="gpu")).directives == ["--account=mine", "--time=30", *plain]
    longer = loaded.targets["long"].for_job(job(target="long"))
    assert longer.directives == ["--account=mine", "--time=04:00:00", *plain]
    assert (longer.launcher, longer.setup.job, longer.setup.task) == (None, ["module load rocm"], ["export A=1"])
    beside = loaded.targets["long"].for_job(job(target="long", framework="pytorch"))
    assert (beside.launcher, beside.setup.job) == ("srun", ["module load cuda"])
    for line, number in (("--account=mine", 4), ("--mem=32G", 15), ("--time=04:00:00", 19)):
        assert loaded.where(job(target="long"), line) == f"cluster.yaml:{number}"


def test_a_variant_refuses_a_shape_with_its_reason(path: Path) -> None:
    path.write_text(SHORT)
    target = cluster.load(path).targets["long"]
    with pytest.raises(UserError, match=r"no job of 2 x 1 devices \(jax\): one node at a time \(clus"):
        target.for_job(job(2, target="long"))


def test_parts_of_several_nodes_can_be_refused(path: Path) -> None:
    lines = ["    variants:", "      - when: {nodes: 2+, devices_per_node: 1-3}", "        refuse: whole nodes only"]
    path.write_text(
        "\n".join([SHORT.partition("  long:")[0].replace("devices_per_node: 4", "devices_per_node: [1, 4]"), *lines])
    )
    target = cluster.load(path).targets["gpu"]
    assert target.for_job(job(1, 1, target="gpu")).launcher == "srun"
    assert target.for_job(job(2, 2, target="gpu")).launcher == "srun", "it gets four"
    with pytest.raises(UserError, match=r"no job of 2 x 1 devices .*: whole nodes only"):
        target.for_job(job(2, 1, target="gpu"))


def test_a_placeholder_of_an_amount_that_is_not_given_is_named(path: Path) -> None:
    text = error_of(path, SHORT.replace("{cpus: 8}", "{gib: 8}"))
    assert "targets.gpu: '--cpus-per-task={cpus_per_device}' needs 'per_device: {cpus: NUMBER}'" in text


@pytest.mark.parametrize("kept", ["--begin", "--time"])
def test_an_option_that_a_site_forbids_is_never_added(path: Path, kept: str) -> None:
    path.write_text(SHORT.replace("    nodes: 2\n", f"    nodes: 2\n    without: {kept}\n"))
    target = cluster.load(path).targets["gpu"]
    text = script.render(job(target="gpu", changes=("--time=99", "--exclude=n1")), target, Path("/opt/duel"))
    assert ("--time=99" in text) == (kept != "--time")
    assert "--exclude=n1" in text
    if kept == "--begin":
        with pytest.raises(UserError, match=r"forbids --begin .* repeat the command at another time"):
            script.render(job(target="gpu", delay=7200), target, Path("/opt/duel"))


def test_a_later_session_does_not_replace_the_targets_own_begin(path: Path) -> None:
    path.write_text(SHORT.replace("- --partition=gpu\n", "- --partition=gpu\n      - -b 20:00\n"))
    target = cluster.load(path).targets["gpu"]
    assert "-b 20:00" in script.render(job(target="gpu"), target, Path("/opt/duel"))
    with pytest.raises(UserError, match=r"has its own --begin=20:00 \(.*targets.gpu.directives\), which starts later"):
        script.render(job(target="gpu", delay=7200), target, Path("/opt/duel"))


def test_a_launcher_may_be_a_folded_line(path: Path) -> None:
    text = SHORT.replace("    nodes: 2\n", "    nodes: 2\n    launcher: >\n      srun\n      --mpi=none\n")
    path.write_text(text)
    assert cluster.load(path).targets["gpu"].launcher == "srun --mpi=none"


def test_a_value_with_an_anchor_is_of_its_own_kind(path: Path) -> None:
    path.write_text(
        GOOD + "    nodes: &many 2\n    internet: &web false\n  other:\n    scheduler: slurm\n"
        "    python: {jax: null, pytorch: null}\n    nodes: *many\n    internet: *web\n    pause: &p 0.5\n"
    )
    found = cluster.load(path).targets["other"]
    assert (found.nodes, found.internet, found.pause) == (2, False, 0.5)


def test_a_sender_s_directives_have_no_job_to_take_a_count_from(path: Path) -> None:
    slurm = GOOD.replace("scheduler: local", "scheduler: slurm")
    said = "sender: {devices} is of a job, which the sender is not; write a number"
    assert said in error_of(path, slurm + "    sender: ['--gpus={devices}']\n")
