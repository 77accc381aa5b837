"""How a training to accuracy goes: recipes as data, each with its source, and the rate of each step.

A recipe belongs to a benchmark and a data set. Where nobody published one that fits, the benchmark's own optimizer is
used with a cosine, and the recipe says so.
"""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from duel.catalogue import BENCHMARKS, SGD, AdamW, Benchmark, Citations, Images, Molecules, Tokens

if TYPE_CHECKING:  # numpy is loaded only where samples are read
    from duel.data.samples import Dataset

_IMAGENET = ("resnet50", "vit_b16", "mobilenet_v3_small", "efficientnet_b0")
_CIFAR = ("cifar10", "cifar10_resnet18")
# The data sets (``duel.data.known``), and which benchmarks can train on each.
DATASETS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "mnist": ("mnist", *_CIFAR),
        "fashion_mnist": ("mnist", *_CIFAR),
        "digits": ("mnist",),
        "cifar10": _CIFAR,
        "cifar100": _CIFAR,
        "imagenet100": _IMAGENET,
        "imagenet1k": _IMAGENET,
        "text": ("gpt2",),
        "text_bpe": ("gpt2",),
        "cora": ("gcn",),
        "ogbg-molpcba": ("graphnet",),
        "ogbg-molhiv": ("graphnet",),
    }
)
NONE, FLIP, CROP, RESIZED = "none", "flip", "crop_flip", "resized_crop_flip"
AUGMENTATIONS: Mapping[str, str] = MappingProxyType(
    {
        NONE: "the pictures as they are; larger ones are cut in the middle",
        FLIP: "half of them mirrored",
        CROP: "cut out after padding by 4 pixels, half of them mirrored (He et al. 2015, section 4.2)",
        RESIZED: "a random part of 8 to 100 % of the area, resized, half of them mirrored (Szegedy et al. 2014)",
    }
)


@dataclass(frozen=True)
class Recipe:
    """How to train.

    ``optimizer`` has the rate for its own batch size, and is scaled to ``batch_size``, which is over all devices. The
    rate rises from 0 over ``warmup_epochs`` and falls to 0 along half a cosine. ``smoothing`` of the labels takes that
    share of each from its class and gives it to all. With ``average``, what is evaluated is the exponential moving
    average of all weights and running statistics with this decay. ``aim`` is the published top-1 accuracy.
    """

    optimizer: SGD | AdamW
    batch_size: int
    epochs: int
    augmentation: str = NONE
    warmup_epochs: float = 0.0
    smoothing: float = 0.0
    average: float = 0.0
    aim: float | None = None
    source: str = ""

    def rate(self, step: int, steps: int, per_epoch: int) -> float:
        """Return the rate of ``step``, counted from 0, of ``steps`` in all."""
        peak = self.optimizer.at(self.batch_size).learning_rate
        warm = min(self.warmup_epochs * per_epoch, steps - 1)
        if step < warm:
            return peak * (step + 1) / (warm + 1)
        return peak * 0.5 * (1 + math.cos(math.pi * (step - warm) / max(1.0, steps - warm)))

    def said(self) -> str:
        """Return the recipe in one line, the same for rows that train alike."""
        optimizer = self.optimizer.at(self.batch_size)
        values: dict[str, Any] = {"epochs": self.epochs, "batch_size": self.batch_size}
        values |= {type(optimizer).__name__.lower(): f"{optimizer.learning_rate:.6g}"}
        values |= {"decay": f"{optimizer.weight_decay:g}", "augmentation": self.augmentation}
        values |= {name: f"{value:g}" for name in _SHARES if (value := getattr(self, name))}
        return ", ".join(f"{name} {value}" for name, value in values.items())


_SHARES = ("warmup_epochs", "smoothing", "average")
_OWN = "no published recipe: the benchmark's optimizer with a cosine"

_RESNET50 = Recipe(
    SGD(learning_rate=0.1, batch_size=256),
    batch_size=256,
    epochs=90,
    augmentation=RESIZED,
    warmup_epochs=5,
    aim=0.764,
    source="Goyal et al. 2017, arXiv:1706.02677, table 1 (23.60 %, from memory), with half a cosine "
    "(He et al. 2018, arXiv:1812.01187) in place of its steps",
)
_VIT = Recipe(
    AdamW(learning_rate=0.003, weight_decay=0.3, batch_size=4096),
    batch_size=4096,
    epochs=300,
    augmentation=RESIZED,
    warmup_epochs=30,
    smoothing=0.11,
    source="torchvision's references/classification, without mixup, CutMix, RandAugment, clipping and averaging: its "
    "published accuracy is no aim",
)
_RESNET18 = Recipe(
    SGD(learning_rate=0.1, weight_decay=5e-4, batch_size=128),
    batch_size=128,
    epochs=200,
    augmentation=CROP,
    aim=0.930,
    source="github.com/kuangliu/pytorch-cifar (0.1, 93.02 % after 350 epochs); decay and cosine are ours",
)


def _of_pictures(benchmark: str, augmentation: str, epochs: int, **more: float) -> Recipe:
    """Return a recipe of our own for pictures: the benchmark's optimizer with a cosine, and augmentation."""
    optimizer = BENCHMARKS[benchmark].optimizer
    source = "no published recipe: the benchmark's optimizer with a cosine, and augmentation"
    return Recipe(optimizer, optimizer.batch_size or 1, epochs, augmentation, source=source, **more)


def _without_aim(recipe: Recipe, like: str) -> Recipe:
    return dataclasses.replace(recipe, aim=None, source=f"as on {like}: {recipe.source}")


RECIPES: Mapping[tuple[str, str], Recipe] = MappingProxyType(
    {
        ("resnet50", "imagenet1k"): _RESNET50,
        ("resnet50", "imagenet100"): _without_aim(_RESNET50, "ImageNet-1k"),
        **{("vit_b16", name): _VIT for name in ("imagenet1k", "imagenet100")},
        **{
            (benchmark, name): _of_pictures(benchmark, RESIZED, 90, warmup_epochs=5, smoothing=0.1)
            for benchmark in ("mobilenet_v3_small", "efficientnet_b0")
            for name in ("imagenet1k", "imagenet100")
        },
        ("cifar10_resnet18", "cifar10"): _RESNET18,
        ("cifar10_resnet18", "cifar100"): _without_aim(_RESNET18, "CIFAR-10"),
        **{("cifar10", name): _of_pictures("cifar10", CROP, 50) for name in ("cifar10", "cifar100")},
        ("mnist", "fashion_mnist"): Recipe(
            AdamW(learning_rate=0.01, weight_decay=0.1, batch_size=128),
            batch_size=128,
            epochs=30,
            augmentation=FLIP,
            average=0.999,
            source="our own, for a network of 26,000 parameters",
        ),
        ("cifar10", "fashion_mnist"): Recipe(
            AdamW(learning_rate=0.001, weight_decay=0.05, batch_size=64),
            batch_size=64,
            epochs=4,
            augmentation=FLIP,
            source="our own, chosen on the last 10,000 training pictures",
        ),
        ("gcn", "cora"): Recipe(
            AdamW(learning_rate=0.01, weight_decay=0.05),
            batch_size=1,
            epochs=200,
            aim=0.815,
            source="Kipf and Welling 2016, arXiv:1609.02907 (81.5 % on another split, with dropout); the decay is ours",
        ),
    }
)


def recipe(benchmark: str, dataset: str, epochs: int | None, batch_size: int | None) -> Recipe:
    """Return the recipe of ``benchmark`` on ``dataset``, with other ``epochs`` or another batch size if given.

    The warm-up keeps its share of the epochs, and the average what is left of the initial weights in it.
    """
    found = RECIPES.get((benchmark, dataset))
    if found is None:
        optimizer = BENCHMARKS[benchmark].optimizer
        found = Recipe(optimizer, optimizer.batch_size or 1, 10, source=_OWN)
    epochs, batch_size = epochs or found.epochs, batch_size or found.batch_size
    longer = epochs / found.epochs
    more_steps = longer * found.batch_size / batch_size
    return dataclasses.replace(
        found,
        epochs=epochs,
        batch_size=batch_size,
        warmup_epochs=found.warmup_epochs * longer,
        average=found.average ** (1 / more_steps),
    )


def fitted(benchmark: Benchmark, size: str, dataset: "Dataset") -> Benchmark:
    """Return ``benchmark`` with inputs and classes as ``dataset`` has them.

    Raises ValueError if they do not fit.
    """
    whole = benchmark.sizes[size]
    inputs, model = whole.inputs, dict(whole.model)
    arrays: tuple[Any, ...] = getattr(dataset.train, "inputs", ())  # pictures have none
    match inputs:
        case Images() if dataset.channels == inputs.channels:
            inputs = dataclasses.replace(inputs, classes=dataset.classes)
            model["classes"] = dataset.classes
        case Tokens(classes=None) if len(arrays) == 1:
            inputs = dataclasses.replace(inputs, vocabulary=dataset.classes)
            model["vocabulary"] = dataset.classes
        case Citations() if len(arrays) == 4:
            _, nodes, features = arrays[0].shape
            edges = arrays[1].shape[1] - nodes
            labelled = int((dataset.train.labels >= 0).sum())
            inputs = Citations(nodes, edges, features, dataset.classes, labelled)
            model |= {"features": features, "classes": dataset.classes}
        case Molecules() if len(arrays) == 6:
            tasks = dataset.train.labels.shape[1]
            inputs = Molecules(
                *(arrays[0].shape[1], arrays[1].shape[1], arrays[0].shape[2], arrays[1].shape[2], tasks),
            )
            model |= {"node_features": inputs.node_features, "edge_features": inputs.edge_features, "tasks": tasks}
        case _:
            raise ValueError(f"{benchmark.name} cannot train on {dataset.name}: {dataset.source}")
    changed = dataclasses.replace(whole, inputs=inputs, model=model)
    return dataclasses.replace(benchmark, sizes={**benchmark.sizes, size: changed})
