"""``init``: a first cluster.yaml, from what a real Slurm 22.05.8 printed, from other words, and from a running Slurm.

``recorded/init/`` holds what its tools printed of a site with many kinds of partitions (of its settings those that
matter): sinfo and scontrol to a user without rights, sacctmgr about a user with two accounts.
"""

from collections.abc import Callable
from pathlib import Path

import pytest
from slurm_cluster import SlurmCluster

from duel.errors import UserError
from duel.job import Job
from duel.launch import cluster, directives, init
from duel.launch.schema import Cluster, Target

RECORDED = {path.stem: path.read_text() for path in (Path(__file__).parent / "recorded" / "init").iterdir()}
LOCAL_ONLY = "default: local\ntargets:\n  local: {scheduler: local, python: {jax: a, pytorch: b}}\n"
Describe = Callable[..., "tuple[Cluster, str]"]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "cluster.yaml"


@pytest.fixture
def describe(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Describe:
    """Calls ``init`` with stand-ins of Slurm's tools and nothing else on the path; returns the file and what was said.

    ``sinfo``, ``partitions``, ``config``, ``accounts``: what they print, or else as recorded; ``scripts``: by tool,
    what a stand-in does instead, or None: it is not there.
    """
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))

    def call(scripts: dict[str, str | None] | None = None, **printed: str) -> tuple[Cluster, str]:
        for what, text in (RECORDED | printed).items():
            (tmp_path / what).write_text(text)
        show = f"/bin/cat '{tmp_path}'"
        bodies: dict[str, str | None] = {
            "sinfo": f"{show}/sinfo",
            "scontrol": f'case "$*" in *config) {show}/config;; *) {show}/partitions;; esac',
            "sacctmgr": f"{show}/accounts",
        }
        for tool, body in (bodies | (scripts or {})).items():
            if body is not None:
                (folder / tool).write_text(f"#!/bin/sh\n{body}\n")
                (folder / tool).chmod(0o755)
        said: list[str] = []
        assert init.init(path, said.append) == 0
        return cluster.load(path), "\n".join(said)

    return call


def lines_of(target: Target) -> dict[str, str]:
    """What a target says but for what every target says alike."""
    lines = {}
    for line in target.directives:
        (name,) = directives.names(line)
        lines[name.removeprefix("--")] = line.partition("=")[2]
    assert lines.pop("nodes") == "{nodes}"
    assert lines.pop("ntasks-per-node") == "{tasks_per_node}"
    return lines


def jobs_of(name: str, target: Target) -> list[Job]:
    """The smallest and the largest job of a target."""
    framework = "jax" if target.python.pytorch is None else "pytorch"
    sizes = [(1, target.devices_per_node[0]), (target.nodes, target.devices_per_node[-1])]
    return [Job(framework, "resnet50", 1, "standard", "fp32", None, name, *size) for size in sizes]


def test_each_partition_becomes_a_target_that_asks_for_what_its_nodes_have(describe: Describe) -> None:
    found, said = describe()
    assert found.default == "local"
    targets = {name: target for name, target in found.targets.items() if name != "local"}
    assert all(target.scheduler == "slurm" for target in targets.values())
    mine = {"time": "00:30:00", "account": "chem", "qos": "long"}

    h100 = targets["h100"]
    assert (h100.device, h100.nodes, h100.devices_per_node, h100.max_jobs) == ("gpu", 2, [1, 2, 4], 20)
    assert lines_of(h100) == {
        "partition": "h100",
        "cpus-per-task": "2",
        "mem-per-cpu": "1800M",
        "gpus-per-node": "h100:{devices_per_node}",
        **mine,
    }
    cpu = targets["batch"]
    assert (cpu.device, cpu.nodes, cpu.devices_per_node) == ("cpu", 100, [1])
    assert lines_of(cpu) == {"partition": "batch", "cpus-per-task": "96", "mem-per-cpu": "3618M", **mine}

    # GRES without types; a count that is no power of two.
    assert lines_of(targets["old"])["gpus-per-node"] == "{devices_per_node}"
    assert targets["old"].devices_per_node == [1, 2, 3]
    # TPUs by GRES, and by a feature, which says nothing of their number.
    assert (targets["tpu"].device, targets["tpu"].python.pytorch) == ("tpu", None)
    assert lines_of(targets["tpu"])["gres"] == "tpu:{devices_per_node}"
    assert (targets["tpu-pod"].device, targets["tpu-pod"].devices_per_node) == ("tpu", [1])
    assert lines_of(targets["tpu-pod"])["constraint"] == "tpu-v4"
    # Nodes that differ: the part of the poorest; at most as many nodes as the partition gives a job; no time limit.
    gpu = targets["gpu"]
    assert (gpu.nodes, gpu.devices_per_node, lines_of(gpu)["cpus-per-task"]) == (4, [1, 2, 4, 8], "16")
    # Kinds of devices are targets of their own; MaxCPUsPerNode=32.
    kinds = {name: target for name, target in targets.items() if lines_of(target)["partition"] == "all"}
    assert {name: lines_of(target).get("gpus-per-node") for name, target in kinds.items()} == {
        "all-a100": "a100:{devices_per_node}",
        "all-cpu": None,
        "all-v100": "v100:{devices_per_node}",
    }
    assert [lines_of(target)["cpus-per-task"] for target in kinds.values()] == ["8", "32", "16"]
    # A time limit below the usual one; its 5000 MB for a CPU are more than the node has for each.
    assert lines_of(targets["short"])["time"] == "00:01:00"
    assert lines_of(targets["test"])["time"] == "00:10:00"
    assert lines_of(targets["test"])["mem-per-cpu"] == "3618M"
    assert f"cluster.yaml: {len(found.targets)} targets: local (the default), cpu, h100, tpu, short," in said


def test_an_account_that_is_allowed_is_chosen_and_the_others_are_named(describe: Describe, path: Path) -> None:
    found, _ = describe()
    assert "      - --account=chem  # or bio\n      - --qos=long  # or normal, gold\n" in path.read_text()
    for partition, account, qos, most in (
        ("gpu", "chem", "gold", 4),  # what is said of this partition goes first
        ("biology", "bio", "normal", None),  # AllowAccounts
        ("common", "chem", "normal", 20),  # DenyQos
    ):
        lines = lines_of(found.targets[partition])
        assert (lines["account"], lines["qos"], found.targets[partition].max_jobs) == (account, qos, most)


def test_an_only_account_and_qos_are_written(describe: Describe, path: Path) -> None:
    found, _ = describe(accounts="DUEL|Chem|chem||normal||\nelsewhere|chem|other||normal||\n")
    assert {
        (lines["account"], lines["qos"]) for name in ("cpu", "gpu") if (lines := lines_of(found.targets[name]))
    } == {("chem", "normal")}
    assert "  # or " not in path.read_text()


@pytest.mark.parametrize(
    ("partition", "reason"),
    [
        ("down", "its state is down"),
        ("resting", "its state is inactive"),
        ("leaving", "its state is drain"),
        ("it's", "its name cannot be used in a directive"),
        ("admin", "Slurm says RootOnly=YES"),
        ("booked", "Slurm says ReqResv=YES"),
        ("secret", "Slurm says Hidden=YES"),
        ("staff", "sinfo shows no nodes of it: it has none, is hidden, or is closed to your groups"),
        ("empty", "sinfo shows no nodes of it: it has none, is hidden, or is closed to your groups"),
        ("physics", "it is closed to your accounts or their QOS"),  # AllowAccounts
        ("nochem", "it is closed to your accounts or their QOS"),  # DenyAccounts
        ("express", "it is closed to your accounts or their QOS"),  # AllowQos
    ],
)
def test_what_cannot_be_used_is_left_out_with_its_reason(
    describe: Describe, path: Path, partition: str, reason: str
) -> None:
    found, said = describe()
    assert f"left out: partition {partition}: {reason}" in said.splitlines()
    assert f"# left out: partition {partition}: {reason}" in path.read_text().splitlines()
    assert all(lines_of(t)["partition"] != partition for t in found.targets.values() if t.scheduler == "slurm")


def test_odd_names_become_valid_ones_and_none_is_taken_twice(describe: Describe) -> None:
    found, _ = describe()
    names = {lines_of(target)["partition"]: name for name, target in found.targets.items() if name != "local"}
    assert names["gpu@night"] == "gpu-night"
    assert names["gpu-night"] == "gpu-night-2"
    assert names["local"] == "local-2"
    assert names["_bigmem_nodes_of_the_institute_of_physics"] == "bigmem_nodes_of_the_institute_of"
    assert names["_bigmem_nodes_of_the_institute_of_medicine"] == "bigmem_nodes_of_the_instit-2"
    assert names["null"] == "null"
    assert names["1e3"] == "1e3"


@pytest.mark.parametrize(
    ("gres", "device", "counts", "line"),
    [
        ("gpu:a100:4(S:0-1)", "gpu", [1, 2, 4], "--gpus-per-node=a100:{devices_per_node}"),
        ("gpu:a100:2(S:0),gpu:a100:2(S:1),nvme:1", "gpu", [1, 2, 4], "--gpus-per-node=a100:{devices_per_node}"),
        ("lustre:no_consume:1K,gpu:tesla:no_consume:2", "gpu", [1, 2], "--gpus-per-node=tesla:{devices_per_node}"),
        ("gpu", "gpu", [1], "--gpus-per-node={devices_per_node}"),
        ("gpu:1080:6", "gpu", [1, 2, 4, 6], "--gpus-per-node=1080:{devices_per_node}"),
        ("gpu:#odd:2", "gpu", [1, 2], "--gpus-per-node={devices_per_node}"),
        ("tpu:v4:4", "tpu", [1, 2, 4], "--gres=tpu:v4:{devices_per_node}"),
        ("gpu:0", "cpu", [1], ""),
        ("mps:100", "cpu", [1], ""),
    ],
)
def test_forms_of_gres(describe: Describe, gres: str, device: str, counts: list[int], line: str) -> None:
    found, _ = describe(sinfo=f"p|up|infinite|1-infinite|3|64|512000|{gres}|(null)\n")
    target = found.targets["p"]
    assert (target.device, target.devices_per_node) == (device, counts)
    assert [each for each in target.directives if "gpu" in each or "gres" in each] == ([line] if line else [])


def test_without_cons_tres_gpus_are_asked_for_as_gres_and_uncounted_memory_is_not(describe: Describe) -> None:
    found, _ = describe(config="SelectType = select/linear\nSelectTypeParameters = NONE\n")
    assert lines_of(found.targets["h100"])["gres"] == "gpu:h100:{devices_per_node}"
    assert all("--mem" not in line for target in found.targets.values() for line in target.directives)


@pytest.mark.parametrize(
    ("own", "config", "comment"),
    [
        ("DefMemPerCPU=1000", "DefMemPerCPU=7777", "DefMemPerCPU=1000"),
        ("DefMemPerNode=UNLIMITED", "DefMemPerCPU=1000", "DefMemPerCPU=1000"),
        ("DefMemPerNode=5000", "DefMemPerCPU=1000", "DefMemPerNode=5000"),
        ("DefMemPerNode=UNLIMITED", "DefMemPerNode=UNLIMITED", "all of the node's memory"),
        ("DefMemPerCPU=9000", "DefMemPerNode=UNLIMITED", "DefMemPerCPU=9000"),
        ("DefMemPerCPU=7900", "DefMemPerNode=UNLIMITED", None),  # 8000 MB for each CPU
    ],
)
def test_memory_is_asked_for_where_the_default_is_not_about_a_cpus_part(
    describe: Describe, path: Path, own: str, config: str, comment: str | None
) -> None:
    describe(
        sinfo="p|up|infinite|1-infinite|3|64|512000|(null)|(null)\n",
        partitions=f"PartitionName=p {own}\n",
        config=f"SelectTypeParameters = CR_CPU_MEMORY\n{config.replace('=', ' = ')}\n",
    )
    written = [line.strip() for line in path.read_text().splitlines() if "--mem" in line]
    assert written == ([f"- --mem-per-cpu=7200M  # without it: {comment}"] if comment else [])


@pytest.mark.parametrize(
    ("scripts", "said"),
    [
        ({"sacctmgr": None}, "sacctmgr is not on the PATH"),
        ({"sacctmgr": "echo 'Connection refused' >&2; exit 1"}, "sacctmgr failed: Connection refused"),
        ({"sacctmgr": "exit 3"}, "sacctmgr failed: exit code 3"),
        ({"sacctmgr": ""}, "sacctmgr printed nothing"),
        ({"sacctmgr": "exec /bin/sleep 20"}, "sacctmgr does not answer: "),
    ],
)
def test_without_sacctmgr_accounts_are_not_known_and_that_is_said(
    describe: Describe, path: Path, monkeypatch: pytest.MonkeyPatch, scripts: dict[str, str | None], said: str
) -> None:
    if "sleep" in str(scripts):
        monkeypatch.setattr(init, "TIMEOUT_SECONDS", 0.5)
    found, words = describe(scripts)
    line = f"- your accounts: add --account=... and --qos=... if the site requires them ({said}"
    assert line in words
    assert f"# {line}" in path.read_text()
    assert "physics" in found.targets  # who may use it cannot be told
    assert all("--account" not in line for target in found.targets.values() for line in target.directives)


def test_without_scontrol_there_are_targets_and_that_is_said(describe: Describe, path: Path) -> None:
    found, words = describe({"scontrol": "echo 'slurm_load_ctl_conf error:  Zero Bytes' >&2; exit 1"})
    for what in ("who may use a partition, and its memory", "the site's settings, such as those for memory"):
        assert f"- {what} (scontrol failed: slurm_load_ctl_conf error: Zero Bytes)" in words
        assert f"# - {what} (scontrol failed: slurm_load_ctl_conf error: Zero Bytes)" in path.read_text()
    assert lines_of(found.targets["h100"])["gpus-per-node"] == "h100:{devices_per_node}"
    assert lines_of(found.targets["short"])["time"] == "00:01:00"


def test_what_slurm_cannot_say_is_listed_at_the_end(describe: Describe, path: Path) -> None:
    _, words = describe()
    for text in (words, path.read_text()):
        last = [line.removeprefix("# ") for line in text.splitlines()][-7:]
        assert last == ["Unknown, please check:", *(f"- {each}" for each in init.ALWAYS_UNKNOWN)]


@pytest.mark.parametrize(
    ("script", "said"),
    [
        (None, "sinfo is not on the PATH"),
        ("echo 'Unable to contact slurm controller' >&2; exit 1", "sinfo failed: Unable to contact slurm controller"),
    ],
)
def test_without_slurm_nothing_is_written(describe: Describe, path: Path, script: str | None, said: str) -> None:
    path.write_text(LOCAL_ONLY)
    with pytest.raises(UserError) as caught:
        describe({"sinfo": script})
    assert said in str(caught.value)
    assert "the target 'local'" in str(caught.value)
    assert path.read_text() == LOCAL_ONLY
    assert [each.name for each in path.parent.glob("cluster*")] == ["cluster.yaml"]


def test_without_a_partition_to_use_nothing_is_written(describe: Describe, path: Path) -> None:
    with pytest.raises(UserError, match=r"(?s)no usable partition.*partition p: its state is down"):
        describe(sinfo="p|down|infinite|1-infinite|3|64|512000|(null)|(null)\n")
    assert not path.exists()


def test_a_file_that_is_there_is_kept(describe: Describe, path: Path) -> None:
    path.write_text(LOCAL_ONLY)
    assert "the previous file is now cluster.yaml.before\n" in describe()[1]
    assert path.with_name("cluster.yaml.before").read_text() == LOCAL_ONLY
    # The same again: nothing would be lost.
    assert "the previous file" not in describe()[1]
    path.write_bytes(b"\xff not even text")
    assert "the previous file is now cluster.yaml.before-2\n" in describe()[1]
    assert path.with_name("cluster.yaml.before").read_text() == LOCAL_ONLY
    assert path.with_name("cluster.yaml.before-2").read_bytes() == b"\xff not even text"


def test_the_users_own_formats_change_nothing(describe: Describe, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SINFO_PARTITION", "none")
    monkeypatch.setenv("SLURM_CLUSTERS", "elsewhere")
    monkeypatch.setenv("SLURM_CONF", "/etc/kept")
    told = '[ -z "$SINFO_PARTITION$SLURM_CLUSTERS" ] && [ "$SLURM_CONF" = /etc/kept ] || exit 9\n'
    _, said = describe({"sacctmgr": told + 'case "$*" in *"show user "*" withassoc format="*) ;; *) exit 8;; esac'})
    assert "sacctmgr printed nothing" in said


def test_a_real_slurm_takes_jobs_of_every_target(
    slurm: SlurmCluster, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in slurm.environment.items():
        monkeypatch.setenv(name, value)
    said: list[str] = []
    slurm.run("scontrol", "update", "partition=low", "hidden=yes")
    try:
        assert init.init(path, said.append) == 0
    finally:
        slurm.run("scontrol", "update", "partition=low", "hidden=no")
    found = cluster.load(path)
    assert list(found.targets) == ["local", "cpu", "h100", "tpu", "short", "urgent"]
    assert {line for line in said if line.startswith("left out: ")} == {
        "left out: partition low: Slurm says Hidden=YES",
        "left out: partition down: its state is down",
    }
    assert lines_of(found.targets["h100"]) == {
        "partition": "h100",
        "cpus-per-task": "2",
        "mem-per-cpu": "1800M",
        "gpus-per-node": "h100:{devices_per_node}",
        "time": "00:30:00",
        "account": "duel",
        "qos": "normal",
    }
    for name, target in found.targets.items():
        if target.scheduler == "slurm":
            for job in jobs_of(name, target):
                slurm.run("sbatch", "--test-only", *target.for_job(job).directives, "--wrap=true")
