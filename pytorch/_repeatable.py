"""What the modules of a model compute, so that each can be repeated alone."""

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from duel.profile import Layer


def layers(work: Any) -> dict[str, Layer]:
    """Return the layers of the model of ``work``, seen in a forward pass of its first batch.

    None of per-sample gradients, whose layers do other work.
    """
    if work._per_sample:
        return {}
    found: dict[str, Layer] = {}
    inside: list[str] = []
    training = hasattr(work, "moments")

    def enter(name: str) -> None:
        inside.append(name)

    def leave(module: nn.Module, inputs: Any) -> None:
        name = inside.pop()
        if layer := _layer(module, list(inputs[0].shape) if inputs else [], training):
            found[name] = layer

    hooks = []
    for name, module in work._model.named_modules():
        hooks.append(module.register_forward_pre_hook(lambda *_, name=name: enter(name)))
        hooks.append(module.register_forward_hook(lambda module, inputs, _: leave(module, inputs)))
    defined: Any = importlib.import_module(f"models.{work._setting.benchmark.name}")
    segment_sum: Callable[..., Any] | None = getattr(defined, "segment_sum", None)

    def recorded(messages: torch.Tensor, receivers: torch.Tensor, count: int, *more: Any, **options: Any) -> Any:
        found[inside[-1]] = Layer("sum over edges", list(messages.shape), count)
        assert segment_sum is not None
        return segment_sum(messages, receivers, count, *more, **options)

    try:
        if segment_sum is not None:
            defined.segment_sum = recorded
        with torch.no_grad():
            work.applied(work._model, work._batches[0][0])
    finally:
        if segment_sum is not None:
            defined.segment_sum = segment_sum
        for hook in hooks:
            hook.remove()
    return found


def _layer(module: nn.Module, shape: list[int], training: bool) -> Layer | None:
    match module:
        case nn.Conv2d():
            sides: Any = (module.kernel_size, module.stride, module.padding)
            kernel, stride, padding = map(list, sides)
            return Layer("convolution", shape, module.out_channels, kernel, stride, padding, module.groups)
        case nn.BatchNorm2d() if training:
            return Layer("batch norm", shape, epsilon=module.eps)
        case nn.LayerNorm():
            return Layer("layer norm", shape, epsilon=module.eps)
        case nn.Linear():
            return Layer("linear", shape, module.out_features)
    return None
