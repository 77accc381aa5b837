"""Every state and reason of a job has words; any other text has some, too.

``recorded/reasons.txt`` has the reasons that Slurm's source knows (src/common/job_state_reason.c, 22.05 and 25.11).
"""

import dataclasses
import re
from datetime import datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st
from recorded_queue import NOW, recorded

from duel.launch import reasons
from duel.launch.reasons import ALIVE, BLOCKED, ENDED, UNKNOWN, WAITING, SlurmJob, judge

REASONS = recorded("reasons").split()

# https://slurm.schedmd.com/job_state_codes.html, and the states of squeue(1) and sacct(1) of 22.05.
STATES = {
    WAITING: "PENDING",
    ALIVE: "RUNNING CONFIGURING COMPLETING SUSPENDED STOPPED RESIZING SIGNALING STAGE_OUT REQUEUED REQUEUE_FED"
    " POWER_UP_NODE UPDATE_DB EXPEDITING",
    BLOCKED: "REQUEUE_HOLD SPECIAL_EXIT RESV_DEL_HOLD",
    ENDED: "COMPLETED FAILED TIMEOUT OUT_OF_MEMORY NODE_FAIL BOOT_FAIL LAUNCH_FAILED RECONFIG_FAIL PREEMPTED CANCELLED"
    " DEADLINE",
    UNKNOWN: "REVOKED",
}
JOB = SlurmJob("7", "run", "ada", "PENDING", "PENDING", "", "", "", "1:00:00")
texts = st.text(st.characters(codec="utf-8"))


@pytest.mark.parametrize(
    ("kind", "state"), [(kind, state) for kind, states in STATES.items() for state in states.split()]
)
def test_every_documented_state_has_a_verdict(kind: str, state: str) -> None:
    for nodes in ("", "h100-1", "h100-[1-2]"):
        verdict = judge(dataclasses.replace(JOB, state=state, raw=state, nodes=nodes))
        assert verdict.kind == kind
        assert bool(verdict.cause) == (kind == ENDED)
        assert len(verdict.words) > 3
        assert "  " not in verdict.words


def test_an_unknown_state_decides_nothing() -> None:
    assert dataclasses.astuple(judge(dataclasses.replace(JOB, state="XYZ", raw="XYZ by 7"))) == (
        UNKNOWN,
        "",
        "unknown state 'XYZ by 7'",
    )
    assert judge(dataclasses.replace(JOB, state="", raw="")).kind == UNKNOWN


def pending(reason: str) -> reasons.Verdict:
    return judge(dataclasses.replace(JOB, reason=reason))


# Said of jobs that have ended; should a pending one have them, they are shown as they are.
OF_ENDED_JOBS = {"InactiveLimit", "NonZeroExitCode", "OutOfMemory", "RaisedSignal", "TimeLimit"}


@pytest.mark.parametrize("reason", sorted(set(REASONS) - {"None"} - OF_ENDED_JOBS))
def test_every_documented_reason_has_words_of_its_own(reason: str) -> None:
    verdict = pending(reason)
    assert verdict.kind in (WAITING, BLOCKED)
    assert verdict.words.startswith("blocked: ") == (verdict.kind == BLOCKED)
    assert not verdict.words.startswith("waits (")
    assert verdict.words.endswith(f"({reason})") or reason in ("Resources", "Priority")
    never_by_itself = re.search(r"Per(Job|Node)(Limit)?$|^QOSMin|NotAllowed|^Invalid|NeverSat|^JobH|^Partition", reason)
    others = ("BadConstraints", "MaxMemPerLimit", "BurstBufferOperation", "SystemFailure")
    others += ("ReservationDeleted", "ReservationInvalid")
    assert (verdict.kind == BLOCKED) == (bool(never_by_itself) or reason in others)


@pytest.mark.parametrize(
    ("reason", "kind", "words"),
    [
        ("AssocGrpGRES", WAITING, "waits until others of its user or group have ended"),
        ("QOSMaxGRESPerUser", WAITING, "waits until others of its user or group have ended"),
        ("MaxGRESPerAccount", WAITING, "waits until others of its user or group have ended"),
        ("AssocGrpCPURunMinutesLimit", WAITING, "waits until others of its user or group have ended"),
        ("AssocGrpCPUMinutesLimit", WAITING, "its group's budget is used up"),
        ("QOSGrpWallLimit", WAITING, "its group's budget is used up"),
        ("QOSMaxWallDurationPerJobLimit", BLOCKED, "blocked: a job may not run for that long: lower its time limit"),
        ("QOSMaxGRESMinutesPerJob", BLOCKED, "blocked: a job may not use that much for that long"),
        ("QOSMaxGRESPerNode", BLOCKED, "blocked: a job may not use that much: request less"),
        ("QOSMinGRES", BLOCKED, "blocked: its quality of service demands larger jobs"),
        ("ReqNodeNotAvail, Reserved for maintenance", WAITING, "waits for maintenance to end: a shorter time limit"),
        ("ReqNodeNotAvail,_UnavailableNodes:a[1-2]", WAITING, "waits for nodes that are down, drained or reserved"),
        ("launch failed requeued held", BLOCKED, "blocked: it is held: fix the cause, then release it"),
        ("launch_failed_requeued_held", BLOCKED, "blocked: it is held: fix the cause, then release it"),
        ("user env retrieval failed requeued held", BLOCKED, "blocked: it is held: fix the cause, then release it"),
        ("job requeued in special exit state", BLOCKED, "blocked: it is held: fix the cause, then release it"),
        (
            "Job's account not permitted to use this partition (a allows b not c)",
            BLOCKED,
            "blocked: change its account, quality of service or partition (Job's account not permitted",
        ),
        ("", WAITING, "has not been considered by the scheduler yet"),
        ("A_new_reason: of 2031", WAITING, "waits (A new reason: of 2031)"),
        ("{id} {0} %s", WAITING, "waits ({id} {0} %s)"),
    ],
)
def test_reasons(reason: str, kind: str, words: str) -> None:
    verdict = pending(reason)
    assert (verdict.kind, verdict.words[: len(words)]) == (kind, words)


@pytest.mark.parametrize(
    ("exit_code", "nodes", "cause", "words"),
    [
        ("0:9", "h100-1", reasons.CODE, "its script was killed by signal 9"),
        ("3:0", "h100-1", reasons.CODE, "its script failed with exit code 3"),
        ("0:53", "h100-1", reasons.NEVER_RAN, "never ran: Slurm could not open its log file; does its folder exist?"),
        ("", "h100-1", reasons.CODE, "failed"),
        ("0:0", "", reasons.NEVER_RAN, "failed before it got a node"),
    ],
)
def test_failed(exit_code: str, nodes: str, cause: str, words: str) -> None:
    # Whatever the reason: both tools give misleading ones to jobs that have failed.
    for reason in ("", "JobLaunchFailure", "NodeDown", "JobHeldUser"):
        job = dataclasses.replace(JOB, state="FAILED", reason=reason, exit_code=exit_code, nodes=nodes)
        assert dataclasses.astuple(judge(job)) == (ENDED, cause, words)


@given(state=st.sampled_from(" ".join(STATES.values()).split()) | texts, reason=texts, raw=texts, code=texts)
def test_any_job_has_a_verdict(state: str, reason: str, raw: str, code: str) -> None:
    verdict = judge(dataclasses.replace(JOB, state=state, raw=raw, reason=reason, exit_code=code))
    assert verdict.kind in (WAITING, BLOCKED, ALIVE, ENDED, UNKNOWN)
    assert bool(verdict.cause) == (verdict.kind == ENDED)
    assert verdict.words


@pytest.mark.parametrize(
    "log",
    [
        "slurmstepd: error: Job 7 exceeded memory limit (4208 > 4096), being killed",
        "slurmstepd: error: Exceeded job memory limit at some point.",
        "slurmstepd: error: Detected 1 oom-kill event(s) in StepId=7.batch.",
        "slurmstepd: error: Detected 1 oom_kill event in StepId=7.0. Some of the step tasks have been OOM Killed.",
        "srun: error: h100-1: task 0: Out Of Memory",
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 MiB.",
        "RuntimeError: CUDA error: out of memory",
        "jaxlib.XlaRuntimeError: RESOURCE_EXHAUSTED: Out of memory while trying to allocate 34359738368 bytes.",
        "CUDA_ERROR_OUT_OF_MEMORY",
        "  raise MemoryError",
        "numpy.core._exceptions._ArrayMemoryError: Unable to allocate 8.00 TiB",
        "OSError: [Errno 12] Cannot allocate memory",
        "DefaultCPUAllocator: can't allocate memory: you tried to allocate 8796093022208 bytes.",
        "terminate called after throwing an instance of 'std::bad_alloc'",
    ],
)
def test_logs_of_jobs_that_ran_out_of_memory(log: str) -> None:
    assert reasons.looks_out_of_memory(f"step 3, loss 2.301\n{log}\n")


@pytest.mark.parametrize(
    "log",
    ["", "step 3, loss 2.301, peak memory 12 GB", "bash: no memory of it", "Killed", "a bloom_killer"],
)
def test_logs_of_others(log: str) -> None:
    assert not reasons.looks_out_of_memory(log)


@pytest.mark.parametrize(
    ("start", "words"),
    [
        ("2026-11-21T00:20:00", "is due"),
        ("2026-11-20T10:00:00", "is due"),
        ("2026-11-21T00:20:20", "expected to start 00:20 (in 1 min)"),
        ("2026-11-21T00:55:00", "expected to start 00:55 (in 35 min)"),
        ("2026-11-21T02:25:00", "expected to start 02:25 (in 2 h 5 min)"),
        ("2026-11-22T00:00:00", "expected to start 2026-11-22 00:00 (in 23 h 40 min)"),
        ("2026-11-25T02:20:00", "expected to start 2026-11-25 02:20 (in 4 d 2 h)"),
        ("", ""),
        ("N/A", ""),
        ("Unknown", ""),
    ],
)
def test_when(start: str, words: str) -> None:
    assert reasons.when(start, NOW) == words


@given(texts | st.datetimes().map(datetime.isoformat))
def test_any_start_has_words_or_none(start: str) -> None:
    assert isinstance(reasons.when(start, NOW), str)
