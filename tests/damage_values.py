"""Values in status.json, launch.json and a row's file that nobody should find there; for tests/test_damage.py."""

import os
from typing import Any

from damage_site import DEEP, ESCAPES, LAUNCH, ROW, STATUS, Kind, edited, raw

WRONG_STATUS: dict[str, dict[str, Any]] = {
    "an owner that is a list": {"owner": ["host", 1]},
    "a pid that is text": {"owner": {"host": "x", "pid": "7"}},
    "a negative pid": {"owner": {"host": "x", "pid": -1}},
    "a pid of 2**70": {"owner": {"host": os.uname().nodename, "pid": 2**70}},
    "an unknown state": {"state": "sleeping"},
    "a state that is a list": {"state": ["finished"]},
    "an update that is text": {"updated": "yesterday"},
    "a format of the future": {"format": 99},
    "a format that is a list": {"format": [1]},
    "a Slurm job that is a number": {"slurm_job_id": 17},
    "an unknown why": {"why": "because"},
    "progress that is text": {"state": "running", "progress": "half"},
    "a user that is an object": {"user": {"name": "x"}},
    "a queued that is a number": {"queued": 7},
}
ODD_STATUS: dict[str, dict[str, Any]] = {  # which fit the schema, and are handled with care
    "a pid of 0": {"state": "running", "owner": {"host": os.uname().nodename, "pid": 0, "started": "1"}},
    "a Slurm job that is a path": {"slurm_job_id": "../../x", "state": "failed"},
    "a cause with escape sequences": {"state": "failed", "cause": ESCAPES, "why": "code"},
    "a cause with NUL": {"state": "failed", "cause": "a\x00b", "why": "code"},
    "a phase with escape sequences": {"state": "running", "phase": ESCAPES, "owner": {"slurm_job_name": "x"}},
    "a user with escape sequences": {"user": ESCAPES},
    "a note of W&B with escape sequences": {"wandb": ESCAPES},
    "a queued that is no time": {"queued": "soon", "slurm_job_id": "7", "state": "queued"},
    "a run id of another run": {"run_id": "jax_gcn_1-261124-100000-00aaaa"},
    "a loss beyond all numbers": {"state": "running", "progress": {"step": 2**70, "needed": 0, "done": 0}},
    "an owner on another machine": {"state": "running", "owner": {"host": ESCAPES, "pid": 1}, "updated": 1e11},
}
WRONG_LAUNCH: dict[str, dict[str, Any]] = {
    "a job that is a list": {"job": []},
    "a job of an unknown framework": {"job": {"framework": "tensorflow"}},
    "a job with a missing key": {"job": {"framework": "jax", "benchmark": "mnist"}},
    "Slurm's report as text": {"slurm": "COMPLETED"},
    "a pair that is a number": {"pair": 7},
    "an unknown cause of Slurm": {"slurm": {"cause": "because"}},
    "a format of the future": {"format": 2},
}
JOB = {"framework": "jax", "benchmark": "mnist", "use_case": 1, "preset": "standard", "precision": "fp32"}
JOB |= {"device": None, "target": "local"}
ODD_JOBS: dict[str, dict[str, Any]] = {
    "an unknown benchmark": {"benchmark": "../../x"},
    "an unknown preset": {"preset": "endless"},
    "an unknown use case": {"use_case": 99},
    "an unknown target": {"target": ESCAPES},
    "an unknown precision": {"precision": "fp1"},
    "a negative attempt": {"attempt": -5},
    "a change that is no directive": {"changes": ["; rm -rf /", "\n"]},
    "batch sizes of 0": {"batch_sizes": [0, -1]},
    "an unknown mode": {"mode": ESCAPES},
    "0 nodes": {"nodes": 0, "devices_per_node": 0},
}
WRONG_ROWS: dict[str, dict[str, Any]] = {
    "an unknown status": {"status": "sleeping"},
    "another number": {"row": 3},
    "a negative number": {"row": -1},
    "another run's id": {"run_id": "jax_gcn_1-261124-100000-00aaaa"},
    "no run id": {"run_id": None},
    "a run id that is a path": {"run_id": "../../x"},
    "an unknown framework": {"framework": "tensorflow"},
    "an unknown use case": {"use_case": 99},
    "a use case that is text": {"use_case": "1"},
    "reasons that are a list": {"missing": []},
    "reasons that are numbers": {"missing": {"accuracy": 1}},
    "reasons for no column": {"missing": {"nonsense": "x"}},
    "a throughput that is text": {"throughput": "fast"},
    "a negative throughput": {"throughput": -1.0},
    "a cause that is an object": {"cause": {}},
    "variables that are no JSON": {"variables": "PATH=/bin"},
    "variables that are a list": {"variables": "[1]"},
    "variables that are numbers": {"variables": '{"target": 7}'},
    "deep variables": {"variables": "[" * DEEP + "]" * DEEP},
    "a benchmark that is a path": {"benchmark": "../../../etc/x"},
    "a benchmark with NUL": {"benchmark": "mnist\x00"},
    "a size that is a path": {"size": "../x"},
}
ODD_ROWS: dict[str, dict[str, Any]] = {
    "a cause with escape sequences": {"status": "failed", "cause": ESCAPES},
    "a device with escape sequences": {"device_name": ESCAPES, "host": ESCAPES},
    "a cause with NUL": {"status": "failed", "cause": "a\x00b\r\nc"},
    "a cause of 200,000 letters": {"status": "failed", "cause": "x" * 200_000},
    "a throughput of 0": {"throughput": 0.0},
    "0 devices": {"device_count": 0, "nodes": 0, "batch_size": 0},
    "a loss of 2**70 steps": {"loss_steps": 2**70, "iterations": -(2**70)},
    "an unknown preset": {"preset": "endless", "precision": "fp1", "mode": ESCAPES, "scaling": "strange"},
    "an unknown mode": {"mode": ESCAPES},
    "a group with escape sequences": {"group": ESCAPES},
    "a key of a newer version": {"a_newer_column": [1, 2]},
}
TYPED = [
    *(Kind(f"{STATUS} with {how}", edited(STATUS, **new), ("status",)) for how, new in WRONG_STATUS.items()),
    *(Kind(f"{STATUS} with {how}", edited(STATUS, **new)) for how, new in ODD_STATUS.items()),
    *(Kind(f"{LAUNCH} with {how}", edited(LAUNCH, **new), ("status",)) for how, new in WRONG_LAUNCH.items()),
    *(Kind(f"{LAUNCH} with a job of {how}", edited(LAUNCH, job=JOB | new)) for how, new in ODD_JOBS.items()),
    *(
        Kind(
            f"{LAUNCH} with a failed job of {how}",
            lambda site, new=new: (
                site.edit(LAUNCH, job=JOB | new),
                site.edit(STATUS, state="failed", why="infrastructure", cause="a node died"),
            ),
        )
        for how, new in ODD_JOBS.items()
    ),
    *(Kind(f"{ROW} with {how}", edited(ROW, **new), ("collect",)) for how, new in WRONG_ROWS.items()),
    *(Kind(f"{ROW} with {how}", edited(ROW, **new)) for how, new in ODD_ROWS.items()),
    Kind(f"{STATUS} updated at NaN", raw(STATUS, "updated", "NaN"), ("status",)),
    Kind(f"{STATUS} updated at 1e400", raw(STATUS, "updated", "1e400"), ("status",)),
    Kind(f"{STATUS} with half a surrogate pair", raw(STATUS, "cause", '"\\ud800"'), ("status",)),
    Kind(f"{LAUNCH} with half a surrogate pair", raw(LAUNCH, "user", '"\\ud800"'), ("status",)),
    Kind(f"{ROW} with half a surrogate pair", raw(ROW, "cause", '"\\ud800"'), ("collect",)),
    Kind(f"{ROW} with a throughput of NaN", raw(ROW, "throughput", "NaN"), ("collect",)),
    Kind(f"{ROW} with a throughput of 1e400", raw(ROW, "throughput", "1e400"), ("collect",)),
    Kind(f"{ROW} with a loss of NaN", raw(ROW, "loss_first", "NaN")),
    Kind(f"{ROW} with a step of NaN", raw(ROW, "step_seconds_p50", "NaN"), ("collect",)),
]
