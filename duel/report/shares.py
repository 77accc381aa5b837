"""Why one side of a pair is faster: the ratio divided among kinds of work and among the modules of the model.

The logarithm of a ratio can be divided so that parts add up: part k, which takes a_k seconds of a step in JAX and b_k
in PyTorch, has the share (b_k - a_k) / L of log(b / a), where L = (b - a) / log(b / a) is the logarithmic mean of both
steps (as in index decomposition: Ang 2004, doi:10.1016/S0301-4215(03)00076-4). The seconds are those of the measured
rows, divided as the traces of the same programs are.
"""

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from duel import kinds, modes, profile
from duel.catalogue import BENCHMARKS
from duel.files import Damaged
from duel.profile import Part, Profile
from duel.record import Row
from duel.report import ratios
from duel.report.pairs import Outcome
from duel.report.ratios import Estimate
from duel.switches import ON

SIDES = ("JAX", "PyTorch")
WHOLE, IDLE = "(the model itself)", "(idle)"  # what is in no module: the loss, for one
# What may change a share, by framework and kind of work: switches and their values, the first that there is.
REMEDIES: dict[tuple[str, str], tuple[tuple[str, str], ...]] = {
    ("jax", kinds.DEPTHWISE): (("depthwise", "shifted"),),
    ("jax", kinds.CONVOLUTION): (("convolution", "products"),),
    ("pytorch", kinds.CONVOLUTION): (("channels_last", ON),),
    ("pytorch", kinds.COPIES): (("channels_last", ON),),
    ("pytorch", kinds.OPTIMIZER): (("fused_optimizer", ON),),
    ("pytorch", kinds.NORMS): (("compile", ON),),
    ("pytorch", kinds.ELEMENTWISE): (("compile", ON),),
    ("pytorch", kinds.MOVES): (("aggregation", "sparse"), ("compile", ON)),
    ("pytorch", kinds.IDLE): (("compile", ON),),
}

TELLING = 1.1  # a ratio whose difference is worth dividing by percents
APART = 1.25  # how much longer a step may take in the row than in the profiled process, or the other way round

GRAPHS = ("command_buffers", "cuda_graphs")  # switches with which a step is replayed; they are traced without
MOST_IDLE = 0.1  # of such a trace, so that what a replay saves is no large part of the step

Side = tuple[Row, Profile]


@dataclass(frozen=True)
class Share:
    """A part of a step, and what it adds to the logarithm of JAX / PyTorch in each pair."""

    name: str
    seconds: tuple[float, float]  # of a step in JAX and in PyTorch, mean over the pairs
    logs: list[float]
    sessions: Sequence[int] = ()  # the session of each pair; all are of one if there are none

    @property
    def log(self) -> float:
        return statistics.fmean(self.logs)

    @property
    def factor(self) -> Estimate | None:
        """What the part multiplies JAX / PyTorch by; None for a single pair, which has no interval.

        Pairs of one session are alike in what differs between sessions, so of several sessions their means count.
        """
        of_session: dict[int, list[float]] = {}
        for log, session in zip(self.logs, self.sessions, strict=False):
            of_session.setdefault(session, []).append(log)
        counted = [statistics.fmean(logs) for logs in of_session.values()] if len(of_session) > 1 else self.logs
        return ratios.estimate(counted) if len(counted) > 1 else None

    @property
    def slower(self) -> int:
        """Which side it makes slower: 0 for JAX, 1 for PyTorch."""
        return 0 if self.log < 0 else 1


@dataclass(frozen=True)
class Explained:
    """A point, and those of its pairs of which both sides have a profile."""

    outcome: Outcome
    pairs: list[tuple[Side, Side]]
    missing: list[str]  # why others have none

    @property
    def why(self) -> str:
        """Why nothing is concluded from the profiles; empty if something is.

        There must be a ratio to explain, and the profiled processes must have seen what it was measured on.
        """
        if not self.outcome.shown:
            return self.outcome.why
        if replayed := self._replayed:
            return replayed
        far = [pair for pair in self._times if not all(1 / APART <= times <= APART for times in pair)]
        if not far:
            return ""
        apart = [f"{times:.2f} ({name})" for name, times in zip(SIDES, far[0], strict=True)]
        where = f" in {len(far)} of {len(self.pairs)} pairs" if len(self.pairs) > 1 else ""
        return (
            f"the profiled processes took {' and '.join(apart)} times the row's step{where}, beyond {1 / APART:.2f} to "
            f"{APART:.2f}; a quiet machine or a preset with more steps may bring them together"
        )

    @property
    def _replayed(self) -> str:
        """Say that rows replay CUDA graphs, which no trace shows, and the trace is of more than kernels; else empty."""
        for side in (side for pair in self.pairs for side in pair):
            row, found = side
            graphs = [f"{name}={ON}" for name in GRAPHS if f"{name}={ON}" in str(row.switches).split()]
            idle = found.seconds(kind=kinds.IDLE) / found.traced_seconds if found.traced_seconds else 0.0
            if row.device_kind == "gpu" and graphs and idle > MOST_IDLE:
                return (
                    f"{row.framework} was measured with CUDA graphs ({graphs[0]}), which no trace shows, and without "
                    f"them {idle:.0%} of its step is idle; a row in a mode without that switch can be explained"
                )
        return ""

    @property
    def _times(self) -> list[list[float]]:
        """How many times the row's step the profiled process of each side took, in each pair."""
        return [[found.step_seconds / _step(row) for row, found in pair] for pair in self.pairs]

    @property
    def profiled(self) -> tuple[float, float]:
        """How many times the row's step the profiled process of each side took, the mean over the pairs."""
        jax, pytorch = (statistics.fmean(side) for side in zip(*self._times, strict=True))
        return jax, pytorch

    @property
    def steps(self) -> tuple[float, float]:
        """The seconds of a step of each side."""
        each = [[_step(row) for row, _ in pair] for pair in self.pairs]
        jax, pytorch = (statistics.fmean(side) for side in zip(*each, strict=True))
        return jax, pytorch

    @property
    def sessions(self) -> list[int]:
        """The number of the session of each pair."""
        rows = {id(row): number for number, session in enumerate(self.outcome.sessions) for row, _ in session}
        return [rows[id(row)] for (row, _), _ in self.pairs if id(row) in rows]

    @property
    def log(self) -> float:
        """The logarithm of JAX / PyTorch that is divided."""
        return statistics.fmean(math.log(_step(pair[1][0]) / _step(pair[0][0])) for pair in self.pairs)

    @property
    def share(self) -> float:
        """The share of the difference between both sides that is of known kinds, by absolute amounts."""
        every = self.divided(lambda part: part.kind)
        amounts = {share.name: abs(share.log) for share in every}
        whole = sum(amounts.values())
        return 1 - amounts.get(kinds.OTHER, 0.0) / whole if whole else 1.0

    @property
    def ceilings(self) -> tuple[float, float]:
        """The machine's FLOP/s of matrix products and bytes per second of copies, the higher of both sides' each."""
        rows = [row for row, _ in self.pairs[0]]
        rate = max(row.matmul_flops_per_second or 0.0 for row in rows)
        return rate, max(row.copy_bytes_per_second or 0.0 for row in rows)

    def work(self, kind: str) -> list[tuple[float, float, float]]:
        """Return the seconds, FLOP and bytes of this kind of work in a step of each side; 0 FLOP and bytes if the FLOP
        of some of it are not known."""
        sides = []
        for row, found in self.pairs[0]:
            parts = [part for part in found.parts if part.kind == kind]
            scale = _step(row) / sum(part.seconds for part in found.parts)
            seconds, flops, moved = (
                sum(getattr(part, name) for part in parts) for name in ("seconds", "flops", "bytes")
            )
            known = all(part.counted for part in parts)
            sides.append((scale * seconds, flops, moved) if known else (scale * seconds, 0.0, 0.0))
        return sides

    def roofs(self, kind: str) -> list[str]:
        """Return which ceiling bounds this kind of work on each side, and how much of it is reached; may be empty."""
        rate, bandwidth = self.ceilings
        texts = []
        for seconds, flops, moved in self.work(kind):
            needed = {"compute": flops / rate if rate else 0.0, "memory": moved / bandwidth if bandwidth else 0.0}
            bound = max(needed, key=lambda name: needed[name])
            texts.append(f"{bound} {needed[bound] / seconds:.0%}" if seconds and needed[bound] else "")
        return texts

    def divided(self, name_of: Callable[[Part], str]) -> list[Share]:
        """Return the shares of the parts that ``name_of`` names, from the largest to the smallest."""
        seconds: dict[str, list[list[float]]] = {}
        means = []
        for place, pair in enumerate(self.pairs):
            means.append(logarithmic_mean(*(_step(row) for row, _ in pair)))
            for side, (row, found) in enumerate(pair):
                scale = _step(row) / sum(part.seconds for part in found.parts)
                for part in found.parts:
                    each = seconds.setdefault(name_of(part), [[0.0, 0.0] for _ in self.pairs])
                    each[place][side] += part.seconds * scale
        shares = [
            Share(
                name,
                (statistics.fmean(jax for jax, _ in each), statistics.fmean(pytorch for _, pytorch in each)),
                [(pytorch - jax) / mean for (jax, pytorch), mean in zip(each, means, strict=True)],
                self.sessions,
            )
            for name, each in seconds.items()
        ]
        return sorted(shares, key=lambda share: -abs(share.log))


def place(part: Part) -> str:
    """Return the module that ``part`` is in, in words where there is none."""
    return IDLE if part.kind == kinds.IDLE else part.module or WHOLE


def _step(row: Row) -> float:
    return row.step_seconds_p50 or math.nan


def logarithmic_mean(a: float, b: float) -> float:
    return a if math.isclose(a, b, rel_tol=1e-9) else (b - a) / math.log(b / a)


def explained(outcome: Outcome, folder: Path) -> Explained:
    """Return ``outcome`` with the profiles of its pairs, from the ``folder`` that has its runs."""
    pairs, missing = [], []
    for pair in outcome.pairs:
        found = [_profile(row, folder) for row in pair]
        if any(found):  # otherwise the pair was not profiled
            missing += [
                f"{row.run_id}, row {row.row}, {row.framework}: no profile: {one.why if one else 'there is no file'}"
                for row, one in zip(pair, found, strict=True)
                if one is None or one.why
            ]
        sides = [(row, one) for row, one in zip(pair, found, strict=True) if one is not None and not one.why]
        if len(sides) == 2:
            pairs.append((sides[0], sides[1]))
    return Explained(outcome, pairs, missing)


def profiled(outcome: Outcome, folder: Path) -> Explained | None:
    """Return ``outcome``, which is over all its sessions, with its profiles; None if nothing of it was profiled."""
    found = explained(outcome, folder)
    return found if found.pairs or found.missing else None


def _profile(row: Row, folder: Path) -> Profile | None:
    """Return the profile of ``row``, None if it has none; one that cannot be read says so as its ``why``."""
    run, number = str(row.run_id), row.row or 0
    try:
        return profile.read(folder / "runs" / run, number)
    except Damaged as error:
        return Profile(run, number, str(row.framework), why=str(error))


def remedy(kind: str, row: Row) -> str:
    """Return the mode that may change what ``kind`` of work costs in ``row``, the slower side's; else empty."""
    if row.benchmark not in BENCHMARKS:  # of another version
        return ""
    here = (str(row.framework), str(row.benchmark), row.use_case or 0, str(row.precision), str(row.device_kind))
    switches = dict(text.split("=") for text in (row.switches or "").split())
    usual = modes.settings(modes.DEFAULT, *here)
    turned = {name: value for name, value in switches.items() if value != usual.get(name)}
    for switch, value in REMEDIES.get((str(row.framework), kind), ()):
        if switches.get(switch) == value:
            continue
        mode = f"{row.mode}+{switch}" if value == ON else f"{row.mode}+{switch}={value}"
        try:
            # As it is written, and with what the row's mode, such as tuned, stood for.
            for each in (mode, modes.spelled(modes.DEFAULT, turned | {switch: value})):
                modes.settings(modes.check(each), *here)
        except ValueError:  # refused
            continue
        return mode
    return ""
