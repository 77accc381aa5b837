"""Files and folders that are not what their names promise; for tests/test_damage.py."""

import csv
import io
import json
import os
import pickle
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from damage_site import (
    DEEP,
    ESCAPES,
    GONE,
    HUGE,
    LAUNCH,
    ROW,
    SILENT,
    STATUS,
    WRONG_FILES,
    Damage,
    Kind,
    Site,
    replaced,
    text,
    truncated,
)
from damage_values import JOB
from test_compare import STAMPS
from test_compare import job as make_job

from duel.catalogue import FRAMEWORKS
from duel.evidence import sha256
from duel.table import REMAKE, merge

JSON_KINDS = [
    Kind(
        f"{name} is {how}",
        replaced(name, writer),
        () if how in SILENT[name] else ("collect",) if name == ROW else ("status",),
    )
    for name in (STATUS, LAUNCH, ROW)
    for how, writer in WRONG_FILES.items()
] + [
    Kind(f"{name} is truncated", truncated(name), (says,))
    for name, says in ((STATUS, "status"), (LAUNCH, "status"), (ROW, "collect"))
]


def rows_folder(writer: Callable[[Path], object]) -> Damage:
    return replaced("rows", writer)


def added(name: str, content: str = "{}") -> Damage:
    return lambda site: (site.victim.folder / name).write_text(content)


def bad_evidence(writer: Callable[[Path], object]) -> Damage:
    return replaced("evidence/000-0.npz", writer)


def as_recorded(**changes: Any) -> Damage:
    """Evidence of another content, with the hash that its row wants."""

    def apply(site: Site) -> None:
        path = site.victim.evidence_file(0, 0)
        file = io.BytesIO()
        with np.load(path) as old:
            about = json.loads(str(old["about"])) | changes
            arrays = {name: old[name] for name in old.files if name != "about"}
        arrays |= about.pop("arrays", {})
        np.savez(file, about=np.array(json.dumps(about)), **arrays)
        path.write_bytes(file.getvalue())
        site.edit(ROW, evidence_sha256=sha256([file.getvalue()]))

    return apply


def bomb(site: Site) -> None:
    """Evidence of a few megabytes that fills memory when it is unpacked."""
    path = site.victim.evidence_file(0, 0)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive, archive.open("x.npy", "w") as to:
        header = "{'descr': '|u1', 'fortran_order': False, 'shape': (%d,), }" % HUGE  # noqa: UP031 - braces
        to.write(b"\x93NUMPY\x01\x00" + (len(header) + 1).to_bytes(2, "little") + header.encode() + b"\n")
        for _ in range(300):
            to.write(bytes(1 << 20))
    site.edit(ROW, evidence_sha256=sha256([path.read_bytes()]))


def metrics(*lines: str) -> Damage:
    """Both sides' metrics: only two curves are compared."""

    def apply(site: Site) -> None:
        for framework in FRAMEWORKS:
            run = site.results.run(make_job(framework, preset="smoke").run_id(STAMPS[1]))
            run.metrics.write_text("\n".join(lines) + "\n")

    return apply


def with_csv(change: Callable[[str], str]) -> Damage:
    def apply(site: Site) -> None:
        merge(site.results)
        site.results.csv.write_text(change(site.results.csv.read_text()))

    return apply


def column_of(name: str, value: str) -> Callable[[str], str]:
    """Change one column of the victim's first line, as a version without checks might have written it."""

    def change(content: str) -> str:
        rows = list(csv.reader(io.StringIO(content)))
        place = rows[0].index(name)
        first = next(row for row in rows[1:] if row[0].startswith("jax_mnist"))
        first[place] = value
        text = io.StringIO(newline="")
        csv.writer(text, quoting=csv.QUOTE_ALL, lineterminator="\n").writerows(rows)
        return text.getvalue()

    return change


INTENT, TABLE = "/results/queue/261124-100000-00aaaa.json", "/results/results.csv"
PARITY = "/results/parity/mnist-full-cpu.json"
OTHERS = [
    Kind("rows/ is missing", lambda site: shutil.rmtree(site.victim.rows_folder), ("compare",)),
    Kind("rows/ is a file", rows_folder(text("x")), ("compare",)),
    Kind("rows/ is a pipe", rows_folder(os.mkfifo), ("compare",)),
    Kind("rows/ is a link to itself", rows_folder(lambda path: path.symlink_to(path)), ("compare",)),
    *(Kind(f"rows/ has {n!r}", added(f"rows/{n}")) for n in ("abc.json", "-1.json", "99999999999.json", "x\x1b[2J")),
    Kind("rows/ has a file for a row that was never planned", added("rows/777.json"), ("collect",)),
    Kind("metrics.jsonl is a pipe", replaced("metrics.jsonl", os.mkfifo)),
    Kind("metrics.jsonl is endless", replaced("metrics.jsonl", WRONG_FILES["endless"])),
    Kind("metrics.jsonl is a folder", replaced("metrics.jsonl", WRONG_FILES["a folder"])),
    Kind("metrics.jsonl is garbage", metrics("\x00\xff", "[", "[1]", '{"event": 7}', "[" * DEEP)),
    Kind("metrics.jsonl has a loss that is text", metrics('{"event": "loss", "step": 0, "loss": "low"}')),
    Kind("metrics.jsonl has an event without its loss", metrics('{"event": "loss"}')),
    Kind("metrics.jsonl has losses of 0", metrics('{"event": "loss", "loss": 0}')),
    Kind("metrics.jsonl has losses of NaN", metrics('{"event": "loss", "loss": NaN}', '{"event": "loss", "loss": 1}')),
    Kind("metrics.jsonl has a loss of 400 digits", metrics('{"event": "loss", "loss": 1' + "0" * 400 + "}")),
    Kind("metrics.jsonl has a row that is a list", metrics('{"event": "block", "row": [0]}')),
    Kind("log.txt is a pipe", replaced("log.txt", os.mkfifo)),
    Kind("log.txt is endless", replaced("log.txt", WRONG_FILES["endless"])),
    Kind("log.txt is a folder", replaced("log.txt", WRONG_FILES["a folder"])),
    Kind("log.txt is garbage", replaced("log.txt", text(bytes(range(256))))),
    Kind("script.sh is a pipe", replaced("script.sh", os.mkfifo)),
    Kind("environment.json is garbage", replaced("environment.json", text("\x00["))),
    Kind("wandb/ is a pipe", replaced("wandb", os.mkfifo)),
    Kind(
        "wandb/ has a pipe to upload", replaced("wandb/offline-run-1", lambda p: (p.mkdir(), os.mkfifo(p / "x.wandb")))
    ),
    Kind(
        "wandb/ has an endless log",
        replaced(
            "wandb/run-1",
            lambda path: (
                (path / "logs").mkdir(parents=True),
                (path / "x.wandb").write_bytes(b"x" * 7),
                (path / "logs" / "debug-internal.log").symlink_to("/dev/zero"),
            ),
        ),
    ),
    Kind(
        "wandb/ has a log of lists",
        replaced(
            "wandb/run-1",
            lambda path: (
                (path / "logs").mkdir(parents=True),
                (path / "x.wandb").write_bytes(b"x" * 7),
                (path / "logs" / "debug-internal.log").write_text("[1]\n" + "[" * DEEP),
            ),
        ),
    ),
    Kind("evidence is garbage", bad_evidence(text("PK garbage"))),
    Kind("evidence is a pipe", bad_evidence(os.mkfifo)),
    Kind("evidence is endless", bad_evidence(WRONG_FILES["endless"])),
    Kind("evidence is a pickled object", bad_evidence(text(pickle.dumps({"a": 1})))),
    Kind("evidence of an unknown precision", as_recorded(policy="fp1")),
    Kind("evidence with names that are numbers", as_recorded(names=[1, 2])),
    Kind("evidence with floors that are text", as_recorded(floors="low")),
    Kind("evidence with curves that are text", as_recorded(curves=[["low"], [None]])),
    Kind("evidence with notes that are numbers", as_recorded(notes=[1])),
    Kind("evidence with texts for numbers", as_recorded(arrays={"before": [["x"]]})),
    Kind("evidence that fills the memory", bomb),
    Kind("a certificate that is garbage", replaced(PARITY, text("\x00["))),
    Kind("a certificate that is a pipe", replaced(PARITY, os.mkfifo)),
    Kind("a certificate that is endless", replaced(PARITY, WRONG_FILES["endless"])),
    Kind("a certificate that is a folder", replaced(PARITY, WRONG_FILES["a folder"])),
    Kind("a certificate that links to itself", replaced(PARITY, WRONG_FILES["a link to itself"])),
    Kind(
        "a certificate of wrong types",
        replaced(
            PARITY,
            text(
                json.dumps(
                    {
                        "format": 1,
                        "code_sha256": "x",
                        "weights_sha256": [{}],
                        "versions": {"jax": {"jax": []}, "pytorch": {}},
                        "precisions": [1],
                        "passed": False,
                        "failures": [2],
                    }
                )
            ),
        ),
    ),
    Kind("results/parity is a file", replaced("/results/parity", text("x"))),
    *(
        Kind(f"a submission is {how}", replaced(INTENT, writer), says, shown="ignored: ")
        for how, writer in WRONG_FILES.items()
        for says in [() if how in (*GONE, "a folder") else ("resubmit",)]
    ),
    *(
        Kind(
            f"a submission with {how}",
            replaced(INTENT, text(json.dumps({"format": 1, "since": 1.0} | new))),
            ("resubmit",),
            shown="ignored: ",
        )
        for how, new in {
            "runs that are a number": {"runs": 7},
            "runs that are lists": {"runs": [[1], [2]]},
            "a run id that is a path": {"runs": {"../x": JOB}},
            "a job of wrong types": {"runs": {"jax_mnist_1-x": {"framework": 1}}},
            "no runs": {},
            "runs that are none": {"runs": {}, "created": True},
            "a since that is a list": {"runs": {"jax_mnist_1-x": JOB}, "since": []},
        }.items()
    ),
    Kind(
        "a submission with a format that is a list",
        replaced(INTENT, text(json.dumps({"format": []}))),
        ("resubmit",),
        shown="by another version",
    ),
    *(
        Kind(f"results.csv is {how}", replaced(TABLE, writer), ("collect",), hidden=True, shown=REMAKE)
        for how, writer in WRONG_FILES.items()
        if how not in ("missing", "a link to nowhere")
    ),
    *(
        Kind(f"results.csv with {name} {value!r:.30}", with_csv(column_of(name, value)))
        for name, value in (
            ("status", "sleeping"),
            ("row", "first"),
            ("row", "-1"),
            ("row", "9" * 5000),
            ("run_id", "../../x"),
            ("run_id", ""),
            ("use_case", "99"),
            ("throughput", "fast"),
            ("throughput", "-1"),
            ("missing", "[1]"),
            ("missing", "{"),
            ("missing", "[" * DEEP),
            ("framework", "tensorflow"),
            ("variables", "x"),
            ("cause", ESCAPES),
            ("cause", "x" * 200_000),
            ("benchmark", "mnist\x00"),
        )
    ),
    Kind("results.csv with a line too short", with_csv(lambda text: text + "a\n")),
    Kind("results.csv with a line too long", with_csv(lambda text: text + ",".join(["x"] * 500) + "\n")),
    Kind("results.csv with an open quote", with_csv(lambda text: text + '"open\n')),
    *(
        Kind(f"cluster.yaml is {how}", replaced("/cluster.yaml", writer), of_cluster=True)
        for how, writer in WRONG_FILES.items()
    ),
    Kind("cluster.yaml is a deep list", replaced("/cluster.yaml", text("- " * DEEP)), of_cluster=True),
    Kind("cluster.yaml has escape sequences", replaced("/cluster.yaml", text(f"{ESCAPES}: x\n")), of_cluster=True),
    Kind(
        "cluster.yaml has keys with escape sequences",
        replaced("/cluster.yaml", text('"a\\e]0;x\\a": 1\ndefault: "\\e[2J"\ntargets: {"\\e[2J": 7}\n')),
        of_cluster=True,
    ),
    *(
        Kind(f"runs/ has {name!r:.40}", lambda site, name=name: (site.results.folder / "runs" / name).mkdir())
        for name in (
            "-x",
            ".hidden",
            "a b",
            "x\x1b[2J",
            "ünï",
            "x" * 97,
            "x\n",
            b"\xff\xfe".decode(errors="surrogateescape"),
        )
    ),
    *(
        Kind(f"{lock} is {how}", replaced(f"/results/{lock}", writer), hidden=True)
        for lock in (".results.lock", ".submitting.lock")
        for how, writer in WRONG_FILES.items()
        if how in ("a pipe", "a folder", "endless", "a link to itself", "not JSON")
    ),
    Kind("runs/ has an empty folder", lambda site: (site.results.folder / "runs" / "x").mkdir(), ()),
    Kind("runs/ has a pipe", lambda site: os.mkfifo(site.results.folder / "runs" / "jax_x")),
    Kind(
        "runs/ has a link to itself",
        lambda site: (site.results.folder / "runs" / "jax_x").symlink_to(site.results.folder / "runs" / "jax_x"),
    ),
    Kind(
        "runs/ has a link to itself inside", lambda site: (site.victim.folder / "again").symlink_to(site.victim.folder)
    ),
    Kind("runs/ has a link to /proc", lambda site: (site.results.folder / "runs" / "jax_x").symlink_to("/proc/self")),
]
