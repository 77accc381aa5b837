"""A target of cluster.yaml as it is for one job: its count of devices, its variants, its placeholders."""

import pytest
from test_cluster import job
from test_scripts import slurm

from duel.errors import UserError
from duel.launch.values import PLACEHOLDERS


def test_all_that_a_variant_is_for_must_hold() -> None:
    variants = [{"when": {"framework": "jax", "nodes": "2+", "devices": "8+"}, "directives": ["--qos=big"]}]
    target = slurm(nodes=4, devices_per_node=[1, 4], variants=variants)
    assert target.for_job(job(2, 4)).directives == ["--qos=big"]
    for other in (job(2, 1), job(1, 4), job(2, 4, "pytorch")):
        assert target.for_job(other).directives == []


def test_variants_replace_directives_in_their_place_and_add_their_set_up_behind() -> None:
    target = slurm(
        directives=["--partition=small", "--qos=normal", "--time=1"],
        launcher=None,
        setup={"job": ["first"], "task": ["each"]},
        variants=[
            {"when": {}, "directives": ["-q high", "--mem=0"], "launcher": "srun -K", "setup": {"job": ["second"]}},
            {"when": {"nodes": 9}, "directives": ["--partition=huge"]},
            {"when": {"framework": "jax"}, "directives": ["-q jax"], "setup": {"job": ["third"]}},
        ],
    )
    made = target.for_job(job())
    assert made.directives == ["--partition=small", "-q jax", "--time=1", "--mem=0"]
    assert made.launcher == "srun -K"
    assert (made.setup.job, made.setup.task) == (["first", "second", "third"], ["each"])
    assert made.for_job(job()) == made, "what was made for a job stays as it is"


def test_placeholders_say_what_the_job_gets_and_other_braces_stay() -> None:
    every = " ".join(f"{name}={{{name}}}" for name in PLACEHOLDERS)
    target = slurm(
        nodes=3,
        devices_per_node=[8, 4],
        directives=[f"--comment={every}", "--chdir=${nodes}"],
        launcher="mpirun -np {tasks}",
        node_launcher="pdsh -N {nodes}",
        setup={"job": ["echo ${name} {other} {name}", "awk '{ print }'"]},
    )
    made = target.for_job(job(3, 2))
    assert made.directives[0] == (
        "--comment=nodes=3 devices_per_node=4 devices=12 tasks_per_node=2 tasks=6 framework=jax benchmark=mnist "
        "name=jax_mnist_1"
    )
    assert made.directives[1] == "--chdir=${nodes}"
    assert (made.launcher, made.node_launcher) == ("mpirun -np 6", "pdsh -N 3")
    assert made.setup.job == ["echo ${name} {other} jax_mnist_1", "awk '{ print }'"]


def test_a_job_takes_the_smallest_count_that_is_enough_and_no_more_than_there_is() -> None:
    target = slurm(nodes=2, devices_per_node=[4, 1, 2])
    assert [target.allocation(job(1, n))["devices_per_node"] for n in (1, 2, 3, 4)] == [1, 2, 4, 4]
    with pytest.raises(UserError, match=r"'here' has at most 4 devices per node, but 5 were asked for \("):
        target.allocation(job(1, 5))
    with pytest.raises(UserError, match=r"'here' has at most 2 nodes, but 3 were asked for \("):
        target.allocation(job(3, 1))
