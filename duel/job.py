"""What one script runs: its names, run.py's options and the planned rows. The driver renders it, the job obeys it."""

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path

from duel.catalogue import BENCHMARKS, FRAMEWORKS, INFERENCE, PRESETS, VALIDATE
from duel.record import COLUMNS, Row
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
        return [*options, f"--weights={self.weights}"] if self.weights else options

    def rows(self) -> list[Row]:
        """The planned rows: one for each repeat, and in inference for each batch size.

        What only the job can know is left open.
        """
        preset = PRESETS[self.preset]
        repeats = 1 if self.use_case == VALIDATE else preset.repeats
        benchmark = BENCHMARKS[self.benchmark]
        missing = {"accuracy": "synthetic data"} if benchmark.dataset == "synthetic" else {}
        missing |= dict.fromkeys(CURVE, "inference has no loss") if self.use_case == INFERENCE else {}
        missing |= {} if self.use_case == INFERENCE else dict.fromkeys(LATENCY, "measured in inference alone")
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
            throughput_unit=benchmark.unit,
            missing=missing,
        )
        sizes = (self.batch_sizes or preset.batch_sizes) if self.use_case == INFERENCE else (None,)
        return [row.replace(repeat=repeat, batch_size=samples) for repeat in range(repeats) for samples in sizes]


def seal(text: str) -> str:
    """A script's ``text`` with a comment behind its first line that gives away later changes."""
    first, rest = text.split("\n", 1)
    return f"{first}\n{_SEAL}{hashlib.sha256(text.encode()).hexdigest()}\n{rest}"


def script_state(text: str) -> str:
    """``RENDERED`` if the script is as ``seal`` left it, else ``EDITED``."""
    first, *rest = text.split("\n", 2)
    sealed = len(rest) == 2 and seal(f"{first}\n{rest[1]}") == text
    return RENDERED if sealed else EDITED
