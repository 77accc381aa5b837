"""What can be measured: benchmarks, use cases, presets, precisions. Each such fact stands here and nowhere else.

A benchmark is one entry of ``BENCHMARKS`` and one file ``models/<name>.py`` in each of ``jax/`` and ``pytorch/``.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

# Name of the framework, which is also its folder, and the package that must be installed for it. Ask the package's
# metadata, never "import jax": with the repository on the path that finds the folder.
FRAMEWORKS: Mapping[str, str] = MappingProxyType({"jax": "jax", "pytorch": "torch"})
DEVICE_KINDS = ("cpu", "gpu", "tpu", "mps")
# (framework, device kind): the package that the framework reaches such a device through, where it is one of its own.
REACHED_THROUGH: Mapping[tuple[str, str], str] = MappingProxyType({("pytorch", "tpu"): "torch_xla"})


@dataclass(frozen=True)
class Precision:
    """How numbers are held and multiplied. Parameters are float32 in every measured policy.

    ``device_kinds`` are the kinds that have the policy at all.
    """

    name: str
    meaning: str
    device_kinds: tuple[str, ...] = DEVICE_KINDS


PRECISIONS: Mapping[str, Precision] = MappingProxyType(
    {
        p.name: p
        for p in (
            Precision("fp32", "float32 storage, float32 products (strict: TF32 is switched off)"),
            Precision("tf32", "float32 storage, TF32 products in matmul and convolution", ("gpu",)),
            Precision("bf16", "float32 parameters, bfloat16 compute; softmax and loss in float32"),
        )
    }
)


@dataclass(frozen=True)
class Size:
    """One size of a benchmark.

    ``model`` holds the keyword arguments of ``build`` in both ``models/<name>.py``.
    ``batch_size`` maps a device kind to the samples per device and step.
    ``image`` is the (channels, height, width) of one input.
    """

    model: Mapping[str, int | tuple[int, ...]]
    image: tuple[int, int, int]
    classes: int
    batch_size: Mapping[str, int]


@dataclass(frozen=True)
class Optimizer:
    """SGD as ``torch.optim.SGD`` defines it: L2 decay is added to the gradient before the momentum."""

    learning_rate: float
    momentum: float
    weight_decay: float


@dataclass(frozen=True)
class Benchmark:
    """One network, its data and its training recipe.

    ``dataset`` names a loader of ``duel.datasets`` or is ``"synthetic"`` (N(0,1) images, uniform labels).
    ``curve_steps`` training steps open every run, are the same on both sides, and give the loss curve (and the
    held-out accuracy where the data is real) before anything is timed.
    """

    name: str
    title: str
    source: str
    dataset: str
    sizes: Mapping[str, Size]
    optimizer: Optimizer
    curve_steps: int
    unit: str = "images/s"


@dataclass(frozen=True)
class UseCase:
    number: int
    name: str
    meaning: str


@dataclass(frozen=True)
class Preset:
    """How long and how often one cell is measured.

    Warm-up lasts at least ``warmup_steps`` steps and ``warmup_seconds``. The timed part is cut into blocks of k steps
    with one synchronisation each, every block at least ``block_seconds`` long; it ends after ``iterations`` steps and
    either ``blocks`` blocks or ``max_seconds``. ``repeats`` fresh processes measure each cell.
    """

    name: str
    meaning: str
    size: str
    warmup_steps: int
    warmup_seconds: float
    iterations: int
    blocks: int
    block_seconds: float
    max_seconds: float
    repeats: int


BENCHMARKS: Mapping[str, Benchmark] = MappingProxyType(
    {
        b.name: b
        for b in (
            Benchmark(
                name="resnet50",
                title="ResNet-50 (v1.5), ImageNet shapes",
                source="He et al. 2015, arXiv:1512.03385; stride in the 3x3 convolution as in torchvision",
                dataset="synthetic",
                sizes={
                    "full": Size(
                        model={"layers": (3, 4, 6, 3), "classes": 1000},
                        image=(3, 224, 224),
                        classes=1000,
                        batch_size={"cpu": 2, "gpu": 128, "tpu": 128, "mps": 32},
                    ),
                    "tiny": Size(
                        model={"layers": (1, 1, 1, 1), "classes": 10},
                        image=(3, 64, 64),
                        classes=10,
                        batch_size={"cpu": 8, "gpu": 8, "tpu": 8, "mps": 8},
                    ),
                },
                optimizer=Optimizer(learning_rate=0.0001, momentum=0.9, weight_decay=1e-4),
                curve_steps=10,
            ),
            Benchmark(
                name="mnist",
                title="The small CNN of the per-sample-gradient literature, handwritten digits",
                source="Subramani et al. 2021, arXiv:2010.09063 (layer sizes); LeCun et al. 1998 (data)",
                dataset="mnist",
                sizes={
                    "full": Size(
                        model={"channels": (16, 32), "hidden": 32, "classes": 10},
                        image=(1, 28, 28),
                        classes=10,
                        batch_size={"cpu": 64, "gpu": 256, "tpu": 256, "mps": 256},
                    ),
                    "tiny": Size(
                        model={"channels": (4, 8), "hidden": 16, "classes": 10},
                        image=(1, 28, 28),
                        classes=10,
                        batch_size={"cpu": 16, "gpu": 16, "tpu": 16, "mps": 16},
                    ),
                },
                optimizer=Optimizer(learning_rate=0.01, momentum=0.9, weight_decay=1e-4),
                curve_steps=400,
            ),
        )
    }
)

USE_CASES: Mapping[int, UseCase] = MappingProxyType({1: UseCase(1, "train_single", "training on one device")})

PRESETS: Mapping[str, Preset] = MappingProxyType(
    {
        p.name: p
        for p in (
            Preset("smoke", "does it run: tiny model, a few steps, no claim", "tiny", 2, 0.0, 5, 5, 0.0, 10.0, 1),
            Preset("standard", "one process per framework at full size", "full", 10, 5.0, 50, 30, 0.2, 60.0, 1),
            Preset("publication", "ten processes per framework at full size", "full", 10, 5.0, 50, 30, 0.2, 60.0, 10),
        )
    }
)
