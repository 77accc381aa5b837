"""How much each of PyTorch's operations computes and moves, by the arrays that it takes and returns."""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

_ATEN = torch.ops.aten
# PyTorch's own table lacks attention on a CPU.
_FLOPS = {
    **flop_registry,
    _ATEN._scaled_dot_product_flash_attention_for_cpu: flop_registry[_ATEN._scaled_dot_product_efficient_attention],
    _ATEN._scaled_dot_product_flash_attention_for_cpu_backward: flop_registry[
        _ATEN._scaled_dot_product_efficient_attention_backward
    ],
}


class Amount(NamedTuple):
    """FLOP of matrix products, convolutions and attention, two per multiply-add; bytes read and written at least."""

    flops: int = 0
    bytes: int = 0


def amount(operation: Any, arguments: Any, options: Mapping[str, Any], result: Any) -> Amount:
    """Return what ``operation`` computes and moves. Arrays may be without values, such as a graph's."""
    packet = getattr(operation, "overloadpacket", operation)
    if packet is torch.ops.aten.convolution_backward:
        flops = _of_gradients(*arguments)
    else:
        count = _FLOPS.get(packet)
        flops = int(count(*arguments, **options, out_val=result)) if count else 0
    return Amount(flops, moved((arguments, options)) + moved(result))


def _of_gradients(gradient: Any, inputs: Any, kernel: Any, *others: Any) -> int:
    """Return the FLOP of a convolution's backward pass: its own for each gradient, of the inputs and of the kernel.

    PyTorch's count leaves out that each group has its own channels.
    """
    asked = others[-1]
    return 2 * math.prod(gradient.shape) * math.prod(kernel.shape[1:]) * (int(asked[0]) + int(asked[1]))


def moved(tree: Any) -> int:
    """Return the bytes of all arrays in ``tree``."""
    return sum(one.numel() * one.element_size() for one in arrays(tree))


def arrays(tree: Any) -> Iterable[torch.Tensor]:
    return (leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor))


class Counting(TorchDispatchMode):
    """Counts the operations run inside it: by name, the amount of each in the order of the calls."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[str, list[Amount]] = defaultdict(list)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "overloadpacket", func) not in _FLOPS:
            with self:  # what is made of others arrives whole where no gradient is wanted
                result = func.decompose(*args, **(kwargs or {}))
            if result is not NotImplemented:
                return result
        result = func(*args, **(kwargs or {}))
        self.found[func._schema.name].append(amount(func, args, kwargs or {}, result))
        return result
