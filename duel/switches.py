"""The switches of both frameworks: what each does, where it exists, and what proves that it was in force."""

import re
from collections.abc import Callable
from dataclasses import dataclass

from duel.catalogue import (
    BENCHMARKS,
    DEVICE_KINDS,
    FRAMEWORKS,
    MANY,
    USE_CASES,
    Benchmark,
    Citations,
    Images,
    Molecules,
)

OFF, ON = "off", "on"
THREADS, ALL = "threads", "all"
KEEP_MEMORY = "keep_memory"
AS_PASSED = "as passed"  # nothing observable shows whether it was in force
TRAINING, PER_SAMPLE, INFERENCE = "training", "per_sample_gradients", "inference"  # modules of use cases


def _has_edges(benchmark: Benchmark) -> bool:
    return all(isinstance(size.inputs, Citations | Molecules) for size in benchmark.sizes.values())


def _attends(benchmark: Benchmark) -> bool:
    return benchmark.attention


def _attends_evenly(benchmark: Benchmark) -> bool:
    """JAX 0.10.2 refuses cuDNN's kernel the gradient over an odd number of tokens: it takes its empty bias for one."""
    return benchmark.attention and not benchmark.odd_tokens


def _takes_hooks(benchmark: Benchmark) -> bool:
    """Opacus 1.6's hooks fail where a network adds in place, and where a layer's first axis is not the samples."""
    return benchmark.name in ("mnist", "cifar10", "vit_b16")


def _has_images(benchmark: Benchmark) -> bool:
    return all(isinstance(size.inputs, Images) for size in benchmark.sizes.values())


@dataclass(frozen=True)
class Switch:
    """One switch of one framework, and the ``device_kinds``, ``modules`` and benchmarks that have it.

    The first of ``values`` is what a newcomer gets; with ``counts``, a number from 1 on is valid, too. ``proof`` is
    what shows that it was in force, ``AS_PASSED`` if nothing does.
    """

    name: str
    framework: str
    meaning: str
    proof: str
    values: tuple[str, ...] = (OFF, ON)
    counts: bool = False
    device_kinds: tuple[str, ...] = DEVICE_KINDS
    modules: tuple[str, ...] = (TRAINING, PER_SAMPLE, INFERENCE)
    many: bool = True  # whether use cases on many devices have it
    suits: Callable[[Benchmark], bool] = lambda benchmark: True
    needs: str = ""  # a switch that must be on
    excludes: str = ""  # a switch that must not be on
    untried: tuple[str, ...] = ()  # values that 'tune' does not try: the first's program again, or not for speed

    @property
    def tried(self) -> tuple[str, ...]:
        """The values that ``tune`` may try."""
        return tuple(value for value in self.values if value not in self.untried)

    def takes(self, value: str) -> bool:
        return value in self.values or (self.counts and re.fullmatch(r"[1-9]\d{0,5}", value) is not None)

    def applies(self, benchmark: str, use_case: int) -> bool:
        there = USE_CASES[use_case].module in self.modules and (self.many or use_case not in MANY)
        return there and self.suits(BENCHMARKS[benchmark])


_GPU = ("gpu",)
SWITCHES: tuple[Switch, ...] = (
    *(
        Switch(
            *(THREADS, framework, "CPUs the process may use", "affinity of the process"),
            values=(ALL,),
            counts=True,
            device_kinds=("cpu",),
        )
        for framework in FRAMEWORKS
    ),
    *(
        Switch("deterministic", framework, "kernels that reproduce the same bits", "bits of a repeat", untried=(ON,))
        for framework in FRAMEWORKS
    ),
    Switch("compile", "pytorch", "torch.compile of the step", "Dynamo's graphs", device_kinds=("cpu", "gpu", "mps")),
    Switch(
        *("channels_last", "pytorch", "images and kernels as NHWC in memory", "strides"),
        modules=(TRAINING, INFERENCE),
        suits=_has_images,
    ),
    Switch(
        *("fused_optimizer", "pytorch", "the optimizer's step as one kernel", "kernel names"),
        device_kinds=("cpu", "gpu"),
        modules=(TRAINING,),
    ),
    Switch("cudnn_benchmark", "pytorch", "cuDNN tries all its algorithms first", AS_PASSED, device_kinds=_GPU),
    Switch(
        *("cuda_graphs", "pytorch", "torch.compile's mode 'reduce-overhead'", "recorded graphs"),
        device_kinds=_GPU,
        needs="compile",
    ),
    Switch(
        *("max_autotune", "pytorch", "torch.compile's mode 'max-autotune'", AS_PASSED),
        device_kinds=_GPU,
        needs="compile",
    ),
    *(
        Switch(
            *("attention", "pytorch", "the kernel of scaled dot-product attention", "kernel names"),
            values=("framework", "math", "flash", *more),
            device_kinds=(kind,),
            modules=(TRAINING, INFERENCE),
            suits=_attends,
        )
        for kind, more in (("cpu", ()), ("gpu", ("efficient", "cudnn")))
    ),
    Switch(
        *(
            "aggregation",
            "pytorch",
            "how sums over a graph's edges are written: by index, or as sparse products",
        ),
        proof="operations",
        values=("index_add", "sparse"),
        device_kinds=("cpu", "gpu"),
        modules=(TRAINING, INFERENCE),
        suits=_has_edges,
    ),
    Switch(
        *("opacus", "pytorch", "per-sample gradients through Opacus's hooks", "its class"),
        modules=(PER_SAMPLE,),
        suits=_takes_hooks,
        excludes="compile",
    ),
    *(
        Switch(
            *("attention", "jax", "the implementation of jax.nn.dot_product_attention" + suffix),
            proof="names in the program",
            values=("framework", "math", *more),
            device_kinds=(kind,),
            modules=modules,
            suits=suits,
            untried=("math",),  # JAX 0.10.2's own choice is the same
        )
        for kind, suffix, more, modules, suits in (
            ("cpu", ", or written out with heads first", ("heads_first",), (TRAINING, INFERENCE), _attends),
            ("gpu", "", ("cudnn",), (INFERENCE,), _attends),
            ("gpu", "", ("cudnn",), (TRAINING,), _attends_evenly),
            ("gpu", "", (), (TRAINING,), lambda benchmark: benchmark.attention and benchmark.odd_tokens),
        )
    ),
    Switch(
        *("depthwise", "jax", "how depthwise convolutions are written: grouped, or as sums of shifted products"),
        proof="names in the program",
        values=("grouped", "shifted"),
        suits=lambda benchmark: benchmark.depthwise,
    ),
    *(
        Switch(
            *("convolution", "jax", "how other convolutions are written: by XLA, or some as matrix products" + suffix),
            proof="names in the program",
            values=("framework", "products", *more),
            modules=modules,
            suits=_has_images,
        )
        for modules, suffix, more in (
            ((TRAINING, PER_SAMPLE), ", or their gradients as well", ("gradients",)),
            ((INFERENCE,), "", ()),
        )
    ),
    Switch(
        *("donation", "jax", "the step overwrites its state in place", "memory shared by input and output"),
        values=(ON, OFF),
        modules=(TRAINING,),
    ),
    Switch("command_buffers", "jax", "XLA's CUDA graphs", AS_PASSED, values=(ON, OFF), device_kinds=_GPU),
    Switch(
        *("triton_gemm", "jax", "XLA may use Triton for matrix products", "custom calls of the program"),
        values=(ON, OFF),
        device_kinds=_GPU,
    ),
    Switch(
        *("autotune", "jax", "xla_gpu_autotune_level", AS_PASSED),
        values=("4", "3", "2", "1", "0"),
        device_kinds=_GPU,
    ),
    Switch("latency_hiding", "jax", "XLA's latency-hiding scheduler", AS_PASSED, device_kinds=_GPU),
    *(  # the last that a search tries: what keeping saves depends on all others
        Switch(
            *(KEEP_MEMORY, framework, "glibc keeps what is freed, in huge pages if the kernel has them"),
            proof="where a large block lies",
            device_kinds=("cpu",),
            many=False,  # JAX's threads have pools of their own by the time that the processes have met
        )
        for framework in FRAMEWORKS
    ),
)


def applicable(framework: str, benchmark: str, use_case: int, device_kind: str | None) -> dict[str, Switch]:
    """Return by name the switches of ``framework`` that apply here, on any device if ``device_kind`` is None."""
    return {
        switch.name: switch
        for switch in SWITCHES
        if switch.framework == framework
        and (device_kind is None or device_kind in switch.device_kinds)
        and switch.applies(benchmark, use_case)
    }


def default_value(name: str) -> str:
    """Return the value of switch ``name`` that a newcomer gets. Raises ValueError if it is unknown."""
    for switch in SWITCHES:
        if switch.name == name:
            return switch.values[0]
    raise ValueError(f"unknown switch {name!r}; valid: {', '.join(dict.fromkeys(s.name for s in SWITCHES))}")
