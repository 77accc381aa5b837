"""A campaign of a thousand jobs on a real Slurm of 64 nodes, which the test cluster simulates: 64 slurmd here."""

import re
from collections.abc import Iterator

import pytest
from conftest import Site, start_slurm
from slurm_cluster import SlurmCluster
from test_slurm_queue import ending

from duel.launch import intent

STUDY = """
about: more than its budget pays for
points:
  - benchmark: all
    use_case: [1, 3, 5]
    size: [tiny, full]
    precision: [fp32, tf32, bf16, fp16]
    mode: [default, tuned, default+compile, default+donation]
    preset: smoke
    paired: false
    target: site
"""


@pytest.fixture(scope="module")
def slurm_of_session() -> Iterator[SlurmCluster]:
    """Instead of the one with five nodes."""
    with start_slurm(accounting=True, many=True, message_timeout=30) as cluster:
        yield cluster


@pytest.mark.full
def test_a_thousand_jobs_on_64_nodes_end_within_a_budget(site: Site) -> None:
    ending(site, "    array: 100\n")
    target = site.folder / "cluster.yaml"
    whole = target.read_text().replace("--partition=cpu", "--partition=many").replace("per-task=1", "per-task=8")
    target.write_text(whole)  # a node each
    (site.folder / "studies" / "large.yaml").write_text(STUDY)
    planned = site.main("study", "large", "plan")
    assert int(re.search(r"(\d+) scripts, ", planned)[1]) > 1000  # type: ignore[index]  # no match: the test fails here
    hours = 1000 * 10 / 60  # a budget counts what a job may take, here ten minutes
    site.main("study", "large", "submit", "--budget", f"{hours:.2f}h")
    runs = site.results.runs()
    assert len(runs) == 1000
    site.wait(lambda: all(run.stored_status().state == "finished" for run in site.results.runs()), 1800)
    assert site.results.runs() == runs
    assert not intent.names(site.results), "nothing waits"
    sent = [f"{run.launch().slurm_job_id}" for run in runs]
    assert len(set(sent)) == len(runs), "each has a job, or an element of an array, of its own"
    site.wait(lambda: sum(site.jobs().values()) >= len(runs))  # accounting is late
    assert sum(site.jobs().values()) == len(runs), "and Slurm has had no other"
    nodes = site.slurm.run("sacct", "-X", "-P", "-n", "-S", "now-1hours", "-o", "NodeList").stdout.split()
    assert len({name for name in nodes if name.startswith("many-")}) == 64
