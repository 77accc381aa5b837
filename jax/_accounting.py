"""What a program's memory is for, and how long each of a process's programs took to compile, by XLA's own account."""

from collections import defaultdict
from typing import Any

import jax

from _hlo import Program
from duel import profile

# JAX's names for the phases of a compilation, and ours.
PHASES = {
    "/jax/core/compile/jaxpr_trace_duration": "trace",
    "/jax/core/compile/jaxpr_to_mlir_module_duration": "lower",
    "/jax/core/compile/backend_compile_duration": "compile",
}


def memory(work: Any) -> dict[str, int]:
    """Return bytes by what they are for.

    XLA plans gradients and activations together with what it needs in between. In training they are what its program
    hands from one stage to the next: what is fused with the next stage takes no memory.
    """
    names = (profile.PARAMETERS, profile.STATISTICS, profile.OPTIMIZER)
    found = {name: _bytes(tree) for name, tree in zip(names, work._state, strict=False)}
    analysis = work._program.memory_analysis()
    if analysis is not None:
        found[profile.TEMPORARIES] = int(analysis.temp_size_in_bytes)
    if hasattr(work, "moments"):
        program = Program(work._program.as_text(), training=True)
        # What the backward pass reads, too, is no gradient: a bias's sum may be fused with the update.
        found[profile.GRADIENTS] = program.handed("backward", "optimizer", alone=True)
        found[profile.ACTIVATIONS] = program.handed("forward", "backward")
    return found | {profile.BATCH: _bytes(work._batches[0])}


def _bytes(tree: Any) -> int:
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))


class Compilations:
    """Listens to the compilations of this process from now on."""

    def __init__(self) -> None:
        self._seconds: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
        jax.monitoring.register_event_duration_secs_listener(self._hear)

    def _hear(self, event: str, duration_secs: float, **known: Any) -> None:
        if event in PHASES:
            name = str(known.get("fun_name", "?")).removeprefix("jit(").removesuffix(")")
            self._seconds[name][PHASES[event]] += duration_secs

    def found(self) -> list[profile.Program]:
        return [profile.Program(name, dict(phases)) for name, phases in self._seconds.items()]
