"""Ten made-up sites: each one's scripts have exactly its own lines, and run with stand-ins for what a site has.

The stand-ins are small shell scripts on the PATH: ``srun``, ``ibrun``, ``mpirun`` and ``apptainer`` start what they are
given, the others only write down that they were called, and ``python`` does what a test asks of it.
"""

import difflib
import re
import shlex
import signal
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT, clean_environment

from duel.errors import UserError
from duel.job import Job
from duel.launch import cluster, directives, schema, script
from duel.launch.schema import Target

SITES = sorted((ROOT / "tests" / "sites").glob("*.yaml"))
CHECKOUT = Path("/opt/duel")

# Writes down its name and options, starts its tasks, passes on the signals of srun, and ends as the worst of its tasks.
LAUNCHER = r"""#!/usr/bin/env bash
options=() tasks=1
while [[ $1 == -* || $1 == *.sif || $1 == exec ]]; do
    case $1 in
        --ntasks=*) tasks=${1#*=} ;;
        -n | -np) tasks=$2 ;;
    esac
    case $1 in -n | -np | -x | --map-by | --bind) options+=("$1"); shift ;; esac
    options+=("$1")
    shift
done
echo "${0##*/} ${options[*]}" >>"$LOG"
pids=()
trap 'kill -USR2 "${pids[@]}"' USR2
trap 'kill -TERM "${pids[@]}"' TERM
for ((rank = 0; rank < tasks; rank++)); do
    SLURM_PROCID=${SLURM_PROCID-$rank} "$@" &
    pids+=($!)
done
worst=0
for pid in "${pids[@]}"; do
    wait "$pid"; code=$?
    while kill -0 "$pid" 2>/dev/null; do wait "$pid"; code=$?; done
    ((code > worst)) && worst=$code
done
exit "$worst"
"""
SITE_S_OWN = ("module", "conda", "stage-in", "site-scratch")
NOTE = '#!/usr/bin/env bash\necho "${0##*/} $*" >>"$LOG"\n'


class Site:
    """A folder with the stand-ins, a checkout's place, and a log of what was called."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "duel"
        self.bin = folder / "bin"
        self.log = folder / "log"
        self.root.mkdir()
        self.bin.mkdir()
        self.log.touch()
        for name in ("srun", "ibrun", "mpirun", "apptainer"):
            self.stand_in(name, LAUNCHER)
        for name in SITE_S_OWN:
            self.stand_in(name, NOTE)
        self.python()

    def stand_in(self, name: str, text: str) -> None:
        (self.bin / name).write_text(text)
        (self.bin / name).chmod(0o755)

    def python(self, does: str = "") -> None:
        """The interpreter writes down what it was called with, and then ``does`` that."""
        self.stand_in("python", NOTE + does)

    def start(self, target: Target, job: Job, python: str = "python", **environment: str) -> "subprocess.Popen[str]":
        python = str(self.bin / python)
        own = target.model_copy(update={"python": schema.Pythons(jax=python, pytorch=python, supervisor=python)})
        path = self.root / "script.sh"
        path.write_text(script.render(job, own, self.root))
        known = clean_environment()
        path_variable = f"{self.bin}:{known['PATH']}"
        return subprocess.Popen(
            ["bash", str(path)],
            env=known | {"PATH": path_variable, "LOG": str(self.log), "SLURM_JOB_ID": "1", "USER": "me"} | environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def run(self, target: Target, job: Job, python: str = "python", **environment: str) -> int:
        """The script's exit code."""
        with self.start(target, job, python, **environment) as process:
            said, _ = process.communicate(timeout=60)
        print(said)
        return process.returncode

    def called(self) -> list[str]:
        return self.log.read_text().splitlines()


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path)


def make_target(**keys: Any) -> Target:
    return Target.model_validate({"scheduler": "slurm", "python": {"jax": "python", "pytorch": "python"}} | keys)


def make_job(framework: str = "jax", nodes: int = 1, devices: int = 1, target: str = "here") -> Job:
    return Job(framework, "resnet50", 1, "standard", "fp32", None, target, nodes, devices)


@dataclass(frozen=True)
class Case:
    """One block of a site's expected lines."""

    cluster: Path
    head: str
    lines: list[str]

    @property
    def target(self) -> Target:
        return cluster.load(self.cluster).target(None)[1]

    @property
    def job(self) -> Job:
        found = re.fullmatch(r"\[(\w+) (\d+) x (\d+)\]", self.head)
        assert found
        name, _ = cluster.load(self.cluster).target(None)
        return make_job(found[1], int(found[2]), int(found[3]), name)


BLOCKS = [(path, block.splitlines()) for path in SITES for block in path.with_suffix(".txt").read_text().split("\n\n")]
CASES = [pytest.param(Case(path, head, lines), id=f"{path.stem} {head}") for path, (head, *lines) in BLOCKS]
RUNNING = [parameter for parameter in CASES if not parameter.values[0].lines[0].startswith("error: ")]


def own_lines(text: str, target: Target, job: Job) -> list[str]:
    """The lines of a script that a target without any line of its own would not have there."""
    bare = make_target(
        without=["--job-name", "--output", "--no-requeue", "--signal"],
        launcher="nothing",
        data="nothing",
        nodes=job.nodes,
        devices_per_node=[job.devices_per_node],
        python=dict.fromkeys(("jax", "pytorch"), getattr(target.python, job.framework)),
    )
    python = shlex.quote(getattr(target.python, job.framework))
    task = f'bash -eo pipefail -c "$task" {job.stem}.sh {python} {job.framework}/run.py {shlex.join(job.options)}'
    both = []
    for version in (script.render(job, bare, CHECKOUT), text):
        first, _seal, *rest = version.splitlines()
        both.append([line.replace(task, "TASK").removesuffix(" &") for line in (first, *rest)])
    changes = difflib.SequenceMatcher(None, *both, autojunk=False).get_opcodes()
    return [line for kind, _, _, begin, end in changes if kind != "equal" for line in both[1][begin:end]]


@pytest.mark.parametrize("case", CASES)
def test_a_site_s_script_has_exactly_its_own_lines(case: Case) -> None:
    try:
        text = script.render(case.job, case.target, CHECKOUT)
    except UserError as error:
        assert [f"error: {error}"] == case.lines
    else:
        assert own_lines(text, case.target, case.job) == case.lines


@pytest.mark.parametrize("case", RUNNING)
def test_a_site_s_script_runs(site: Site, case: Case) -> None:
    target, job = case.target.for_job(case.job), case.job
    assert site.run(case.target, job) == 0
    names = [line.split()[0] for line in site.called()]
    in_job = [line.split()[0] for line in target.setup.job if line.split()[0] in SITE_S_OWN]
    assert names[: len(in_job)] == in_job
    later = names[len(in_job) :]
    for line in target.setup.node:
        assert later.count(line.split()[0]) == job.nodes
    if target.launcher:
        assert target.launcher.split()[0] in later[: later.index("python")]
    device = ["--device", target.device] if target.device else []
    command = shlex.join(["python", f"{job.framework}/run.py", *job.options, *device, f"--data={target.data}"])
    assert site.called()[later.index("python") - len(later) :] == [command] * later.count("python")


def test_what_the_sites_have_that_duel_does_not_know_is_remarked_and_kept(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(site.bin))  # no sbatch that knows them either
    said = {}
    for path in SITES:
        _, target = cluster.load(path).target(None)
        groups = [target.directives, *(variant.directives for variant in target.variants)]
        said[path.stem] = [words for lines in groups for words in directives.warnings(lines)]
    assert {name: len(words) for name, words in said.items() if words} == {"fir": 1, "ginkgo": 3, "hazel": 2, "ivy": 2}
    assert said["fir"][0].startswith(
        "--tasks-per-node is not an sbatch option that Duel knows (did you mean --ntasks-per-node?)"
    )
    assert said["hazel"][0].startswith("--clusters: Duel asks only this cluster")
    assert said["hazel"][1].startswith("--requeue: a requeued measurement begins again")
    assert said["ivy"][0].startswith("--ivy-fabric is not an sbatch option that Duel knows; it is passed on unchanged")
    assert said["ivy"][1].startswith("--export=NONE: srun starts without")


SCOPES = {
    "job": ["export FROM_JOB='a b'", "note job"],
    "node": ["note node $FROM_JOB", "export FROM_NODE=1"],
    "task": ["export FROM_TASK=1", "note task $FROM_JOB"],
}
SAYS = 'echo "variables ${FROM_JOB-} ${FROM_NODE-} ${FROM_TASK-} ${WANDB_PROJECT-}" >>"$LOG"\n'


def test_set_up_lines_run_in_their_places_and_what_they_export_reaches_the_interpreter(site: Site) -> None:
    site.stand_in("note", NOTE)
    site.python(SAYS)
    keys = {"setup": SCOPES, "nodes": 2, "devices_per_node": [2], "launcher": "srun --ntasks={tasks}"}
    assert site.run(make_target(**keys), make_job(nodes=2, devices=2)) == 0
    called = [line for line in site.called() if not line.startswith("python")]
    assert called[:5] == [
        "note job",
        "srun --ntasks-per-node=1 --ntasks=2",
        "note node a b",
        "note node a b",
        "srun --ntasks=4",
    ]
    for line in ("note task a b", "variables a b  1 duel"):  # what a node's shell exports ends with that shell
        assert called[5:].count(line) == 4
    assert called.index("note task a b") < called.index("variables a b  1 duel")


def test_on_a_local_target_they_run_in_the_same_order(site: Site) -> None:
    site.stand_in("note", NOTE)
    site.python(SAYS)
    assert site.run(make_target(scheduler="local", setup=SCOPES), make_job()) == 0
    assert [line for line in site.called() if not line.startswith("python")] == [
        "note job",
        "note node a b",
        "note task a b",
        "variables a b 1 1 duel",
    ]


@pytest.mark.parametrize("scheduler", ["local", "slurm"])
@pytest.mark.parametrize("line", ["false", "false | true", "nowhere-to-be-found", "exit 9"])
@pytest.mark.parametrize("scope", SCOPES)
def test_a_set_up_line_that_fails_ends_the_job(site: Site, scope: str, line: str, scheduler: str) -> None:
    site.stand_in("note", NOTE)
    target = make_target(scheduler=scheduler, setup={scope: ["note before", line, "note behind"]})
    assert site.run(target, make_job()) == {"nowhere-to-be-found": 127, "exit 9": 9}.get(line, 1)
    assert [name for name in site.called() if not name.startswith("srun")] == ["note before"]


LAUNCHERS = [None, "srun", "srun apptainer exec --nv /tmp/a.sif", "ibrun", "mpirun -np 1"]


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_the_script_ends_as_its_interpreter_does(site: Site, launcher: str | None) -> None:
    site.python("exit 7\n")
    assert site.run(make_target(launcher=launcher), make_job()) == 7


@pytest.mark.parametrize("launcher", LAUNCHERS)
@pytest.mark.parametrize(("sent", "ends"), [(signal.SIGUSR2, True), (signal.SIGTERM, True), (signal.SIGUSR2, False)])
def test_a_signal_to_the_batch_shell_reaches_the_interpreter(
    site: Site, launcher: str | None, sent: signal.Signals, ends: bool
) -> None:
    """Slurm's warning before the limit, and its end: the interpreter decides what comes of it, and with which code."""
    site.python(
        f"""trap 'echo told >>"$LOG"; {"exit 7" if ends else "told=1"}' {sent.name.removeprefix("SIG")}
sleep 0.1  # until all that started it are past starting it
echo ready >>"$LOG"
for ((turn = 0; turn < 600 && !told; turn++)); do sleep 0.05; done
exit 3
"""
    )
    with site.start(make_target(launcher=launcher), make_job()) as process:
        deadline = time.monotonic() + 30
        while "ready" not in site.called() and time.monotonic() < deadline:
            time.sleep(0.02)
        process.send_signal(sent)
        process.communicate(timeout=60)
    assert "told" in site.called()
    assert process.returncode == (7 if ends else 3)


def test_a_site_s_own_warning_is_passed_on_as_the_one_that_the_interpreter_knows(site: Site) -> None:
    site.python("""trap 'echo told >>"$LOG"; exit 7' USR2; sleep 0.1; echo ready >>"$LOG"
for ((turn = 0; turn < 600; turn++)); do sleep 0.05; done
""")
    with site.start(make_target(directives=["--signal=B:SIGUSR1@300"]), make_job()) as process:
        while "ready" not in site.called():
            assert process.poll() is None
            time.sleep(0.02)
        process.send_signal(signal.SIGUSR1)
        process.communicate(timeout=60)
    assert (process.returncode, "told" in site.called()) == (7, True)


def test_the_interpreter_gets_slurm_s_name_of_the_run_only_where_it_is_one(site: Site) -> None:
    site.python('echo "run ${DUEL_RUN_ID-none} ${SRUN_CPUS_PER_TASK-none}" >>"$LOG"\n')
    for name, expected in (("jax_resnet50_1-261120-1-ab", "jax_resnet50_1-261120-1-ab 8"), ("mine", "none 8")):
        assert site.run(make_target(), make_job(), SLURM_JOB_NAME=name, SLURM_CPUS_PER_TASK="8") == 0
        assert site.called()[-1] == f"run {expected}"


HOSTILE = (
    "a b",
    "it's",
    'say "no"',
    "$(touch pwned)",
    "`touch pwned`",
    "; touch pwned;",
    "a && touch pwned",
    "# touch pwned",
    "*",
    "%j",
    "~",
    "!!",
    "\\",
    "{nodes} {name}",
    "{{ 7 * 7 }}{% raw %}",
    "-rf",
    "--help",
    "naïve 世界",
)


@pytest.mark.parametrize("scheduler", ["local", "slurm"])
@pytest.mark.parametrize("text", HOSTILE)
def test_a_value_is_never_code(site: Site, text: str, scheduler: str) -> None:
    """In the checkout's path, the interpreter's, the data's and the project's: each arrives as it is."""
    site.root = site.root.parent / text
    site.root.mkdir()
    site.stand_in(text, NOTE + """printf '%s\\n' "$PWD" "${@: -1}" "$WANDB_PROJECT" >>"$LOG"\n""")
    # Slurm's log lies in the checkout, so it has to be the site's own line where that path is none for a directive.
    keys = {"scheduler": scheduler, "data": text, "wandb": {"project": text}}
    if scheduler == "slurm":  # a path with such a text in it cannot stand in a directive
        keys["without"] = ["--output"]
    assert site.run(make_target(**keys), make_job(), python=text) == 0
    assert site.called()[-3:] == [str(site.root), f"--data={text}", text]
    assert not list(site.root.parent.rglob("pwned"))
