"""What one script runs: its names, run.py's options and the planned rows. The driver renders it, the job obeys it."""

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from duel.catalogue import BENCHMARKS, FRAMEWORKS, INFERENCE, PER_SAMPLE, PRESETS, PRODUCTS, TRAIN, VALIDATE
from duel.record import COLUMNS, NOT_HERE, Row
from duel.results import RUN_ID, stamp

SEED = 0
MODE = "default"
ROOT = Path(__file__).resolve().parent.parent
RENDERED, EDITED = "rendered", "edited by hand"
CURVE = ("loss_first", "loss_last", "loss_steps", "accuracy")
LATENCY = tuple(column for column in COLUMNS if column.startswith("latency_"))
_SEAL = "# sha256 of the other lines: "


@dataclass(frozen=True)
class Job:
    """One framework's script. ``device`` is None where the job is to find the best one itself."""

    framework: str
    benchmark: str
    use_case: int
    preset: str
    precision: str
    device: str | None
    target: str
    nodes: int = 1
    devices_per_node: int = 1
    changes: tuple[str, ...] = ()  # directives of this attempt alone, such as a longer --time
    attempt: int = 1
    weights: str | None = None  # a safetensors file, as run.py will find it; None: made from the seed
    batch_sizes: tuple[int, ...] = ()  # of inference; empty: the preset's
    products: tuple[str, ...] = ()  # of per-sample gradients; empty: all
    microbatch: int | None = None  # of per-sample gradients; None: what the job finds to fit

    def __post_init__(self) -> None:
        assert self.framework in FRAMEWORKS

    @property
    def stem(self) -> str:
        """The script's name without '.sh': the plain one for the defaults, with a suffix for each variant."""
        variants = [self.precision] if self.precision != "fp32" else []
        variants += [self.preset] if self.preset != "standard" else []
        variants += [self.device] if self.device else []
        if self.weights:  # what main.py converts is called <benchmark>-<hash>
            name = Path(self.weights).stem.removeprefix(f"{self.benchmark}-")
            variants.append(re.sub("[^A-Za-z0-9_]+", "_", name)[:20])
        if self.batch_sizes:
            variants.append("batch_" + "_".join(map(str, self.batch_sizes)))
        variants += self.products
        variants += [f"microbatch_{self.microbatch}"] if self.microbatch else []
        return "_".join([self.framework, self.benchmark, str(self.use_case), *variants])

    def run_id(self, pair_stamp: str | None = None) -> str:
        """A new run's id; both sides of a pair get one ``pair_stamp``: their ids differ in the framework only."""
        run_id = f"{self.stem}-{pair_stamp or stamp()}"
        assert RUN_ID.fullmatch(run_id), run_id
        return run_id

    @property
    def options(self) -> list[str]:
        """What run.py is called with."""
        options = ["--benchmark", self.benchmark, "--use_case", str(self.use_case), "--preset", self.preset]
        options += ["--precision", self.precision, "--target", self.target]
        options += ["--device", self.device] if self.device else []
        options += ["--batch_sizes", ",".join(map(str, self.batch_sizes))] if self.batch_sizes else []
        options += ["--products", ",".join(self.products)] if self.products else []
        options += ["--microbatch", str(self.microbatch)] if self.microbatch else []
        return [*options, f"--weights={self.weights}"] if self.weights else options

    def rows(self) -> list[Row]:
        """The planned rows: one for each repeat, and each batch size of inference or product of per-sample gradients.

        What only the job can know is left open.
        """
        preset = PRESETS[self.preset]
        repeats = 1 if self.use_case == VALIDATE else preset.repeats
        benchmark = BENCHMARKS[self.benchmark]
        missing = {"accuracy": "synthetic data"} if benchmark.dataset == "synthetic" else {}
        if self.use_case != TRAIN:
            missing |= dict.fromkeys(CURVE, NOT_HERE)
        if self.use_case != INFERENCE:
            missing |= dict.fromkeys(LATENCY, NOT_HERE)
        if self.use_case != PER_SAMPLE:
            missing |= dict.fromkeys(("product", "microbatch"), NOT_HERE)
        row = Row(
            framework=self.framework,
            benchmark=self.benchmark,
            use_case=self.use_case,
            target=self.target,
            preset=self.preset,
            precision=self.precision,
            mode=MODE,
            size=preset.size,
            seed=SEED,
            weights=self.weights or f"seed {SEED}",
            attempt=self.attempt,
            microbatch=self.microbatch,
            throughput_unit=benchmark.unit,
            missing=missing,
        )
        points: list[dict[str, Any]] = [{}]
        if self.use_case == INFERENCE:
            points = [{"batch_size": samples} for samples in self.batch_sizes or preset.batch_sizes]
        elif self.use_case == PER_SAMPLE:
            points = [{"product": product} for product in self.products or PRODUCTS]
        return [row.replace(repeat=repeat, **point) for repeat in range(repeats) for point in points]


def seal(text: str) -> str:
    """A script's ``text`` with a comment behind its first line that gives away later changes."""
    first, rest = text.split("\n", 1)
    return f"{first}\n{_SEAL}{hashlib.sha256(text.encode()).hexdigest()}\n{rest}"


def script_state(text: str) -> str:
    """``RENDERED`` if the script is as ``seal`` left it, else ``EDITED``."""
    first, *rest = text.split("\n", 2)
    sealed = len(rest) == 2 and seal(f"{first}\n{rest[1]}") == text
    return RENDERED if sealed else EDITED
