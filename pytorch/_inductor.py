"""What Inductor's compiled loops and its calls of other kernels compute, by module of the model.

Inductor keeps, for each graph, which operations of that graph became which kernel (its "provenance"), and names its CPU
loops in a trace if it is asked to. Both are settings of its own for debugging; the programs are otherwise the same.
"""

import ast
import importlib
import re
from collections import defaultdict
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from _counting import Amount, amount, arrays, moved
from duel.trace import Operation

Operations = tuple[Operation, ...]
Region = tuple[str, bool]  # what a trace calls a compiled graph, and whether it is a backward pass
INPUT = "placeholder"  # Inductor's name for an input of a graph
_STEP = re.compile(r"\['(\w+)'\]|\.(\w+)|\[(\d+)\]")
_NUMBER = re.compile(r"graph_\d+_")
_OTHERS = re.compile(r"(?:extern_kernels|torch\.ops\.\w+|aten)\.(\w+)")


class Loop(NamedTuple):
    """What a kernel of a graph does."""

    operations: Operations
    amount: Amount


class Compiled(NamedTuple):
    """Of each graph the loops by their names, and the calls of other kernels, by the kernel's name in order."""

    loops: dict[Region, dict[str, Loop]]
    calls: dict[Region, dict[str, list[Loop]]]

    def loop(self, name: str, region: Region | None) -> Loop | None:
        """Return the loop that a trace calls ``name``, in ``region``; None: in any, where the trace does not tell.

        A number of the graph is before the name on a CPU. Forward and backward may have the same one.
        """
        name = _NUMBER.sub("", name)
        graphs = self.loops.values() if region is None else [self.loops.get(region, {})]
        return next((loops[name] for loops in graphs if name in loops), None)


class _Node(NamedTuple):
    """What a graph's node does; ``bytes`` are of its result."""

    operation: Operation
    flops: int
    bytes: int
    inputs: list[str]
    users: list[str]


class Graphs:
    """The graphs that Inductor compiles from now on. ``layers`` has the kind of each module of the model."""

    def __init__(self, layers: Mapping[str, str]) -> None:
        self._layers = layers
        self._graphs: list[dict[str, _Node]] = []  # in the order in which they were compiled
        config: Any = importlib.import_module("torch._inductor.config")
        config.cpp.enable_kernel_profile = True
        config.trace.provenance_tracking_to_timeline = True
        config.post_grad_custom_post_pass = self

    def __call__(self, graph: torch.fx.Graph) -> None:
        """Take note of ``graph``, as it is before it becomes kernels."""
        backward = any(node.op == INPUT and node.name.startswith("tangents") for node in graph.nodes)
        stage = "backward" if backward else "forward"
        self._graphs.append({node.name: self._node(node, stage) for node in graph.nodes})

    def uuid(self) -> Any:
        """Return None: what is compiled with this must not be taken from a cache, or nothing would be noted."""
        return None

    def _node(self, node: torch.fx.Node, stage: str) -> _Node:
        result = node.meta.get("val")
        around = [one.name for one in node.all_input_nodes], [one.name for one in node.users]
        if node.op != "call_function":
            return _Node(Operation(node.op), 0, moved(result), *around)
        operation = getattr(node.target, "overloadpacket", node.target)
        name = str(getattr(operation, "_qualified_op_name", getattr(operation, "__name__", operation)))
        arguments, options = torch.fx.map_arg((node.args, node.kwargs), lambda one: one.meta.get("val"))
        module = self._module(node)
        shapes = [tuple(array.shape) for array in arrays((arguments, result))]
        found = Operation(name, module, self._layers.get(module, ""), stage, str(shapes)[:400])
        return _Node(found, amount(node.target, arguments, options, result).flops, moved(result), *around)

    def _module(self, node: torch.fx.Node) -> str:
        """Return the model's module that ``node`` is from: the innermost that its stack names."""
        stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
        for path, _ in reversed(list(stack.values())):
            steps = [next(filter(None, step)) for step in _STEP.findall(str(path)) if any(step)]
            steps = [step for step in steps if step not in ("_modules", "self", "_model", "__self__")]
            for start in range(len(steps) + 1):
                name = ".".join(steps[start:])
                if name in self._layers:
                    return name
        return ""

    def compiled(self) -> Compiled:
        """Return what the kernels of all graphs so far compute."""
        known = importlib.import_module("torch._inductor.debug").get_kernel_information_jsons()
        found = Compiled({}, {})
        for nodes, (key, kernels) in zip(self._graphs, known.items(), strict=True):
            loops: dict[str, Loop] = {}
            calls: dict[str, list[Loop]] = defaultdict(list)
            for name, one in sorted(kernels.items(), key=lambda each: int(each[0].rpartition(":")[2] or 0)):
                loop = _loop({each: nodes[each] for each in one["post_grad_nodes"] if each in nodes}, nodes)
                kernel = name.rpartition(":")[0]
                if other := _OTHERS.match(kernel):
                    calls[other[1]].append(loop)
                else:
                    loops[kernel] = loop
            region = ast.literal_eval(key)
            found.loops[region], found.calls[region] = loops, dict(calls)
        return found


def _loop(inside: Mapping[str, _Node], nodes: Mapping[str, _Node]) -> Loop:
    """Return what a kernel does that has the nodes ``inside``: it reads their other inputs, and writes what is used."""
    read = {name for node in inside.values() for name in node.inputs} - set(inside)
    written = [node.bytes for node in inside.values() if not set(node.users) <= set(inside)]
    operations = [node.operation for node in inside.values() if node.operation.name != INPUT]
    return Loop(
        tuple(operations) or (Operation("copy"),),  # of an input, into another layout
        Amount(sum(node.flops for node in inside.values()), sum(nodes[name].bytes for name in read) + sum(written)),
    )
