"""A real Slurm on this machine, for as long as tests need it: nothing of it is mocked, and nothing of it stays."""

import contextlib
import os
import pwd
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

PROGRAMS = ("munged", "mungekey", "sbatch", "slurmctld", "slurmd", "slurmdbd", "mariadbd", "mariadb-install-db")
NODES = ("h100-1", "h100-2", "cpu-1", "cpu-2", "tpu-1")
MANY_NODES = tuple(f"many-{number}" for number in range(1, 65))

# sched_interval, bf_interval: a job starts within a second. cred_expire: a requeued one does after 11 s, not 120 s.
# SlurmdTimeout, MinJobAge: within seconds a dead node shows, and squeue forgets a job. config_overrides: nodes may have
# more cores than this machine. linuxproc, task/none: no cgroups are needed. Slurm wants a line for each setting; here
# they stand by topic.
SETTINGS = """
ClusterName=duel SlurmctldHost={host}(127.0.0.1) SlurmctldPort={port[slurmctld]} SlurmUser={user} SlurmdUser={user}
AuthInfo=socket={folder}/munge.socket,cred_expire=5
StateSaveLocation={folder}/state SlurmctldPidFile={folder}/slurmctld.pid
SlurmdSpoolDir={folder}/spool-%n SlurmdPidFile={folder}/slurmd-%n.pid SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc TaskPlugin=task/none MpiDefault=none
SelectType=select/cons_tres SelectTypeParameters=CR_Core_Memory DefMemPerCPU=1000
SchedulerParameters=batch_sched_delay=0,sched_interval=1,bf_interval=1
PreemptType=preempt/partition_prio PreemptMode=REQUEUE
OverTimeLimit=0 KillWait=5 MinJobAge=4 MessageTimeout={message_timeout} SlurmdTimeout={node_timeout} ReturnToService=2
JobAcctGatherType=jobacct_gather/linux JobAcctGatherFrequency=1
GresTypes=gpu,tpu
"""

MACHINES = """
NodeName=h100-[1-2] NodeAddr=127.0.0.1 Port=[{port[h100-1]}-{port[h100-2]}] CPUs=8 RealMemory=16000 Gres=gpu:h100:4
NodeName=cpu-[1-2] NodeAddr=127.0.0.1 Port=[{port[cpu-1]}-{port[cpu-2]}] CPUs=60 RealMemory=64000
NodeName=tpu-1 NodeAddr=127.0.0.1 Port={port[tpu-1]} CPUs=8 RealMemory=16000 Gres=tpu:4 Feature=tpu
PartitionName=DEFAULT MaxTime=120 PriorityTier=2
PartitionName=cpu Nodes=cpu-[1-2] Default=YES
PartitionName=h100 Nodes=h100-[1-2]
PartitionName=tpu Nodes=tpu-1
PartitionName=short Nodes=cpu-[1-2] MaxTime=1
PartitionName=low Nodes=cpu-[1-2] PriorityTier=1
PartitionName=urgent Nodes=cpu-[1-2]
PartitionName=down Nodes=cpu-[1-2] State=DOWN
"""

MANY = """
NodeName=many-[1-64] NodeAddr=127.0.0.1 Port=[{port[many-1]}-{port[many-64]}] CPUs=8 RealMemory=16000
PartitionName=many Nodes=many-[1-64]
"""

ACCOUNTING = """
AccountingStorageType=accounting_storage/slurmdbd AccountingStorageHost=127.0.0.1
AccountingStoragePort={port[slurmdbd]} AccountingStoragePass={folder}/munge.socket
AccountingStorageTRES=gres/gpu AccountingStoreFlags=job_comment,job_env,job_script
"""

LIMITS = "AccountingStorageEnforce=associations,limits,qos "

SLURMDBD = """
DbdHost={host} DbdAddr=127.0.0.1 DbdPort={port[slurmdbd]} SlurmUser={user} PidFile={folder}/slurmdbd.pid
AuthInfo=socket={folder}/munge.socket
StorageType=accounting_storage/mysql StorageHost=127.0.0.1 StoragePort={port[mariadb]}
StorageUser=slurm StoragePass={password}
"""

# Files, because a count alone leaves CUDA_VISIBLE_DEVICES empty; and they must be devices.
GRES = """
AutoDetect=off
NodeName=h100-[1-2] Name=gpu Type=h100 File={folder}/nvidia[0-3]
NodeName=tpu-1 Name=tpu Count=4
"""

# What every daemon is started through. A killed pytest takes it along, and it becomes the parent of all that its
# descendants leave behind: slurmd's steps detach themselves and hide their environment, and are found all the same.
START = """
import ctypes, os, sys
prctl = ctypes.CDLL(None).prctl
prctl(1, 9, 0, 0, 0)  # PR_SET_PDEATHSIG, SIGKILL
prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER
os.execvp(sys.argv[1], sys.argv[1:])
"""


def missing_programs() -> list[str]:
    """What this machine lacks to run a cluster."""
    return [program for program in PROGRAMS if shutil.which(program, path=_path()) is None]


class SlurmCluster:
    """``with SlurmCluster() as cluster:`` starts one; leaving the block ends its processes and removes its folder.

    Nodes: ``h100-1`` and ``h100-2`` (four GPUs each, which are none) and ``tpu-1``, with 8 cores each; ``cpu-1`` and
    ``cpu-2``, with 60.
    Partitions: ``cpu`` (the default), ``h100``, ``tpu``; on the nodes of ``cpu`` also ``short`` (limit 1 minute),
    ``low``, whose jobs all others preempt, for instance those of ``urgent``, and ``down``, which starts none.
    ``many``: also a partition of that name, of 64 nodes with 8 cores each.
    """

    def __init__(
        self, *, accounting: bool = True, limits: bool = False, message_timeout: int = 5, many: bool = False
    ) -> None:
        """``limits``: those of sacctmgr hold. ``message_timeout``: s after which clients give up."""
        self.accounting = accounting
        self._nodes = (*NODES, *MANY_NODES) if many else NODES
        self._limits = LIMITS if limits else ""
        self.user = pwd.getpwuid(os.getuid()).pw_name  # root or not, all daemons and jobs are this user's
        # On a few cores some of many nodes answer late, and the jobs of a node that is given up are requeued.
        self._settings = {"message_timeout": message_timeout, "node_timeout": 60 if many else 6, "user": self.user}
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> "SlurmCluster":
        with contextlib.ExitStack() as stack:
            self.folder = Path(tempfile.mkdtemp(prefix="slurm-"))  # short: a socket's path has at most 107 characters
            stack.callback(shutil.rmtree, self.folder)
            names = ("mariadb", "slurmdbd", "slurmctld", *self._nodes)
            claim, ports = _claim_ports(len(names))
            stack.enter_context(claim)
            # A daemon dies with the thread that started it, so that must not be one that a test started.
            self._starter = stack.enter_context(ThreadPoolExecutor(1))
            stack.callback(lambda: list(map(self._kill, self._daemons)))
            self._start_all(dict(zip(names, ports, strict=True)))
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @property
    def environment(self) -> dict[str, str]:
        """What a process needs besides its own environment to talk to this cluster."""
        return {"SLURM_CONF": str(self.folder / "slurm.conf")}

    def run(self, *command: str, check: bool = True, timeout: float = 60) -> "subprocess.CompletedProcess[str]":
        """Runs a command in the cluster's folder; with ``check`` its failure is an error that says what it printed."""
        done = subprocess.run(
            command, env=self._environment(), cwd=self.folder, timeout=timeout, capture_output=True, text=True
        )
        if check and done.returncode != 0:
            raise RuntimeError(f"{' '.join(command)}: exit {done.returncode}\n{done.stdout}{done.stderr}")
        return done

    def kill_node(self, name: str, *, noticed: bool = True) -> None:
        """The machine dies: slurmd, its steps and their jobs all at once, without a word to the controller.

        The controller finds out by itself after about 16 s; ``noticed``: an operator tells it now.
        """
        self._kill(name)
        if noticed:
            self.run("scontrol", "update", f"nodename={name}", "state=down", "reason=died")

    def start_node(self, name: str) -> None:
        """The machine is back; returns when the controller has work for it again."""
        self._start(name, "slurmd", "-D", "-N", name)
        self._wait(lambda: self._free(name), name)

    def pause_controller(self) -> None:
        """It accepts connections and answers none, as when it is overloaded. What was asked meanwhile it does later."""
        self._daemons["slurmctld"].send_signal(signal.SIGSTOP)

    def resume_controller(self) -> None:
        self._daemons["slurmctld"].send_signal(signal.SIGCONT)

    def stop_controller(self) -> None:
        """Ends it in order: it saves its jobs, which run on."""
        self._stop("slurmctld")

    def start_controller(self) -> None:
        """Returns when it answers; it starts jobs again some 4 s later, when it has heard of its nodes."""
        self._start("slurmctld", "slurmctld", "-D")
        self._wait(lambda: self.run("scontrol", "ping", check=False).returncode == 0, "slurmctld")

    def stop_accounting(self) -> None:
        self._stop("slurmdbd")

    def start_accounting(self) -> None:
        self._start("slurmdbd", "slurmdbd", "-D")
        self._wait(lambda: self.run("sacctmgr", "show", "cluster", check=False).returncode == 0, "slurmdbd")

    def wait_idle(self) -> None:
        """Starts again what a test has stopped, cancels the jobs it has left, and waits until every node is free.

        What it has changed with scontrol in a partition it changes back itself.
        """
        self.resume_controller()
        if self._ended("slurmctld"):
            self.start_controller()
        if self.accounting and self._ended("slurmdbd"):
            self.start_accounting()
        for name in filter(self._ended, self._nodes):
            self._start(name, "slurmd", "-D", "-N", name)
        self.run("scancel", f"--user={self.user}")
        self._wait(lambda: not self.run("squeue", "--noheader").stdout, *self._nodes)
        self._wait(lambda: self._free(*self._nodes), *self._nodes)

    def _start_all(self, port: dict[str, int]) -> None:
        password = secrets.token_hex(16)
        self._configure(port, password)
        munge = self.folder / "munge"
        self.run("mungekey", "--create", f"--keyfile={munge}.key")
        files = [f"--key-file={munge}.key", f"--seed-file={munge}.seed", f"--log-file={munge}.log"]
        files += [f"--pid-file={munge}.pid", f"--socket={munge}.socket"]
        self._start("munged", "munged", "--foreground", "--force", *files)
        self._wait(Path(f"{munge}.socket").exists, "munged")
        if self.accounting:
            self._start_mariadb(port["mariadb"], password)
            self.start_accounting()
            self.run("sacctmgr", "-i", "add", "cluster", "duel")
            self.run("sacctmgr", "-i", "add", "account", "duel")
            self.run("sacctmgr", "-i", "add", "user", self.user, "account=duel")
            self.run("sacctmgr", "-i", "modify", "user", self.user, "set", "defaultaccount=duel")  # root has another
        self.start_controller()
        for name in self._nodes:
            self._start(name, "slurmd", "-D", "-N", name)
        self._wait(lambda: self._free(*self._nodes), *self._nodes)

    def _configure(self, port: dict[str, int], password: str) -> None:
        host = socket.gethostname().partition(".")[0]
        values = self._settings | {"folder": self.folder, "host": host, "port": port, "password": password}
        accounting = self._limits + ACCOUNTING
        settings = SETTINGS + (accounting if self.accounting else "AccountingStorageType=accounting_storage/none")
        machines = MACHINES if self._nodes == NODES else MACHINES + MANY
        slurm, slurmdbd = "\n".join(settings.split()) + machines, "\n".join(SLURMDBD.split())
        for name, text in {"slurm": slurm, "slurmdbd": slurmdbd, "gres": GRES}.items():
            path = self.folder / f"{name}.conf"
            path.touch(mode=0o600)  # slurmdbd insists, because of the password
            path.write_text(text.format(**values))
        (self.folder / "state").mkdir()
        for number in range(4):
            (self.folder / f"nvidia{number}").symlink_to("/dev/null")

    def _start_mariadb(self, port: int, password: str) -> None:
        # tmpdir: in a common one two servers would give their temporary tables the same names.
        options = [f"--user={self.user}", f"--datadir={self.folder}/mariadb", f"--tmpdir={self.folder}"]
        self.run("mariadb-install-db", "--no-defaults", "--skip-name-resolve", "--skip-test-db", *options)
        script = self.folder / "user.sql"
        script.write_text(
            f"CREATE USER slurm@127.0.0.1 IDENTIFIED BY '{password}';\n"
            "GRANT ALL ON slurm_acct_db.* TO slurm@127.0.0.1;\n"
        )
        options += [f"--init-file={script}", "--skip-name-resolve", "--bind-address=127.0.0.1", f"--port={port}"]
        options += [f"--socket={self.folder}/mariadb.socket", f"--pid-file={self.folder}/mariadb.pid"]
        self._start("mariadbd", "mariadbd", "--no-defaults", *options)
        self._wait(lambda: _answers(port), "mariadbd")

    def _environment(self) -> dict[str, str]:
        callers = ("SLURM", "SBATCH_", "SRUN_", "SQUEUE_", "SINFO_", "SACCT_", "SCANCEL_")
        kept = {name: value for name, value in os.environ.items() if not name.startswith(callers)}
        return kept | {"PATH": _path(), "LC_ALL": "C.UTF-8"} | self.environment

    def _start(self, name: str, *command: str) -> None:
        with open(self.folder / f"{name}.log", "ab") as log:
            self._daemons[name] = self._starter.submit(
                subprocess.Popen,
                [sys.executable, "-ISc", START, *command],
                env=self._environment(),
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # Ctrl-C is for pytest, which then ends them
            ).result()

    def _ended(self, name: str) -> bool:
        return self._daemons[name].poll() is not None

    def _stop(self, name: str) -> None:
        self._daemons[name].send_signal(signal.SIGCONT)
        self._daemons[name].terminate()
        self._daemons[name].wait(timeout=30)

    def _kill(self, name: str) -> None:
        daemon = self._daemons[name]
        if daemon.poll() is None:
            daemon.send_signal(signal.SIGSTOP)  # starts nothing new meanwhile
            while children := _children(daemon.pid):  # a killed child's children become its own
                for pid in children:
                    with contextlib.suppress(ProcessLookupError):  # it ended by itself
                        os.kill(pid, signal.SIGKILL)
            daemon.kill()
        daemon.wait(timeout=30)

    def _free(self, *names: str) -> bool:
        """Whether these nodes have no work and can get some; puts back to service those that were taken out of it."""
        nodes = f"--nodes={','.join(names)}"
        states = self.run("sinfo", "--noheader", "--Node", nodes, "--format=%N %t", check=False).stdout.splitlines()
        for name, state in map(str.split, states):
            if state.startswith(("down", "drain")):
                self.run("scontrol", "update", f"nodename={name}", "state=resume", check=False)
        return bool(states) and all(state.endswith(" idle") for state in states)

    def _wait(self, ready: Callable[[], bool], *names: str) -> None:
        """An error with the tail of their logs when one of these daemons has ended, or if it is not so after 30 s."""
        deadline = time.monotonic() + 30
        while not ready():
            ended = list(filter(self._ended, names))
            if ended or time.monotonic() > deadline:
                logs = {name: (self.folder / f"{name}.log").read_text(errors="replace") for name in ended or names}
                tails = "\n".join(f"--- {name}:\n{log[-2000:]}" for name, log in logs.items())
                raise RuntimeError(
                    f"Slurm for the tests {'has ended' if ended else 'is not ready after 30 s'}\n{tails}"
                )
            time.sleep(0.05)


def _path() -> str:
    return os.environ.get("PATH", os.defpath) + ":/usr/sbin:/sbin"  # where Debian has daemons


def _claim_ports(count: int) -> tuple[socket.socket, list[int]]:
    """Ports that no other cluster takes for as long as the socket is open.

    Below the range from which the kernel serves others. The first of a block is bound and not used otherwise, so that
    of two clusters that start at the same time only one gets the block.
    """
    for first in range(12000, 32000, count + 1):
        claim, ports = socket.socket(), list(range(first + 1, first + 1 + count))
        with contextlib.suppress(OSError):
            claim.bind(("127.0.0.1", first))
            if not any(map(_answers, ports)):
                return claim, ports
        claim.close()
    raise RuntimeError("no free ports for a Slurm cluster")


def _answers(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


def _children(parent: int) -> list[int]:
    """The children of this process that still run.

    One whose first thread is dead still runs while it has others (slurmstepd has), and keeps its own children so long.
    """
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it ended meanwhile
            fields = stat.read_text(errors="replace").rpartition(")")[2].split()  # from the third of proc(5) on
            state, its_parent, threads = fields[0], int(fields[1]), int(fields[17])
            if its_parent == parent and (state not in "ZX" or threads > 1):
                found.append(int(stat.parent.name))
    return found
