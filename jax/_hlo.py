"""A compiled program's text (HLO): what each instruction computes, how much, and where in the model."""

import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from duel import kinds
from duel.trace import Operation

MODULE = "module:"  # begins the named scope of a module; a layer's kind may follow its name after a colon
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%([^\s=]+) = (.+?) ([a-z][a-z0-9\-]*)\((.*)$")
_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([^\s(]+) (?:\(.*\) -> .*)?\{$")
_CALLED = re.compile(r"\b(?:calls|to_apply|body|condition|true_computation|false_computation)=%?([^\s,)}]+)")
_BRANCHES = re.compile(r"\bbranch_computations=\{([^}]*)\}")
_SHAPE = re.compile(r"\b([a-z]+[0-9]*)\[([0-9,]*)\]")
_SCOPE = re.compile(MODULE + r"([\w.]*)(?::(\w+))?")
_STEPS = re.compile(r"\[\\*'(\w+)\\*'\]|\[(\d+)\]")
NO_WINDOW = re.compile(r"dim_labels=[a-z]+_[a-z]+->[a-z]+(?![a-z0-9])")  # no digit: no dimension in space
_BYTES = {"pred": 1, "s4": 1, "u4": 1, "bf16": 2, "c64": 8, "c128": 16}
PRODUCTS = (kinds.PRODUCT, kinds.CONVOLUTION, kinds.ATTENTION)  # whose FLOP count
CONTAINERS = ("while", "conditional", "call", "async-start", "async-done")
VIEWS = ("bitcast", "tuple", "opt-barrier")  # which have no memory of their own


@dataclass(frozen=True)
class Instruction:
    name: str
    shape: str
    opcode: str
    rest: str  # operands and attributes
    computation: str

    @property
    def operands(self) -> list[str]:
        return re.findall(r"%([^\s,)]+)", self.rest.partition("), ")[0])

    @property
    def called(self) -> list[str]:
        """The computations that it runs."""
        found = _CALLED.findall(self.rest)
        for branches in _BRANCHES.findall(self.rest):
            found += re.findall(r"%?([^\s,]+)", branches)
        return found

    @property
    def operation(self) -> str:
        """The opcode, with the target of a custom call."""
        target = re.search(r'custom_call_target="([^"]*)"', self.rest)
        return f"{self.opcode}:{target[1]}" if target else self.opcode

    @property
    def scope(self) -> str:
        """Where the framework traced it; empty if the compiler made it."""
        found = re.search(r'op_name="((?:[^"\\]|\\.)*)"', self.rest)
        return found[1] if found else ""

    @property
    def bytes(self) -> int:
        return sum(_size(kind, sides) for kind, sides in _SHAPE.findall(self.shape))


def _size(kind: str, sides: str) -> int:
    each = _BYTES.get(kind) or max(1, int(re.sub(r"\D", "", kind)[:2] or 8) // 8)
    return each * math.prod(int(side) for side in sides.split(",") if side)


class Program:
    """The instructions of a compiled program. ``training`` has what is neither forward nor backward as optimizer."""

    def __init__(self, text: str, training: bool) -> None:
        self._training = training
        self.instructions: dict[str, Instruction] = {}
        self._members: dict[str, list[Instruction]] = defaultdict(list)
        computation = ""
        for line in text.splitlines():
            if found := _COMPUTATION.match(line):
                computation = found[1]
            elif found := _INSTRUCTION.match(line):
                name, shape, opcode, rest = found.groups()
                one = Instruction(name, shape, opcode, rest, computation)
                self.instructions[one.name] = one
                self._members[computation].append(one)
        self._layers = dict(_module(one.scope) for one in self.instructions.values())
        self._users: dict[str, list[str]] = defaultdict(list)
        for one in self.instructions.values():
            for operand in one.operands:
                self._users[operand].append(one.name)

    def operations(self, name: str) -> tuple[Operation, ...]:
        """Return what instruction ``name`` computes: itself or, of a fusion or call, all that is inside."""
        one = self.instructions.get(name)
        if one is None:
            return ()
        if not one.called or one.opcode not in ("fusion", *CONTAINERS):
            return (self._operation(one, self._scope(one)),)
        inner = [member for called in one.called for member in self._members[called]]
        if one.opcode in CONTAINERS:
            return tuple(found for member in inner for found in self.operations(member.name))
        scope = self._scope(one)
        # What has no path is not a place in the traced program, such as an argument's name.
        return tuple(self._operation(member, member.scope if "/" in member.scope else scope) for member in inner)

    def _operation(self, one: Instruction, scope: str) -> Operation:
        module, layer = _module(scope)
        layer = layer or self._layers.get(module, "")
        detail = f"{one.shape} {one.operation}({one.rest.partition(', metadata=')[0]}"
        # XLA writes a matrix product for a TPU as a convolution over no dimension.
        name = "dot" if one.operation == "convolution" and NO_WINDOW.search(one.rest) else one.operation
        return Operation(name, module, layer, self._stage(scope), detail[:400])

    def _stage(self, scope: str) -> str:
        if "transpose(" in scope:
            return "backward"
        if "jvp(" in scope:
            return "forward"
        return "optimizer" if self._training else ""

    def _scope(self, one: Instruction) -> str:
        """Return its scope or, if the compiler made it, that of the nearest user in a module, else of an operand."""
        if "/" in one.scope:  # a path in the traced program
            return one.scope
        found = [*self._reached(one.name, lambda name: self._users[name])]
        found += self._reached(one.name, lambda name: self.instructions[name].operands)
        named = [scope for scope in found if _module(scope)[0]]
        return (named or found or [one.scope])[0]

    def _reached(self, start: str, neighbours: Callable[[str], list[str]]) -> Iterator[str]:
        """Yield the scopes of the nearest instructions that have one, and of weights that any on the way updates."""
        seen, later = {start}, [start]
        while later:
            one = self.instructions.get(later.pop(0))
            if one is None:
                continue
            if one.name != start and (MODULE in one.scope or "jvp(" in one.scope):
                yield one.scope
                continue
            yield from (f"transpose(jvp({MODULE}{name}))" for name in map(self._owner, one.operands) if name)
            more = [name for name in neighbours(one.name) if name not in seen]
            seen.update(more)
            later += more

    def _owner(self, name: str) -> str:
        """Return the module whose weight the parameter ``name`` of the program is; empty for any other instruction."""
        one = self.instructions.get(name)
        if one is None or one.opcode != "parameter":
            return ""
        steps = [word or number for word, number in _STEPS.findall(one.scope)][:-1]
        return next((owner for n in range(len(steps)) if (owner := ".".join(steps[n:])) in self._layers), "")

    def handed(self, before: str, after: str, alone: bool = False) -> int:
        """Return the bytes of the arrays that work of stage ``before`` leaves in memory for work of stage ``after``.

        ``alone``: only of those that no other stage reads.
        """
        inner = {name for one in self.instructions.values() if one.opcode not in CONTAINERS for name in one.called}
        made: dict[str, str] = {}  # the stage that writes an array; none does that of arguments and their copies
        found = 0
        for one in self.instructions.values():
            if one.opcode in ("parameter", "constant"):
                continue
            sources = [made[operand] for operand in one.operands if made.get(operand)]
            if "/" not in one.scope and (one.opcode == "get-tuple-element" or not sources):
                made[one.name] = next(iter(sources), "")
            else:
                made[one.name] = self._stage(self._scope(one))
            view = one.opcode in VIEWS or one.shape.startswith("(")
            if made[one.name] == before and not view and one.computation not in inner:
                readers = self._readers(one.name)
                found += one.bytes if after in readers and not (alone and len(readers) > 1) else 0
        return found

    def _readers(self, name: str) -> set[str]:
        """Return the stages that read array ``name``, itself or through views."""
        found = set()
        for user in (self.instructions[each] for each in self._users[name]):
            found |= self._readers(user.name) if user.opcode in VIEWS else {self._stage(self._scope(user))}
        return found

    def bytes(self, name: str) -> int:
        """Return the bytes that instruction ``name`` reads and writes at least: its operands and its result."""
        one = self.instructions.get(name)
        if one is None or one.opcode in CONTAINERS:
            return 0
        operands = [self.instructions[other].bytes for other in one.operands if other in self.instructions]
        return one.bytes + sum(operands)

    def flops(self, name: str) -> int:
        """Return the FLOP of matrix products and convolutions in instruction ``name``, two per multiply-add."""
        one = self.instructions.get(name)
        if one is None or one.opcode in CONTAINERS:
            return 0
        if one.opcode == "fusion":
            return sum(self.flops(member.name) for called in one.called for member in self._members[called])
        if one.opcode not in ("dot", "convolution"):
            return 0
        results = _SHAPE.findall(one.shape)[0][1]
        sides = [self._sides(other) for other in one.operands[:2]]
        each = _summed(one, sides[0]) if one.opcode == "dot" else _window(one, sides)
        return 2 * math.prod(_numbers(results)) * each // _dilation(one)

    def counted(self, name: str) -> bool:
        """Return whether the FLOP of instruction ``name`` are known: a library's call does not say them."""
        one = self.instructions.get(name)
        if one is None or one.opcode == "fusion":
            return one is None or all(self.counted(each.name) for inner in one.called for each in self._members[inner])
        return one.opcode in ("dot", "convolution") or kinds.named(one.operation, "jax") not in PRODUCTS

    def _sides(self, name: str) -> list[int]:
        found = _SHAPE.findall(self.instructions[name].shape) if name in self.instructions else []
        return _numbers(found[0][1]) if found else []


def _module(scope: str) -> tuple[str, str]:
    """Return the innermost module that ``scope`` names, and the kind of layer that it is, or that a part of it is."""
    *around, (name, layer) = _SCOPE.findall(scope) or [("", "")]
    return (around[-1][0], layer) if around and layer and not name else (name, layer)


def _numbers(sides: str) -> list[int]:
    return [int(side) for side in sides.split(",") if side]


def _summed(one: Instruction, left: list[int]) -> int:
    axes = re.search(r"lhs_contracting_dims=\{([0-9,]*)\}", one.rest)
    return math.prod(left[axis] for axis in _numbers(axes[1])) if axes and left else 1


def _dilation(one: Instruction) -> int:
    """Return how many numbers of a convolution's input there are for each that is no zero put in between."""
    found = re.search(r"lhs_dilate=([0-9x]+)", one.rest)
    return math.prod(int(size) for size in found[1].split("x")) if found else 1


def _window(one: Instruction, sides: list[list[int]]) -> int:
    labels = re.search(r"dim_labels=\w+_(\w+)->", one.rest)
    if labels is None or len(labels[1]) != len(sides[1]):
        return 1
    each = dict(zip(labels[1], sides[1], strict=True))
    return math.prod(size for label, size in each.items() if label != "o")
