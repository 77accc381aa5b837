"""A benchmark's network on one device, with its weights and batches: what is trained, proved and evaluated."""

import contextlib
import functools
import importlib
import itertools
import math
import re
import time
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.extend.core
import jax.flatten_util
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from flax import nnx
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import devices
import weights
from duel.catalogue import Benchmark
from duel.measure.batches import Batch, Pool
from duel.measure.device import Setting
from models import _layers

AXIS = "batch"  # the mesh axis over all devices
ALL, PARTS = P(), P(AXIS)  # replicated on each device, and split along the first axis
COMPUTE = {"bf16": jnp.bfloat16, "fp16": jnp.float16}
STAGES = ("trace_seconds", "lower_seconds", "backend_seconds")


def build(benchmark: Benchmark, size: str, per_sample: bool = False) -> nnx.Module:
    """Return the model, without meaningful weights; ``per_sample`` has group norms in place of batch norms."""
    model = importlib.import_module(f"models.{benchmark.name}").build(**benchmark.sizes[size].model)
    for _, module in list(nnx.iter_modules(model)) if per_sample else ():
        for name, child in list(vars(module).items()):
            if isinstance(child, _layers.BatchNorm):
                setattr(module, name, _layers.GroupNorm.instead_of(child))
    return model


def count_flops(benchmark: Benchmark, size: str, inputs: tuple[npt.NDArray[Any], ...]) -> int:
    """Return the FLOPs of the forward pass in evaluation: two per multiply-add of matrix products and convolutions.

    Nothing is computed: it walks the traced program, so only the shapes of ``inputs`` matter.
    """
    graph, state = nnx.split(build(benchmark, size))

    def forward(state: Any, inputs: Any) -> jax.Array:
        with _layers.attention_by("xla"):
            return nnx.merge(graph, state)(*inputs, train=False)

    images_last = tuple(array.transpose(0, 2, 3, 1) if array.ndim == 4 else array for array in inputs)
    return _flops_in(jax.make_jaxpr(forward)(state, images_last).jaxpr)


def _flops_in(program: Any) -> int:
    total = 0
    for equation in program.eqns:
        if equation.primitive.name == "dot_general":
            (summed, _), _ = equation.params["dimension_numbers"]
            products = math.prod(equation.invars[0].aval.shape[axis] for axis in summed)
            total += 2 * equation.outvars[0].aval.size * products
        elif equation.primitive.name == "conv_general_dilated":
            kernel = equation.invars[1].aval
            channels = kernel.shape[equation.params["dimension_numbers"].rhs_spec[0]]
            total += 2 * equation.outvars[0].aval.size * kernel.size // channels
        inner = sum(_flops_in(part) for part in jax.extend.core.jaxprs_in_params(equation.params))
        total += inner * (equation.params["length"] if equation.primitive.name == "scan" else 1)
    return total


class Network:
    """A model with its weights and the batches of ``pool``, on the device from the start.

    ``arrays`` are the weights. In a world of several processes, each has all weights and its part of every batch.
    """

    execution = "jit"
    _per_sample = False
    _inputs_at = 2  # index of the compiled program's argument that holds the inputs

    def __init__(self, setting: Setting, pool: Pool, arrays: Mapping[str, npt.NDArray[Any]]) -> None:
        devices.set_precision(setting.precision)
        self._setting = setting
        self._device = devices.native(setting.device)
        ranks = setting.world.size
        self._mesh = None
        if ranks > 1:
            self._mesh = Mesh(np.array(devices._of_ranks()), (AXIS,), axis_types=(AxisType.Explicit,))
        self._dtype = jnp.float64 if setting.precision == "float64" else jnp.float32
        self._compute = COMPUTE.get(setting.precision)
        self._model = build(setting.benchmark, setting.size, self._per_sample)
        self._program: Any = None
        self._seconds: dict[str, float] = {}
        self.load(arrays)
        self._batches: list[tuple[Any, ...]] = [self._put_batch(batch) for batch in pool.batches]

    def load(self, arrays: Mapping[str, npt.NDArray[Any]]) -> None:
        """Start over from ``arrays``; what is compiled stays."""
        self._state: tuple[Any, ...] = ()  # frees its memory before the new state takes any
        weights.load(self._model, arrays)
        # Plain dictionaries of arrays from here on: nnx objects would be walked in Python at every step.
        self._graph, *states = nnx.split(self._model, nnx.Param, nnx.BatchStat)
        self._state = tuple(self._put(nnx.to_pure_dict(state)) for state in states)

    def compile(self) -> float | None:
        """Compile what ``step`` runs ahead of time; return the total seconds of trace, lower and compile."""
        times = [time.perf_counter()]
        for stage in (lambda _: self._trace(), lambda traced: traced.lower(), self._compiled):
            self._program = stage(self._program)
            times.append(time.perf_counter())
        self._seconds = dict(zip(STAGES, (b - a for a, b in itertools.pairwise(times)), strict=True))
        return times[-1] - times[0]

    def _trace(self) -> Any:
        """Return ``step`` traced for the batches; each kind of work defines this."""
        raise NotImplementedError  # abstract

    def compile_times(self) -> dict[str, float]:
        """Return the seconds of each of ``STAGES`` in the last compilation, those that are known."""
        return self._seconds

    def forget(self) -> None:
        """Drop what is compiled but not what is cached in files, as if the process were restarted."""
        jax.clear_caches()
        self._program = None

    def planned_bytes(self) -> int | None:
        """Return the bytes the compiled step plans to use at once: arguments, results and temporaries."""
        plan = self._program.memory_analysis()
        sizes = (plan.argument_size_in_bytes, plan.output_size_in_bytes, plan.temp_size_in_bytes)
        return int(sum(sizes) - plan.alias_size_in_bytes)

    def observed(self) -> dict[str, tuple[str, str]]:
        """Return, by switch, the value found in what was compiled, and the evidence."""
        text = self._program.as_text()
        shared = self._program.memory_analysis().alias_size_in_bytes
        found = {"donation": ("on" if shared else "off", f"{shared} bytes are shared")}
        # Not by kind of operation: per-sample gradients turn all other convolutions into grouped ones, too.
        for switch, ways in _layers.WAYS.items():
            if switch in self._setting.switches:
                named = {value: text.count(name) for value, name in ways.items()}
                value = next((value for value, count in named.items() if count), _layers.BY_XLA[switch])
                said = ", ".join(f"{count} operations called {ways[value]}" for value, count in named.items())
                found[switch] = value, said
        if not self._setting.on("triton_gemm"):
            # Matrix products only: XLA also writes softmax and the like in Triton.
            products = sorted(set(re.findall(r"__triton\w*gemm\w*", text)))
            found["triton_gemm"] = ("on" if products else "off", ", ".join(products) or "no '__triton_gemm'")
        return found

    def _compiled(self, lowered: Any) -> Any:
        """Return ``lowered`` compiled with the options that the switches ask for."""
        return lowered.compile(compiler_options=self._options())

    def _options(self) -> dict[str, Any] | None:
        """Return the options of XLA that the switches ask for, None for its defaults."""
        options: dict[str, Any] = {}  # only those that differ from XLA's defaults
        if self._device.platform == "gpu":
            options |= {"xla_gpu_enable_command_buffer": ""} if not self._setting.on("command_buffers") else {}
            options |= {"xla_gpu_enable_triton_gemm": False} if not self._setting.on("triton_gemm") else {}
            options |= {"xla_gpu_enable_latency_hiding_scheduler": True} if self._setting.on("latency_hiding") else {}
            options |= {"xla_gpu_deterministic_ops": True} if self._setting.on("deterministic") else {}
            options |= {"xla_gpu_autotune_level": int(self._setting.value("autotune"))}
        return options or None

    def synchronize(self, handle: Any) -> None:
        """Wait until everything dispatched up to ``handle`` is done."""
        jax.tree.leaves(handle)[0].block_until_ready()  # all results of one program become ready together

    def read(self, handle: Any) -> None:
        """Copy a result of ``handle``'s step to the host, which it cannot reach before the step has ended."""
        array = jax.tree.leaves(handle)[0].addressable_data(0)
        np.asarray(array[(0,) * array.ndim])  # one number: the copy of a large result would count as the step's time

    def samples(self) -> int:
        """Return the samples a step takes, over all devices, by the shapes the program was compiled for."""
        arguments, _ = self._program.args_info
        return int(arguments[self._inputs_at][0].shape[0])

    def accuracy(self, batch: Batch) -> float:
        """Return the share of ``batch``, labels (N,), that the model classifies correctly with running statistics."""
        parameters, statistics, *_ = self._state
        correct = 0
        for chunk in batch.chunks():
            inputs, labels = self._put_batch(chunk, ALL)
            logits = self._evaluate(parameters, statistics, inputs)
            correct += int((logits.argmax(1) == labels).sum())
        return correct / len(batch.labels)

    def export(self) -> dict[str, npt.NDArray[Any]]:
        """Return the current weights, as ``weights.export`` names them."""
        parameters, statistics, *_ = self._state
        return weights.export(nnx.merge(self._graph, parameters, statistics))

    def held(self) -> Iterator[Batch]:
        """Yield the batches as they are on the device, in the order in which they are taken."""
        for inputs, labels, *_ in self._batches:
            arrays = [np.array(array) for array in inputs]
            arrays = [array.transpose(0, 3, 1, 2) if array.ndim == 4 else array for array in arrays]
            yield Batch(tuple(arrays), np.array(labels))

    def layers(self, index: int) -> dict[str, npt.NDArray[Any]]:
        """Return each module's output for batch ``index`` in evaluation, by module name, in the order of the calls.

        The whole model's name is empty, its output the logits. Images are (N, channels, height, width).
        """
        parameters, statistics, *_ = self._state
        values = self._record(parameters, statistics, self._batches[index % len(self._batches)][0])
        arrays = [np.array(value) for value in values]
        return {
            name: array.transpose(0, 3, 1, 2) if array.ndim == 4 else array
            for name, array in zip(self._recorded, arrays, strict=True)
        }

    def _forward(self, parameters: Any, statistics: Any, inputs: Any, train: bool) -> tuple[jax.Array, Any]:
        """Return (logits in full precision, running statistics after the pass)."""
        model = nnx.merge(self._graph, parameters, statistics)
        with _layers.batch_over(AXIS if self._mesh and train else None):
            logits = self.applied(functools.partial(model, train=train), inputs)
        return logits, nnx.to_pure_dict(nnx.state(model, nnx.BatchStat))

    def applied(self, model: Any, inputs: tuple[Any, ...]) -> jax.Array:
        """Return ``model(*inputs)`` under the policy and the switches, in full precision; to be traced.

        Everything measured goes through here, and so does the canary.
        """
        kernel = _layers.KERNELS.get(self._setting.value("attention"))
        ways = self._setting.value("depthwise"), self._setting.value("convolution")
        with _layers.autocast(self._compute), _layers.attention_by(kernel), _layers.convolved_by(*ways):
            return model(*inputs).astype(self._dtype)

    @functools.cached_property
    def _evaluate(self) -> Any:
        """The compiled forward pass: the logits with running statistics."""

        def forward(parameters: Any, statistics: Any, inputs: Any) -> jax.Array:
            logits: jax.Array = self._forward(parameters, statistics, inputs, False)[0]
            return logits

        return jax.jit(forward, compiler_options=self._options())

    @functools.cached_property
    def _record(self) -> Any:
        """The compiled function for ``layers``: values in the order of the names that it leaves in ``_recorded``."""

        def forward(parameters: Any, statistics: Any, inputs: Any) -> list[jax.Array]:
            model = nnx.merge(self._graph, parameters, statistics)
            with _recording(model) as recorded, _layers.autocast(self._compute):
                model(*inputs, train=False)
            self._recorded = list(recorded)
            return [value.astype(self._dtype) for value in recorded.values()]

        return jax.jit(forward)

    def agree(self, value: float) -> float:
        """Return rank 0's ``value``, for decisions that must be alike in all processes."""
        if self._mesh is None:
            return value
        return float(multihost_utils.broadcast_one_to_all(np.float32(value)))

    def _over_devices(self, program: Any, arguments: Any, results: Any) -> Any:
        """Return ``program`` run by each device on its part, split by the specs ``arguments`` and ``results``."""
        if self._mesh is None:
            return program
        # check_vma would turn each device's gradients into those of all, with one all-reduce per parameter
        return jax.shard_map(program, mesh=self._mesh, in_specs=arguments, out_specs=results, check_vma=False)

    def _sum(self, tree: Any) -> Any:
        """Return the sum of all devices' ``tree``, inside ``_over_devices``."""
        if self._mesh is None:
            return tree
        if self._device.platform != "cpu":  # XLA combines the arrays there
            return jax.lax.psum(tree, AXIS)
        vector, tree_of = jax.flatten_util.ravel_pytree(tree)
        return tree_of(jax.lax.psum(vector, AXIS))

    @functools.cached_property
    def _all_reduce(self) -> Any:
        return jax.jit(self._over_devices(self._sum, (ALL,), ALL))

    @functools.cached_property
    def _like_gradients(self) -> Any:
        return self._put(np.zeros(sum(array.size for array in jax.tree.leaves(self._state[0])), self._dtype))

    def all_reduce(self) -> Any:
        """Dispatch one all-reduce of as many bytes as the gradients have, and nothing else."""
        return self._all_reduce(self._like_gradients)

    def placed(self, arrays: tuple[npt.NDArray[Any], ...]) -> tuple[Any, ...]:
        """Return ``arrays`` on the device, floats in the policy's storage type."""
        return tuple(jax.device_put(array, self._device) for array in arrays)

    def _put(self, tree: Any, spec: P = ALL) -> Any:
        """Put ``tree`` on the device, floats in the policy's storage type; on several devices, split by ``spec``."""

        def copy(array: Any) -> jax.Array:
            whole = np.issubdtype(array.dtype, np.integer)
            array = np.asarray(array, None if whole else self._dtype)
            if self._mesh is not None:
                sharding = NamedSharding(self._mesh, spec)
                return jax.make_array_from_callback(array.shape, sharding, lambda part: array[part].copy())
            if self._device.platform == "cpu":  # it may take numpy's own memory, whatever ``may_alias`` says
                array = np.array(array, order="C")
            return jax.device_put(array, self._device)

        return jax.tree.map(copy, tree)

    def _put_batch(self, batch: Batch, spec: P = PARTS) -> tuple[tuple[jax.Array, ...], jax.Array]:
        # images as NHWC, the layout of the models
        inputs = tuple(array.transpose(0, 2, 3, 1) if array.ndim == 4 else array for array in batch.inputs)
        return self._put(inputs, spec), self._put(batch.labels, spec)


@contextlib.contextmanager
def _recording(model: nnx.Module) -> Iterator[dict[str, jax.Array]]:
    """Record what each module of ``model`` returns when called, by its name; children come before their parent."""
    modules = list(nnx.iter_modules(model))
    names = {id(module): ".".join(str(part) for part in path) for path, module in modules}
    recorded: dict[str, jax.Array] = {}
    kinds: set[Any] = {type(module) for _, module in modules}  # Any: their methods are replaced
    calls = {kind: vars(kind)["__call__"] for kind in kinds if "__call__" in vars(kind)}

    def recorder(call: Any) -> Any:
        def recorded_call(module: nnx.Module, *arguments: Any, **options: Any) -> Any:
            result = call(module, *arguments, **options)
            recorded[names[id(module)]] = result
            return result

        return recorded_call

    try:
        for kind, call in calls.items():
            kind.__call__ = recorder(call)
        yield recorded
    finally:
        for kind, call in calls.items():
            kind.__call__ = call
