"""What one script runs: its names, run.py's options and planned rows. The driver renders it, the job executes it."""

import dataclasses
import hashlib
import re
import shlex
from collections.abc import Container
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec

from duel import modes, recipes
from duel.catalogue import (
    BENCHMARKS,
    FIT,
    FRAMEWORKS,
    INFERENCE,
    MANY,
    PAIRED,
    PRECISIONS,
    PRESETS,
    PRODUCTS,
    STRONG,
    USE_CASES,
    VALIDATE,
    WEAK,
)
from duel.files import RUN_ID, digest, stamp
from duel.modes import DEFAULT
from duel.record import COLUMNS, NOT_HERE, Row

SEED = 0
MOST_LETTERS = 60
RENDERED, EDITED = "rendered", "edited by hand"
CURVE = ("learning_rate", "loss_first", "loss_last", "loss_steps", "accuracy")
LATENCY = tuple(column for column in COLUMNS if column.startswith("latency_"))
PASSES = ("forward_seconds", "gradient_seconds")
TRAINING = ("dataset", "epochs", "target_accuracy", "seeds", "max_hours")  # options of a training to accuracy
# What only timed blocks give.
MEASURED = (
    *("steady", "warmup_steps", "iterations", "blocks", "left_out_blocks", "left_out", "outliers", "steps_per_block"),
    *(column for column in COLUMNS if column.startswith("step_seconds_")),
    *("throughput", "scaling_efficiency", "collective_seconds", "warm_start_seconds", "idle_watts", "clock_mhz"),
    *("clock_mhz_lowest", "temperature_celsius", "foreign_load", "ecc_errors", "joules_per_item", "mean_watts"),
    *("energy_source", "step_flops", "matmul_flops_per_second", "copy_bytes_per_second", "mfu", "bound"),
    *("arithmetic_intensity", "device_process_bytes", "host_peak_bytes", "mig", "accuracy"),
)
SCALED = ("scaling_efficiency", "collective_seconds")
# What launch.json may hold: words become options of run.py and parts of names, directives become lines of a script.
Word = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.=+-]*\Z")]
Directive = Annotated[str, msgspec.Meta(pattern=r"^--?[A-Za-z][^\x00-\x1f\x7f-\x9f]*\Z")]
Count = Annotated[int, msgspec.Meta(ge=1)]
_SEAL = "# sha256 of the other lines: "


@dataclass(frozen=True)
class Job:
    """One framework's script, or that of both in turn. ``device`` is None if the job is to find the best itself."""

    framework: str
    benchmark: Word
    use_case: int
    preset: Word
    precision: Word
    device: Word | None
    target: Word
    nodes: Count = 1
    devices_per_node: Count = 1
    changes: tuple[Directive, ...] = ()  # directives of this attempt only, such as a longer --time
    attempt: Count = 1
    weights: str | None = None  # a safetensors file, as run.py will find it; None: made from the seed
    batch_sizes: tuple[Count, ...] = ()  # empty: the preset's for inference, else what fits the device
    products: tuple[Word, ...] = ()  # of per-sample gradients; empty: all
    microbatch: Count | None = None  # of per-sample gradients; None: the job finds one that fits
    scaling: Word = WEAK  # of many devices
    mode: Word = DEFAULT
    size: Word | None = None  # of the benchmark; None: the preset's
    pairs: Count | None = None  # of each point in a paired job; None: the preset's
    trials: Count | None = None  # of a search for the fastest switches, on each side; None: not a search
    profile: bool = False  # whether each row's program is traced, too
    session: Count = 1  # its number among the sessions that one command planned
    delay: Annotated[int, msgspec.Meta(ge=0)] = 0  # seconds from its submission until it may begin
    dataset: Word | None = None  # that it trains on to accuracy; None: it measures
    epochs: Count | None = None  # of that training; None: the recipe's
    target_accuracy: Annotated[float, msgspec.Meta(gt=0, lt=1)] | None = None  # at which it ends
    seeds: Count | None = None  # with each of which it trains once; None: one
    max_hours: Annotated[float, msgspec.Meta(gt=0)] | None = None  # no job follows a time limit after; None: none does

    def __post_init__(self) -> None:
        assert self.framework in (*FRAMEWORKS, PAIRED)
        for name in ("changes", "batch_sizes", "products"):  # lists in JSON
            object.__setattr__(self, name, tuple(getattr(self, name)))

    @property
    def unknown(self) -> str:
        """The names and values that this version of Duel does not know; empty if the job can be started."""
        known: dict[str, Container[Any]] = {"benchmark": BENCHMARKS, "use_case": USE_CASES}
        known |= {"preset": PRESETS, "precision": PRECISIONS}
        return ", ".join(f"{name} {value}" for name in known if (value := getattr(self, name)) not in known[name])

    @property
    def frameworks(self) -> tuple[str, ...]:
        """The frameworks that it measures."""
        return tuple(FRAMEWORKS) if self.framework == PAIRED else (self.framework,)

    @property
    def ranks(self) -> int:
        """The number of processes, one for each device."""
        return self.nodes * self.devices_per_node

    @property
    def small_proof(self) -> bool:
        """Whether others of its kind may run at the same time: nothing in it is timed, and it needs little memory."""
        return self.use_case == VALIDATE and PRESETS[self.preset].size == "tiny"

    @property
    def stem(self) -> str:
        """The script's name without '.sh': plain for the defaults, with a suffix for each variant."""
        variants = [self.precision] if self.precision != "fp32" else []
        variants += [self.preset] if self.preset != "standard" else []
        variants += [self.size] if self.size not in (None, PRESETS[self.preset].size) else []
        if self.mode != DEFAULT:
            variants.append(self.mode.replace("+", "_with_").replace("-", "_without_").replace("=", "_"))
        variants += [self.device] if self.device else []
        if self.weights:  # files that main.py converted are called <benchmark>-<hash>
            name = Path(self.weights).stem.removeprefix(f"{self.benchmark}-")
            variants.append(re.sub("[^A-Za-z0-9_]+", "_", name)[:20])
        if self.batch_sizes:
            variants.append("batch_" + "_".join(map(str, self.batch_sizes)))
        variants += self.products
        variants += [f"microbatch_{self.microbatch}"] if self.microbatch else []
        variants += [f"pairs_{self.pairs}"] if self.pairs else []
        variants += [f"trials_{self.trials}"] if self.trials else []
        variants += ["profile"] if self.profile else []
        variants += [f"session_{self.session}"] if self.session > 1 else []
        if self.dataset:
            variants += [self.dataset.replace("-", "_"), f"epochs_{self.recipe.epochs}"]
            variants += [f"to_{self.target_accuracy:g}".replace(".", "_")] if self.target_accuracy else []
            variants += [f"seeds_{self.seeds}"] if self.seeds else []
        if self.use_case in MANY:
            variants += [f"{self.nodes}x{self.devices_per_node}", *([self.scaling] if self.scaling != WEAK else [])]
        name = "_".join([self.benchmark, str(self.use_case), *variants])
        if len(name) > MOST_LETTERS:  # it is part of run ids, and file and job names are limited
            name = f"{name[: MOST_LETTERS - 9]}_{digest({'name': name})[:8]}"
        return f"{self.framework}_{name}"

    def run_id(self, pair_stamp: str | None = None) -> str:
        """Return a new run's id; both sides of a pair get one ``pair_stamp``, so their ids differ in framework only."""
        run_id = f"{self.stem}-{pair_stamp or stamp()}"
        assert RUN_ID.fullmatch(run_id), run_id
        return run_id

    @property
    def recipe(self) -> recipes.Recipe:
        """The recipe of a training to accuracy."""
        assert self.dataset
        return recipes.recipe(self.benchmark, self.dataset, self.epochs, next(iter(self.batch_sizes), None))

    @property
    def options(self) -> list[str]:
        """The arguments that run.py is called with."""
        options = ["--benchmark", self.benchmark, "--use_case", str(self.use_case), "--preset", self.preset]
        options += ["--precision", self.precision, "--target", self.target]
        options += ["--device", self.device] if self.device else []
        options += ["--batch_sizes", ",".join(map(str, self.batch_sizes))] if self.batch_sizes else []
        options += ["--products", ",".join(self.products)] if self.products else []
        options += ["--size", self.size] if self.size else []
        options += ["--mode", self.mode] if self.mode != DEFAULT else []
        options += ["--microbatch", str(self.microbatch)] if self.microbatch else []
        options += ["--pairs", str(self.pairs)] if self.pairs else []
        options += ["--trials", str(self.trials)] if self.trials else []
        options += ["--profile"] if self.profile else []
        for name in TRAINING:
            options += [f"--{name}", str(value)] if (value := getattr(self, name)) is not None else []
        if self.use_case in MANY:
            options += ["--nodes", str(self.nodes), "--devices", str(self.devices_per_node), "--scaling", self.scaling]
        return [*options, f"--weights={self.weights}"] if self.weights else options

    @property
    def identity(self) -> "Job":
        """What it measures: the job as at its first attempt, without what that one or its time needed."""
        preset = PRESETS.get(self.preset)  # unknown in a record of another version
        size = self.size or (preset.size if preset else None)
        return dataclasses.replace(self, attempt=1, changes=(), delay=0, size=size)

    @property
    def command(self) -> str:
        """The command that starts it over."""
        if self.use_case == VALIDATE:
            words = ["validate", "--benchmark", self.benchmark, "--target", self.target]
            return shlex.join(["python", "main.py", *words, *(["--size", self.size] if self.size else [])])
        name = "fit" if self.preset == FIT else "tune" if self.trials else ""
        options = dataclasses.replace(self, pairs=None).options
        if name:  # which choose the preset themselves
            place = options.index("--preset")
            del options[place : place + 2]
        side = [] if name else ["--paired"] if self.framework == PAIRED else ["--framework", self.framework]
        return shlex.join(["python", "main.py", *([name] if name else []), *options, *side])

    @property
    def points(self) -> list["Job"]:
        """The points that it measures, each as a job of nothing else."""
        return [
            dataclasses.replace(
                self, batch_sizes=() if size is None else (size,), products=(product,) if product else ()
            )
            for size, product in self._points()
        ]

    def _points(self) -> list[tuple[int | None, str | None]]:
        """Return the batch size and product of each point, as far as the plan knows them."""
        sizes = self.batch_sizes or (PRESETS[self.preset].batch_sizes if self.use_case == INFERENCE else (None,))
        per_sample = USE_CASES[self.use_case].module == "per_sample_gradients"
        products = self.products or tuple(PRODUCTS) if per_sample else (None,)
        return [(size, product) for size in sizes for product in products]

    def rows(self) -> list[Row]:
        """Return the planned rows: one for each repeat, batch size, product of per-sample gradients and device count.

        On many devices, each is measured on one of them first, as the baseline of its scaling. A paired job's repeats
        are pairs in the order A B B A, across all sessions, so that drift of the machine affects both sides alike. What
        only the job can know is left open. For a search, these are the first rows; no two of its rows are a pair.
        """
        preset = PRESETS[self.preset]
        paired = self.framework == PAIRED
        repeats = 1 if self.use_case == VALIDATE else (self.pairs or preset.pairs) if paired else preset.repeats
        if self.dataset:
            return self._trainings()
        many, row = self.use_case in MANY, self._row()
        alone: dict[str, Any] = {"missing": dict.fromkeys(SCALED, "on one device")} if many else {}
        counts = [alone, {"nodes": self.nodes, "device_count": self.ranks}] if many else [{}]
        rows = [
            row.replace(
                framework=framework,
                repeat=repeat,
                repeats=repeats,
                point=point * len(counts) + place,
                batch_size=size,
                product=product,
                device_count=1,
            ).replace(**count)
            for repeat in range(repeats)
            for point, (size, product) in enumerate(self._points())
            for framework in (self.frameworks[::-1] if (repeat + self.session - 1) % 2 else self.frameworks)
            for place, count in enumerate(counts)
        ]
        return [row.replace(point=number) for number, row in enumerate(rows)] if self.trials else rows

    def _trainings(self) -> list[Row]:
        """Return one row for each seed and framework, in the order A B B A. The batch size is over all devices."""
        row = self._row().replace(
            dataset=self.dataset,
            recipe=self.recipe.said(),
            epochs=self.recipe.epochs,
            target_accuracy=self.target_accuracy,
            batch_size=self.recipe.batch_size,
            nodes=self.nodes,
            device_count=self.ranks,
            scaling=STRONG if self.use_case in MANY else None,
            repeats=self.seeds or 1,
            point=0,
        )
        return [
            row.replace(framework=framework, repeat=seed, seed=seed, weights=self.weights or f"seed {seed}")
            for seed in range(self.seeds or 1)
            for framework in (self.frameworks[::-1] if seed % 2 else self.frameworks)
        ]

    def _row(self) -> Row:
        """Return what all its rows have in common."""
        return Row(
            benchmark=self.benchmark,
            use_case=self.use_case,
            target=self.target,
            preset=self.preset,
            precision=self.precision,
            mode=self.mode,
            rung=0,
            size=self.size or PRESETS[self.preset].size,
            seed=SEED,
            weights=self.weights or f"seed {SEED}",
            attempt=self.attempt,
            microbatch=self.microbatch,
            nodes=1,
            scaling=self.scaling if self.use_case in MANY else None,
            throughput_unit=BENCHMARKS[self.benchmark].unit,
            missing=self._missing(),
        )

    def _missing(self) -> dict[str, str]:
        """Return why columns of its rows stay empty, as far as the plan knows."""
        missing = {"accuracy": "synthetic data"} if BENCHMARKS[self.benchmark].dataset == "synthetic" else {}
        if self.dataset:
            missing |= dict.fromkeys((*MEASURED, *PASSES), "a training to accuracy")
            missing |= {} if self.target_accuracy else {"target_accuracy": "none was given"}
        module = USE_CASES[self.use_case].module
        if module != "training":
            missing |= dict.fromkeys((*CURVE, *PASSES), NOT_HERE)
        if module != "inference":
            missing |= dict.fromkeys(LATENCY, NOT_HERE)
        if module != "per_sample_gradients":
            missing |= dict.fromkeys(("product", "microbatch"), NOT_HERE)
        if not modes.is_tuned(self.mode):
            missing |= {"tuning": f"mode {self.mode}"}
        if self.use_case not in MANY:
            missing |= dict.fromkeys(("scaling", *SCALED), NOT_HERE)
        return missing


def seal(text: str) -> str:
    """Return a script's ``text`` with a comment after its first line that reveals later changes."""
    first, rest = text.split("\n", 1)
    return f"{first}\n{_SEAL}{hashlib.sha256(text.encode()).hexdigest()}\n{rest}"


def script_state(text: str) -> str:
    """Return ``RENDERED`` if the script is as ``seal`` left it, else ``EDITED``."""
    first, *rest = text.split("\n", 2)
    sealed = len(rest) == 2 and seal(f"{first}\n{rest[1]}") == text
    return RENDERED if sealed else EDITED
