"""Where the processes of a run on many devices find their places, and each other."""

import os
import signal
import socket
from pathlib import Path

import pytest

from duel.errors import UserError
from duel.job import Job
from duel.measure import ranks, supervisor


@pytest.mark.parametrize(
    ("environment", "place"),
    [
        ({}, (0, 1, 0)),
        ({"SLURM_PROCID": "0"}, (0, 1, 0)),  # a batch shell, which is no task
        ({"SLURM_PROCID": "3", "SLURM_STEP_NUM_TASKS": "4", "SLURM_LOCALID": "1"}, (3, 4, 1)),
        (
            {
                "SLURM_PROCID": "0",
                "SLURM_STEP_NUM_TASKS": "2",
                "SLURM_LOCALID": "0",  # mpirun's daemons
                "OMPI_COMM_WORLD_RANK": "5",
                "OMPI_COMM_WORLD_SIZE": "8",
                "OMPI_COMM_WORLD_LOCAL_RANK": "1",
            },
            (5, 8, 1),
        ),
        (
            {
                "SLURM_PROCID": "1",
                "SLURM_STEP_NUM_TASKS": "2",
                "SLURM_LOCALID": "0",  # torchrun, one task a node
                "TORCHELASTIC_RUN_ID": "none",
                "RANK": "6",
                "WORLD_SIZE": "8",
                "LOCAL_RANK": "2",
            },
            (6, 8, 2),
        ),
        # exported by somebody's start-up files
        ({"RANK": "6", "WORLD_SIZE": "8", "LOCAL_RANK": "2"}, (0, 1, 0)),
        (
            {
                "SLURM_PROCID": "3",
                "SLURM_STEP_NUM_TASKS": "4",
                "SLURM_LOCALID": "3",
                "ROCR_VISIBLE_DEVICES": "3",  # a device of its own
            },
            (3, 4, 0),
        ),
        (
            {
                "SLURM_PROCID": "3",
                "SLURM_STEP_NUM_TASKS": "4",
                "SLURM_LOCALID": "3",
                "ROCR_VISIBLE_DEVICES": "0,1,2,3",
                "HIP_VISIBLE_DEVICES": "0,1",  # of those
            },
            (3, 4, 1),
        ),
    ],
)
def test_a_process_s_place_is_what_its_launcher_says(environment: dict[str, str], place: tuple[int, ...]) -> None:
    assert ranks.place(environment) == ranks.Place(*place)


def test_ranks_meet_where_the_site_says(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        monkeypatch.setenv("DUEL_PORTS", f"{port}-{port + 20}")
        with ranks._server() as server:
            assert port < server.getsockname()[1] <= port + 20
        monkeypatch.setenv("DUEL_PORTS", f"{port}-{port}")
        with pytest.raises(UserError, match="every port is taken"):
            ranks._server()
    for wrong in ("80", "9-8", "a-b", "1-2-3"):
        monkeypatch.setenv("DUEL_PORTS", wrong)
        with pytest.raises(UserError, match=f"DUEL_PORTS={wrong}: expected FIRST-LAST"):
            ranks._server()
    monkeypatch.setenv("DUEL_ADDRESS", "node1i")
    assert ranks._addresses()[:2] == ["node1i", os.uname().nodename]


def test_a_rank_leaves_a_warning_and_an_end_to_rank_0(monkeypatch: pytest.MonkeyPatch) -> None:
    def told(*given: object) -> int:
        for number in supervisor.STOPS:
            os.kill(os.getpid(), number)
        return 5

    monkeypatch.setattr(supervisor.assistant, "assist", told)
    monkeypatch.setattr(supervisor.variables, "take_out", lambda environment: [])
    monkeypatch.setenv("DUEL_RANK", "1")
    monkeypatch.setenv("DUEL_RANKS", "2")
    before = {number: signal.getsignal(number) for number in supervisor.STOPS}
    job = Job("jax", "mnist", 2, "smoke", "fp32", "cpu", "local", devices_per_node=2)
    try:
        assert supervisor._supervise(job, Path("data"), False, {}) == 5
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
