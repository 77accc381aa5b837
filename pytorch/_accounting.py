"""What a step's memory is for, and how long each graph took to compile, by PyTorch's own account."""

import contextlib
import importlib
from typing import Any

import torch

from _counting import arrays, moved
from duel import profile

# The fields of Dynamo's records, in microseconds, by phase.
PHASES = {
    "trace": "dynamo_cumulative_compile_time_us",
    "lower": "aot_autograd_cumulative_compile_time_us",
    "compile": "inductor_cumulative_compile_time_us",
    "autotune": "compile_time_autotune_time_us",
    "autotune at run time": "runtime_triton_autotune_time_us",
}


def memory(work: Any, index: int) -> dict[str, int]:
    """Return bytes by what they are for; it takes two steps, the first from batch ``index`` on.

    Temporaries are the peak of what a step allocates; gradients and activations are in it.
    """
    model = work._model
    found = {profile.PARAMETERS: moved(list(model.parameters())), profile.STATISTICS: moved(list(model.buffers()))}
    training = hasattr(work, "moments")
    saved: dict[int, int] = {}  # by storage: an array and its views are one
    known = {array.untyped_storage().data_ptr() for array in arrays((list(model.parameters()), work._batches))}

    def keep(array: torch.Tensor) -> torch.Tensor:
        storage = array.untyped_storage()
        if storage.data_ptr() not in known:
            saved[storage.data_ptr()] = storage.nbytes()
        return array

    hooks = torch.autograd.graph.saved_tensors_hooks(keep, lambda array: array)
    with hooks if training else contextlib.nullcontext():
        work.synchronize(work.step(index))
    if training:
        found[profile.OPTIMIZER] = moved(list(map(dict, work._optimizer.state.values())))
        found[profile.GRADIENTS] = moved([parameter.grad for parameter in model.parameters()])
        found[profile.ACTIVATIONS] = sum(saved.values())
    return found | {profile.TEMPORARIES: _peak(work, index + 1), profile.BATCH: moved(work._batches[0])}


def _peak(work: Any, index: int) -> int:
    """Return the most bytes that step ``index`` holds beyond what there was before."""
    if work._device.type == "cuda":
        if optimizer := getattr(work, "_optimizer", None):
            optimizer.zero_grad(set_to_none=True)  # the last step's gradients: this step's are among what it holds
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        work.synchronize(work.step(index))
        return torch.cuda.max_memory_allocated() - before
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        work.step(index)
    held, most = 0, 0
    for event in sorted(profiler.profiler.kineto_results.events(), key=lambda event: event.start_ns()):
        if event.name() == "[memory]":
            held += event.nbytes()
            most = max(most, held)
    return most


def programs() -> list[profile.Program]:
    """Return the graphs that were compiled, each with its backward pass."""
    metrics = importlib.import_module("torch._dynamo.utils").get_compilation_metrics()
    found = []
    for one in metrics:
        name = f"{one.co_name or 'graph'} {one.compile_id}{'' if one.is_forward is not False else ', backward'}"
        spent = {phase: (getattr(one, field, None) or 0) / 1e6 for phase, field in PHASES.items()}
        # Each of Dynamo's figures includes those of what it calls.
        spent["trace"] = max(0.0, spent["trace"] - spent["lower"])
        spent["lower"] = max(0.0, spent["lower"] - spent["compile"])
        spent["compile"] = max(0.0, spent["compile"] - spent["autotune"])
        found.append(profile.Program(name, {phase: seconds for phase, seconds in spent.items() if seconds}))
    return found
