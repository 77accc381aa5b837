"""What is printed: in place and in colour on a terminal of any width, as few plain lines in a pipe."""

import fcntl
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT, clean_environment, heeding_ctrl_c
from test_compare import STAMPS, job, make, make_pair

from duel.catalogue import FRAMEWORKS, PAIRED
from duel.launch import display, state
from duel.launch.views import RunView
from duel.modes import DEFAULT
from duel.results import Results, Run
from duel.states import FAILED, FINISHED, RUNNING
from duel.status import LaunchRecord, Progress, Status, this_process
from duel.terminal import Table, plain

ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
COLOUR = re.compile(r"\x1b\[[0-9;]*3[0-9][0-9;]*m")
RED = "\x1b[31mred\x07"
BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64, 128)
# What each program below begins with; the first argument is the folder of results.
HEAD = """
import sys
from pathlib import Path
from duel import terminal
from duel.launch import display, manage, state
from duel.report import compare
from duel.results import Results
results = Results(Path(sys.argv[1]))
"""
COMPARE = "terminal.show(*compare.report(results.runs(), results, 'local'))"
STATUS = "terminal.show(display.table(state.look(results)))"
WAIT = "manage.wait(results.runs(), results)"


@pytest.fixture
def results(tmp_path: Path) -> Results:
    (tmp_path / "results").mkdir()
    return Results(tmp_path / "results")


def queued(results: Results, framework: str, benchmark: str = "efficientnet_b0") -> Run:
    """A run of this process that has not begun."""
    planned = job(framework, benchmark)
    run = results.run(planned.run_id(STAMPS[0]))
    launch = LaunchRecord(job=planned, pair=run.id.partition("_")[2])
    run.create(planned.rows(), launch=launch, owner=this_process(), target="local")
    return run


def measuring(run: Run, done: int, **more: Any) -> None:
    progress = Progress(done=done, needed=50, throughput=1234.5, unit="images/s", loss=2.5)
    begun = {"phase": "measuring", "phase_started": time.time() - 20, "part": "row 2 of 8"}
    run.write_status(state=RUNNING, owner=this_process(), progress=progress, **begun | more)


def environment(**more: str) -> dict[str, str]:
    unwanted = ("NO_COLOR", "FORCE_COLOR", "COLUMNS", "LINES", "TTY_COMPATIBLE", "TTY_INTERACTIVE")
    kept = {name: value for name, value in clean_environment().items() if name not in unwanted}
    return kept | {"TERM": "xterm-256color", "PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"} | more


class Screen:
    """A program on a real terminal."""

    def __init__(self, program: str, results: Results, columns: int, lines: int = 24, **more: str) -> None:
        self._ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
        self.process = subprocess.Popen(
            [sys.executable, "-c", HEAD + program, str(results.folder)],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            cwd=ROOT,
            env=environment(**more),
            start_new_session=True,
        )
        os.close(theirs)
        self.raw = ""

    def __enter__(self) -> "Screen":
        return self

    def __exit__(self, *error: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self._ours)

    def until(self, words: str, seconds: float = 60.0) -> None:
        """Read until ``words`` have been printed; empty for the program's end."""
        end = time.monotonic() + seconds
        while not words or words not in self.raw:
            try:
                read = os.read(self._ours, 65536)
            except OSError:  # how Linux says that the other side is closed
                read = b""
            if not read:
                assert not words, f"{words!r} is not in {self.raw!r}"
                break
            self.raw += read.decode(errors="replace")
            assert time.monotonic() < end, self.raw

    def whole(self) -> str:
        self.until("")
        assert self.process.wait(60) == 0, self.raw
        return self.raw


def screen(program: str, results: Results, columns: int, **more: str) -> str:
    """All that ``program`` prints on a terminal."""
    with Screen(program, results, columns, **more) as shown:
        return shown.whole()


def lines_of(raw: str) -> list[str]:
    """Without colour."""
    return ESCAPE.sub("", raw).replace("\r\n", "\n").replace("\r", "\n").splitlines()


def piped(program: str, results: Results, **more: str) -> str:
    command = [sys.executable, "-c", HEAD + program, str(results.folder)]
    done = subprocess.run(command, cwd=ROOT, env=environment(**more), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_eight_batch_sizes_are_eight_lines_and_the_verdict_comes_first(results: Results) -> None:
    make_pair(results, STAMPS[0], use_case=5, batch_sizes=BATCH_SIZES)
    said = piped(COMPARE, results).splitlines()
    assert said[1] == "mnist (full, fp32), inference: indicative at all 8 points; JAX / PyTorch 1.5"
    assert said[3].split() == ["batch", "jax", "pytorch", "JAX", "/", "PyTorch", "floor", "verdict"]
    assert [line.split() for line in said[4:12]] == [
        [str(batch_size), "150", "100", "1.5", "-", "indicative"] for batch_size in BATCH_SIZES
    ]
    assert sum("one process each, not in turn" in line for line in said) == 1
    table = said[3 : said.index("8 points: indicative: one process each, not in turn, no interval: not a verdict")]
    assert max(map(len, table)) <= 80


@pytest.mark.parametrize("columns", [80, 200])
def test_the_comparison_fits_a_terminal(results: Results, columns: int) -> None:
    products = ("norms", "clipped_sum", "materialised")
    make(results, job(PAIRED, use_case=3, products=products, batch_sizes=(4, 8), mode=DEFAULT), STAMPS[1])
    make_pair(results, STAMPS[0], benchmark="efficientnet_b0")
    said = lines_of(screen(COMPARE, results, columns))
    copied = [line for line in said if "python main.py" in line or line.startswith(("run folder", "CSV"))]
    assert max(len(line.rstrip()) for line in said if line not in copied) <= columns
    assert "equal within 5 % at all 6 points within this session" in " ".join(" ".join(said).split())
    # A command stays in one piece.
    assert "for a verdict: python main.py --benchmark efficientnet_b0 --use_case 1 --paired" in said


def test_what_one_side_alone_has_measured_is_shown_with_why_the_rest_failed(results: Results) -> None:
    run = make(results, job("jax", use_case=5, batch_sizes=BATCH_SIZES), STAMPS[0])
    for number in (6, 7):
        run.write_row(run.read_row(number).replace(status=FAILED, cause="out of memory"))
    said = piped(COMPARE, results).splitlines()
    assert said[1] == "mnist (full, fp32), inference: nothing to compare, only rows of jax"
    assert [line.split() for line in said[9:12]] == [["32", "100"], ["64", "failed"], ["128", "failed"]]
    assert "2 points: jax failed: out of memory" in said


def test_identical_notes_are_counted(results: Results) -> None:
    for benchmark in ("mnist", "gcn", "gpt2"):
        make_pair(results, STAMPS[0], benchmark=benchmark)
    said = piped(COMPARE, results).splitlines()
    assert [line.partition(": ")[2] for line in said[1:4]] == ["indicative: JAX / PyTorch 1.5"] * 3
    assert "3 pairs: Same initial weights, same samples in the same order (hashes agree)." in said
    assert "6 runs: Weights & Biases: the run did not get that far" in said
    assert len([line for line in said if "hashes agree" in line]) == 1


def test_a_long_reason_is_cut_in_the_verdict_and_whole_below(results: Results) -> None:
    runs = make_pair(results, STAMPS[0])
    cause = f"RuntimeError: {RED} {'and on ' * 20}to the end"
    runs[1].write_row(runs[1].read_row(0).replace(status=FAILED, cause=cause))
    said = piped(COMPARE, results)
    assert "\x1b" not in said
    assert "\x07" not in said
    first, *others = said.strip().splitlines()
    assert first.endswith("…")
    assert any(line.startswith("no ratio: NOT COMPARABLE: status") and "to the end)" in line for line in others)


@pytest.mark.parametrize("columns", [80, 200])
def test_a_control_character_in_a_cause_is_shown_escaped(results: Results, columns: int) -> None:
    queued(results, "jax").settle(state=FAILED, cause=f"RuntimeError: {RED}\nof two lines", why="code")
    raw = screen(STATUS, results, columns, NO_COLOR="1")
    assert "\x1b[31m" not in raw
    assert "\x07" not in raw
    assert "RuntimeError: \\x1b[31mred\\x07 of two lines" in " ".join(" ".join(lines_of(raw)).split())
    assert "\\x1b[31mred\\x07" in piped(STATUS, results)


@pytest.mark.parametrize("columns", [80, 200])
def test_states_have_colours_and_names_stay_whole(results: Results, columns: int) -> None:
    run, other = queued(results, "jax"), queued(results, "pytorch")
    measuring(run, 25)
    other.settle(state=FINISHED, cause="")
    raw = screen(STATUS, results, columns)
    assert "\x1b[36mrunning" in raw
    assert "\x1b[32mfinished" in raw
    said = lines_of(raw)
    assert max(len(line.rstrip()) for line in said) <= columns
    assert sum(line.startswith(run.id) for line in said) == 1
    assert len(said) == (3 if columns == 200 else 5)
    assert not COLOUR.search(screen(STATUS, results, columns, NO_COLOR="1"))


@pytest.mark.parametrize("columns", [80, 200])
def test_a_run_that_is_waited_for_is_drawn_in_place(results: Results, columns: int) -> None:
    """Rows, steps with a bar, time left and elapsed time; the screen is left in order by the end, and by Ctrl-C."""
    run = queued(results, "jax")
    measuring(run, 10)
    with Screen(WAIT, results, columns) as shown:
        shown.until("10 of at least")
        measuring(run, 40)
        shown.until("40 of at least")
        run.settle(state=FINISHED, cause="")
        assert "finished" in shown.whole()
    said = " ".join(" ".join(lines_of(shown.raw)).split())
    assert re.search(
        "━━━╌╌╌╌╌╌╌╌╌╌╌╌╌ 1:[2-5][0-9] min left row 2 of 8: measuring: 10 of at least 50 steps, 1234 i", said
    )
    assert re.search(r"━━━━━━━━━━━━━╌╌╌ [0-9]+ s left .*, loss 2\.5 \([0-9]+ s\)", said)
    assert "\x1b[1A" in shown.raw  # up, to draw over what was there
    assert "Slurm" not in shown.raw
    assert max(len(line.rstrip()) for line in lines_of(shown.raw)) <= columns
    assert shown.raw.rindex("\x1b[?25h") > shown.raw.rindex("\x1b[?25l")  # the cursor is back


def test_ctrl_c_leaves_a_clean_terminal(results: Results) -> None:
    measuring(queued(results, "jax"), 10)
    program = f"try:\n    {WAIT}\nexcept KeyboardInterrupt:\n    print('stopped')"
    with heeding_ctrl_c(), Screen(program, results, 80) as shown:
        shown.until("10 of at least")
        shown.process.send_signal(signal.SIGINT)
        assert lines_of(shown.whole())[-1] == "stopped"
    assert shown.raw.rindex("\x1b[?25h") > shown.raw.rindex("\x1b[?25l")


def test_more_runs_than_lines_show_what_runs_and_what_is_next(results: Results) -> None:
    look = state.look(results, [])
    own = this_process()
    every = [
        RunView(results.run(f"jax_mnist_1-{number}"), Status(state=word, owner=own, updated=time.time()), one)
        for number, word in enumerate([FINISHED] * 9 + [RUNNING] + ["queued"] * 30)
        for one in [LaunchRecord(user="somebody")]
    ]
    shown = display.live_table(replace(look, runs=every), 6)
    assert [line[0].partition("-")[2] for line in shown.lines] == ["9", "10", "11", "12", "13", "14"]
    assert shown.notes[0].startswith("(34 more: ")
    assert shown.head[3] == "user"  # whose they are, as they are not ours
    assert len(display.table(replace(look, runs=every)).lines) == 31


def test_in_a_pipe_each_phase_has_one_line(results: Results, capsys: pytest.CaptureFixture[str]) -> None:
    """Not one line a second, as the figures of a phase change."""
    run = queued(results, "jax")
    with display.live() as show:
        for phase in ("starting", "first call", "first call"):
            run.write_status(state=RUNNING, owner=this_process(), phase=phase, phase_started=time.time())
            show(state.look(results))
        for done in range(5, 50, 5):
            measuring(run, done)
            show(state.look(results))
    said = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[-1].partition(" (")[0] for line in said] == [
        "starting",
        "first call",
        "row 2 of 8: measuring: 5 of at least 50 steps, 1234 images/s, loss 2.5",
    ]


def test_a_proof_in_a_pipe_has_one_line_for_each_run_that_begins(
    results: Results, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = [queued(results, framework) for framework in FRAMEWORKS]
    with display.live(phases=False) as show:
        for run in runs:
            for phase in ("starting", "computing in float64"):
                run.write_status(state=RUNNING, owner=this_process(), phase=phase)
                show(state.look(results))
    assert capsys.readouterr().out.splitlines() == [f"computing: {run.id}" for run in runs]


def test_where_nothing_can_be_redrawn_a_terminal_gets_lines(results: Results) -> None:
    run = make(results, job("jax"), STAMPS[0])
    said = screen(WAIT, results, 80, TERM="dumb")
    assert "\x1b" not in said
    assert lines_of(said) == [f"{run.id}  finished"]


def test_a_plain_table_folds_what_may_be_folded() -> None:
    table = Table(["", "a", "b"], [["x", "1", "word " * 30]], folded=(1, 2), right=(1, 2))
    assert max(map(len, str(table).splitlines())) <= 80
    assert plain([table, "a line\x1b"]).endswith("\na line\\x1b")
