"""What can be measured: benchmarks, use cases, presets, precisions. Each of these facts is defined once.

The benchmarks are in ``duel.benchmarks`` and the parts of an entry in ``duel.entry``, because they are long; import
both from here.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from duel.benchmarks import BENCHMARKS as BENCHMARKS
from duel.entry import SGD as SGD
from duel.entry import AdamW as AdamW
from duel.entry import Benchmark as Benchmark
from duel.entry import Citations as Citations
from duel.entry import Images as Images
from duel.entry import Molecules as Molecules
from duel.entry import Tokens as Tokens

# The framework's name, which is also its folder, and the package that must be installed for it. Check for the package
# by its metadata, never by "import jax": with the repository on the path, that finds the folder.
FRAMEWORKS: Mapping[str, str] = MappingProxyType({"jax": "jax", "pytorch": "torch"})
PAIRED = "paired"  # in place of a framework: one script that measures both in turn
DEVICE_KINDS = ("cpu", "gpu", "tpu", "mps")
# (framework, device kind): separate packages through which the framework reaches such a device; one of them is enough.
# PyTorch has none for a GPU, which takes a separate build.
REACHED_THROUGH: Mapping[tuple[str, str], tuple[str, ...]] = MappingProxyType(
    {
        ("jax", "gpu"): ("jax-cuda13-plugin", "jax-cuda12-plugin", "jax-rocm7-plugin", "jax-rocm60-plugin"),
        ("jax", "tpu"): ("libtpu",),
        ("jax", "mps"): ("jax-mps",),  # not tried: it needs Python 3.13 and a newer JAX
        ("pytorch", "tpu"): ("torch_xla",),
    }
)


@dataclass(frozen=True)
class Precision:
    """How numbers are stored and multiplied. Parameters are float32 in every measured policy.

    ``device_kinds`` are the kinds that support the policy. The loss is multiplied by ``loss_scale`` before the backward
    pass and the gradients are divided by it, because float16 has no numbers below 6e-8.
    """

    name: str
    meaning: str
    device_kinds: tuple[str, ...] = DEVICE_KINDS
    loss_scale: float = 1.0


FRAMEWORK_DEFAULT = "framework_default"
PRECISIONS: Mapping[str, Precision] = MappingProxyType(
    {
        p.name: p
        for p in (
            Precision("fp32", "float32 storage, float32 products (strict: TF32 is switched off)"),
            Precision("tf32", "float32 storage, TF32 products in matmul and convolution", ("gpu",)),
            Precision("bf16", "float32 parameters, bfloat16 compute; softmax and loss in float32"),
            Precision("fp16", "the same with float16 and a loss scale of 1024", loss_scale=1024.0),
            Precision(FRAMEWORK_DEFAULT, "what a newcomer gets from each framework: never comparable"),
        )
    }
)


@dataclass(frozen=True)
class UseCase:
    """One use case. ``module`` and ``work`` name the timed class, alike in both frameworks; a validation has none."""

    number: int
    name: str
    meaning: str
    module: str = ""
    work: str = ""


@dataclass(frozen=True)
class Preset:
    """How long and how often one cell is measured.

    ``repeats`` fresh processes measure each cell, and in a paired run ``pairs`` of each framework; with fewer than
    ``CLAIM_PAIRS`` no ratio is claimed. Warm-up lasts at least ``warmup_steps`` steps (or ``max_seconds`` of them) and
    ``warmup_seconds``, then until blocks show no trend, for at most ``settling_seconds`` or five blocks. The timed part
    is cut into blocks of k steps with one synchronisation each, every block at least ``block_seconds`` long; it ends
    after ``iterations`` steps and ``blocks`` blocks, or after ``max_seconds``. Inference is measured at each of
    ``batch_sizes``, its latency over ``calls`` calls or ``max_seconds`` of them. A ``thorough`` preset also measures
    the device's ceilings and a warm start, and runs long enough to measure energy where that is possible.

    More blocks hardly help: in 720 processes on two CPU cores, those of one side and session varied by 1.6 % (median of
    their standard deviations) with 50 blocks each, and by 1.9 % with the first 15.
    """

    name: str
    meaning: str
    repeats: int
    pairs: int
    size: str = "full"
    warmup_steps: int = 10
    warmup_seconds: float = 2.0
    settling_seconds: float = 30.0
    iterations: int = 25
    blocks: int = 25
    block_seconds: float = 0.2
    max_seconds: float = 20.0
    batch_sizes: tuple[int, ...] = (1, 8, 32, 128)
    calls: int = 1000
    thorough: bool = True

    def pairs_in(self, sessions: int) -> int:
        """Return the pairs of each of so many ``sessions``: its share, or all where these make no claim together."""
        return math.ceil(self.pairs / sessions) if sessions >= CLAIM_SESSIONS else self.pairs


# Other common names of benchmarks.
ALIASES: Mapping[str, str] = MappingProxyType({"vit_base": "vit_b16", "nlp": "gpt2", "gnn": "graphnet"})

# What 'main.py validate' runs: not a measurement but the proof that both sides compute the same function.
VALIDATE = 0
TRAIN, TRAIN_MANY, PER_SAMPLE, PER_SAMPLE_MANY, INFERENCE = 1, 2, 3, 4, 5
MANY = (TRAIN_MANY, PER_SAMPLE_MANY)  # use cases on many devices
USE_CASES: Mapping[int, UseCase] = MappingProxyType(
    {
        u.number: u
        for u in (
            UseCase(VALIDATE, "validate", "proof that both sides compute the same function"),
            UseCase(TRAIN, "train_single", "training on one device", "training", "Training"),
            UseCase(TRAIN_MANY, "train_multi", "training on many devices", "training", "Training"),
            UseCase(
                *(PER_SAMPLE, "per_sample_gradients_single", "per-sample gradients on one device"),
                *("per_sample_gradients", "PerSampleGradients"),
            ),
            UseCase(
                *(PER_SAMPLE_MANY, "per_sample_gradients_multi", "per-sample gradients on many devices"),
                *("per_sample_gradients", "PerSampleGradients"),
            ),
            UseCase(INFERENCE, "inference", "latency and throughput at several batch sizes", "inference", "Inference"),
        )
    }
)
# What to compute from per-sample gradients. Different products are never compared with each other.
PRODUCTS: Mapping[str, str] = MappingProxyType(
    {
        "materialised": "every sample's gradient: samples x parameters numbers",
        "norms": "the norm of every sample's gradient",
        "clipped_sum": "the sum of all gradients, each scaled down to norm 1 if larger, as in DP-SGD",
    }
)
CLIP_NORM = 1.0
# What stays fixed as devices are added.
WEAK, STRONG = "weak", "strong"
SCALINGS: Mapping[str, str] = MappingProxyType({WEAK: "the batch on each device", STRONG: "the batch over all devices"})

CLAIM_PAIRS = 4  # fewest pairs to claim a ratio
CLAIM_SESSIONS = 3  # fewest sessions for an interval over sessions
SESSION_SECONDS = 3600  # after the end of a pair; one that begins sooner on the same host is in its session
TRIAL, FIT = "trial", "fit"
HIDDEN = (TRIAL, FIT)  # presets that only their own commands use
PRESETS: Mapping[str, Preset] = MappingProxyType(
    {
        p.name: p
        for p in (
            Preset(
                name="smoke",
                meaning="does it run: tiny model, a few steps, no claim",
                size="tiny",
                warmup_steps=2,
                warmup_seconds=0.0,
                settling_seconds=0.0,
                iterations=5,
                blocks=5,
                block_seconds=0.0,
                max_seconds=10.0,
                repeats=1,
                pairs=1,
                thorough=False,
                batch_sizes=(1, 8),
                calls=20,
            ),
            Preset(
                TRIAL,
                "what 'tune' uses to compare switches, no claim",
                warmup_seconds=2.0,
                settling_seconds=0.0,
                iterations=10,
                blocks=10,
                block_seconds=0.3,
                repeats=1,
                pairs=1,
                thorough=False,
                calls=20,
            ),
            Preset(
                FIT,
                "what 'fit' uses to find the largest batch: one step, no claim",
                warmup_steps=1,
                warmup_seconds=0.0,
                settling_seconds=0.0,
                repeats=1,
                pairs=1,
                thorough=False,
            ),
            Preset("standard", "one process per framework at full size; paired: four of each", repeats=1, pairs=4),
            Preset(
                name="publication",
                meaning="ten processes per framework at full size, each running longer",
                warmup_seconds=5.0,
                settling_seconds=60.0,
                iterations=50,
                blocks=50,
                max_seconds=60.0,
                repeats=10,
                pairs=10,
            ),
        )
    }
)


def groups(channels: int) -> int:
    """Return the number of groups of a group norm that replaces a batch norm.

    It is 32 (Wu and He 2018), or the largest power of two that fits. No group is a single channel: if all positions are
    averaged after it, its gradient is zero except for rounding.
    """
    most = math.gcd(32, channels)
    return most // 2 if 1 < most == channels else most
