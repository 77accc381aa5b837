"""Environment variables that a framework, its compiler or its math library obeys: part of what is measured.

No user's shell decides a comparison: a script unsets these variables before the target's set-up lines run, and at its
end lists in ``GIVEN`` what those lines exported. ``run.py`` removes whatever is not on that list; started by hand it
has no list and removes all of them. What reaches the measured process is recorded in its row.
"""

import functools
import json
import re
from collections.abc import Iterable, Mapping, MutableMapping
from fnmatch import translate

GIVEN = "DUEL_VARIABLES"  # names that the target's set-up lines, or its launcher, export
PROFILER = "DUEL_PROFILER"  # the command of a tool that the target has profiled programs run under
OWN = "DUEL_OWN_VARIABLES"  # names that Duel sets for the measured process

# Patterns that bash's 'case' and fnmatch read alike; a script's loop over them is rendered from this table.
OBEYED = {
    # docs.jax.dev/en/latest/config_options.html; flax.configurations
    "JAX": ("JAX_*", "JAXLIB_*", "FLAX_*", "MOSAIC_*"),
    # openxla.org/xla/flags_guidance; TF_* are of the TSL library below XLA, LIBTPU_* and TPU_* of its TPU plugin
    "XLA": ("XLA_*", "TF_*", "TSL_*", "TENSORFLOW_*", "PJRT_*", "LIBTPU_*", "TPU_*", "XRT_*"),
    # docs.pytorch.org/docs/stable/torch_environment_variables.html; torch/_inductor/config.py has its compiler's.
    "PyTorch": (
        *("TORCH*", "PYTORCH_*", "ATEN_*", "C10_*", "FBGEMM_*", "KINETO_*", "OPACUS_*", "LRU_CACHE_CAPACITY"),
        *("INDUCTOR_*", "AOT_*", "AOTI_*", "AOTINDUCTOR_*", "HALIDE_*", "HELION_*", "QUACK_*", "CUTLASS_*"),
        *("CUTEDSL_*", "ENABLE_*TMA*", "ENABLE_TEMPLATE_*", "TENSORIFY_*", "PARTITIONER_*", "UNSAFE_SKIP_*"),
    ),
    # triton/knobs.py; CC and CXX build what Triton and Inductor write in C and C++
    "Triton": ("TRITON_*", "AMDGCN_*", "NVPTX_*", "PTXAS_*", "DISABLE_*_OPT", "LLVM_*", "MLIR_*", "USE_IR_LOC"),
    "compilers": ("CC", "CXX", "CUDACXX"),
    # docs.nvidia.com/cuda/cuda-programming-guide, environment variables; cuBLAS, cuDNN
    "CUDA": ("CUDA_*", "CUBLAS*", "CUDNN_*", "CUTENSOR*", "NVIDIA_TF32_OVERRIDE"),
    "ROCm": ("HIP_*", "HIPBLAS*", "HSA_*", "ROCM_*", "ROCBLAS_*", "MIOPEN_*", "AMD_*"),
    "Metal": ("MTL_*", "METAL_*"),
    # docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html; gloo; and what both talk through
    "collectives": ("NCCL_*", "RCCL_*", "GLOO_*", "NVSHMEM_*", "UCX_*", "UCC_*", "FI_*", "OFI_NCCL_*"),
    # oneDNN and MKL developer guides; the numbers of threads are in THREADS
    "math": ("MKL_*", "DNNL_*", "ONEDNN_*", "OPENBLAS_*", "BLIS_*", "NVPL_*", "ARMPL_*", "VECLIB_*"),
    "threads": ("OMP_*", "GOMP_*", "KMP_*", "NPROC"),
    # man 3 mallopt, man 8 ld.so; jemalloc and tcmalloc are put in place of malloc by LD_PRELOAD
    "memory": ("MALLOC_*", "JEMALLOC_*", "TCMALLOC_*", "MIMALLOC_*", "GLIBC_TUNABLES"),
    "loader": ("LD_PRELOAD", "LD_AUDIT", "LD_BIND_NOW", "DYLD_INSERT_LIBRARIES"),
    # docs.python.org/3/using/cmdline.html: those that change how fast it runs
    "Python": (
        *("PYTHONDEVMODE", "PYTHONMALLOC*", "PYTHONTRACEMALLOC", "PYTHONOPTIMIZE", "PYTHONPERFSUPPORT"),
        *("PYTHON_JIT", "PYTHON_GIL", "PYTHON_PERF_JIT_SUPPORT"),
    ),
}
# These are different: they say which devices, or which part of one, a job was given, and with which hosts it computes.
# Slurm, a container runtime or a TPU host's platform sets them; without them a job would take devices not its own.
ALLOCATED = (
    *("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "CUDA_MPS_*", "NVIDIA_VISIBLE_DEVICES"),
    *("HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "TORCHELASTIC_*"),
    *("TPU_ACCELERATOR_TYPE", "TPU_CHIPS_PER_*", "TPU_HOST_BOUNDS", "TPU_HOSTNAME_OVERRIDE", "TPU_NAME"),
    *("TPU_PROCESS_*", "TPU_RUNTIME_METRICS_PORTS", "TPU_SKIP_MDS_QUERY", "TPU_TOPOLOGY*", "TPU_TYPE"),
    *("TPU_VISIBLE_*", "TPU_WORKER_*"),
)
FOREIGN = ("TF_CLI_*", "TF_VAR_*", "TF_LOG*")  # Terraform's
LEFT = (*ALLOCATED, *FOREIGN)
# Only one framework obeys each of these, so none reaches what is timed, whoever sets it: both sides follow the CPUs
# that the process may use, and the switch 'threads' sets those for both.
THREADS = (
    *OBEYED["threads"],
    *("MKL_NUM_THREADS", "MKL_DOMAIN_NUM_THREADS", "MKL_DYNAMIC", "OPENBLAS_NUM_THREADS", "BLIS_NUM_THREADS"),
    *("VECLIB_MAXIMUM_THREADS", "PJRT_NPROC"),
)
SECRETS = ("KEY", "TOKEN", "SECRET", "PASSWORD")
HIDDEN = "(not recorded)"


def starter(framework: str) -> str:
    """Return the variable with the shell text that starts processes of ``framework`` in a paired script, where each
    framework needs lines or a container of its own.
    """
    return f"DUEL_START_{framework.upper()}"


def matches(name: str, patterns: Iterable[str]) -> bool:
    return _expression(tuple(patterns)).match(name) is not None


@functools.cache
def _expression(patterns: tuple[str, ...]) -> re.Pattern[str]:
    """Return one expression for all of ``patterns``: a submission compares each variable of the shell for each job."""
    return re.compile("|".join(map(translate, patterns)) or r"(?!)")


def is_secret(name: str) -> bool:
    return any(word in name for word in SECRETS)


def obeyed(names: Iterable[str]) -> list[str]:
    """Return those of ``names`` that change what is computed, or how fast, in their order."""
    return [
        name
        for name in names
        if not matches(name, LEFT) and any(matches(name, patterns) for patterns in OBEYED.values())
    ]


def take_out(environment: MutableMapping[str, str]) -> list[str]:
    """Remove from ``environment`` what changes a measurement and the target did not set; return the names removed."""
    given = environment.get(GIVEN, "").split()
    removed = [name for name in obeyed(sorted(environment)) if name not in given]
    for name in removed:
        del environment[name]
    return removed


def record(environment: Mapping[str, str]) -> str:
    """Return the column ``variables`` of a process with this ``environment``, as JSON, without what Duel sets.

    It maps names to values, under "target" for what the target set and under "unnamed" for the rest: what a
    sitecustomize or an interpreter wrapper set. Values of names that look like a secret's are not recorded.
    """
    given, own = environment.get(GIVEN, "").split(), environment.get(OWN, "").split()
    found: dict[str, dict[str, str]] = {}
    for name in obeyed(sorted(environment)):
        if name not in own:
            value = HIDDEN if is_secret(name) else environment[name]
            found.setdefault("target" if name in given else "unnamed", {})[name] = value
    return json.dumps(found)


def recorded(text: str | None) -> dict[str, str]:
    """Return names and values of all variables in a row's column ``variables``, whoever set them."""
    found: dict[str, str] = {}
    for values in json.loads(text or "{}").values():
        found |= values
    return found


def unnamed(text: str | None) -> list[str]:
    """Return the names in a row's column ``variables`` that neither the target nor Duel set."""
    return list(json.loads(text or "{}").get("unnamed", {}))
