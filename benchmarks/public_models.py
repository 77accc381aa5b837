"""Public implementations of the image models in JAX, each built from a folder with checkouts of these; none is here.

- bonsai: github.com/jax-ml/bonsai at 36284254 (ResNet-50, ViT-B/16 and EfficientNet-B0; NNX)
- flax: github.com/google/flax at 18f8f311, examples/imagenet (ResNet-50; linen)
- vision_transformer: github.com/google-research/vision_transformer at c6de1e53 (ViT-B/16; linen)
- efficientnet-jax: github.com/rwightman/efficientnet-jax at 06d7ed6c (EfficientNet-B0 and MobileNetV3-Small; linen)

They run without dropout and stochastic depth, which the twins have not, and else as their authors wrote them: bonsai
and flax take the one-pass variance in batch norm, and both vision transformers the tanh approximation of GELU, where
the twins compute what PyTorch does.
"""

import importlib
import importlib.util
import sys
import time
import types
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple


class Public(NamedTuple):
    """A public implementation in JAX: ``apply(parameters, rest, images, train)`` gives (logits, new rest)."""

    parameters: Any
    rest: Any
    apply: Callable[[Any, Any, Any, bool], tuple[Any, Any]]


def _flax_resnet50(folder: Path) -> Public:
    import jax

    module = _file(folder / "flax/examples/imagenet/models.py")
    public = _linen(module.ResNet50(num_classes=1000), "train")

    # Its batch norm takes the mean over devices, under a name for their axis: here one that costs nothing.
    def apply(parameters: Any, rest: Any, images: Any, train: bool) -> Any:
        forward = jax.vmap(lambda *x: public.apply(*x, train), None, None, axis_name="batch", axis_size=1)
        return forward(parameters, rest, images)

    return public._replace(apply=apply)


def _bonsai_resnet50(folder: Path) -> Public:
    from flax import nnx

    module = _file(folder / "bonsai/bonsai/models/resnet/modeling.py")
    model = module.ResNet(module.ModelConfig.resnet50(), rngs=nnx.Rngs(0))
    return _nnx(model, lambda model, images, train: model(images))


def _bonsai_vit_b16(folder: Path) -> Public:
    from flax import nnx

    module = _file(folder / "bonsai/bonsai/models/vit/modeling.py")
    model = module.ViTClassificationModel(module.ModelConfig.vit_p16_224(), rngs=nnx.Rngs(0))
    return _nnx(model, lambda model, images, train: model(images, rngs=None))


def _google_vit_b16(folder: Path) -> Public:
    sys.path.append(str(folder / "vision_transformer"))
    module = importlib.import_module("vit_jax.models_vit")
    encoder = {"num_layers": 12, "num_heads": 12, "mlp_dim": 3072, "dropout_rate": 0.0, "attention_dropout_rate": 0.0}
    patches = types.SimpleNamespace(size=(16, 16))
    return _linen(module.VisionTransformer(1000, patches, encoder, 768), "train")


def _bonsai_efficientnet_b0(folder: Path) -> Public:
    from flax import nnx

    module = _file(folder / "bonsai/bonsai/models/efficientnet/modeling.py")
    model = module.EfficientNet(replace(module.ModelConfig.b0(), dropout_rate=0.0), rngs=nnx.Rngs(0))
    return _nnx(model, lambda model, images, train: model(images, training=train))


def _jeffnet(variant: str) -> Callable[[Path], Public]:
    def build(folder: Path) -> Public:
        from flax import linen

        # Flax has removed this module; of it only a function is imported, which dropout would call.
        sys.modules.setdefault("flax.nn", types.SimpleNamespace(make_rng=None))
        sys.path.append(str(folder / "efficientnet-jax"))
        model, _ = importlib.import_module("jeffnet.linen").create_model(variant)
        assert isinstance(model, linen.Module)
        return _linen(model, "training")

    return build


PUBLIC: dict[str, dict[str, Callable[[Path], Public]]] = {
    "resnet50": {"flax": _flax_resnet50, "bonsai": _bonsai_resnet50},
    "vit_b16": {"vision_transformer": _google_vit_b16, "bonsai": _bonsai_vit_b16},
    "mobilenet_v3_small": {"efficientnet-jax": _jeffnet("pt_mobilenetv3_small_100")},
    "efficientnet_b0": {"efficientnet-jax": _jeffnet("pt_efficientnet_b0"), "bonsai": _bonsai_efficientnet_b0},
}


def _file(path: Path) -> types.ModuleType:
    """The module in ``path`` alone, without what its package would import."""
    spec = importlib.util.spec_from_file_location(f"public_{path.parent.name}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look there
    spec.loader.exec_module(module)
    return module


def _linen(model: Any, flag: str) -> Public:
    """``flag`` is what the model calls training."""
    import jax
    import jax.numpy as jnp

    variables = jax.jit(lambda key: model.init(key, jnp.zeros((1, 224, 224, 3)), **{flag: False}))(jax.random.key(0))
    rest = {name: tree for name, tree in variables.items() if name != "params"}

    def apply(parameters: Any, rest: Any, images: Any, train: bool) -> Any:
        changing = list(rest) if train else []
        logits, changed = model.apply({"params": parameters, **rest}, images, **{flag: train}, mutable=changing)
        # MobileNetV3's are (N, 1, 1, classes) in efficientnet-jax
        return logits.reshape(len(images), -1), {**rest, **changed}

    return Public(variables["params"], rest, apply)


def _nnx(model: Any, call: Callable[[Any, Any, bool], Any]) -> Public:
    from flax import nnx

    graph, parameters, rest = nnx.split(model, nnx.Param, ...)

    def apply(parameters: Any, rest: Any, images: Any, train: bool) -> Any:
        model = nnx.merge(graph, parameters, rest)
        model.set_attributes(use_running_average=not train, deterministic=True, raise_if_not_found=False)
        logits = call(model, images, train)
        return logits, nnx.to_pure_dict(nnx.state(model, nnx.Not(nnx.Param)))

    # plain dictionaries, as the twin has them: less work for Python at every step
    return Public(nnx.to_pure_dict(parameters), nnx.to_pure_dict(rest), apply)


def jax_loops(
    benchmark: Any, module: str, pool: Any, parameters: int, folder: Path
) -> Iterator[tuple[str, Callable[[int], float] | str]]:
    """For each of the benchmark's public models its name with a loop of ``module``'s steps on the batches of ``pool``,
    or a sentence saying why it does not run. ``parameters`` are those of the twin, which must be as many."""
    import jax
    import jax.numpy as jnp

    batches = [
        (jnp.asarray(batch.inputs[0]).transpose(0, 2, 3, 1), jnp.asarray(batch.labels)) for batch in pool.batches
    ]
    for name, build in PUBLIC.get(benchmark.name, {}).items():
        try:
            public = build(folder)
            size = sum(leaf.size for leaf in jax.tree.leaves(public.parameters))
            if size != parameters:
                raise ValueError(f"another network: {size} parameters, the twin has {parameters}")
            loop = (
                _trained(public, batches, benchmark.optimizer) if module == "training" else _evaluated(public, batches)
            )
        except Exception as error:  # what another's code raises when it is built or traced is why it cannot run
            yield name, f"does not run: {type(error).__name__}: {error}"
            continue
        yield name, loop


def _evaluated(public: Public, batches: Any) -> Callable[[int], float]:
    import jax

    jitted = jax.jit(lambda parameters, rest, images: public.apply(parameters, rest, images, False)[0])
    forward = jitted.lower(public.parameters, public.rest, batches[0][0]).compile()

    def run(steps: int) -> float:
        start = time.perf_counter()
        for index in range(steps):
            logits = forward(public.parameters, public.rest, batches[index % len(batches)][0])
        logits.block_until_ready()
        return time.perf_counter() - start

    return run


def _trained(public: Public, batches: Any, recipe: Any) -> Callable[[int], float]:
    import jax
    import optax

    import training as twin

    optimizer = twin._optimizer(recipe)

    def update(state: Any, images: Any, labels: Any) -> Any:
        parameters, rest, moments = state

        def mean_loss(parameters: Any) -> Any:
            logits, changed = public.apply(parameters, rest, images, True)
            return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean(), changed

        (loss, changed), gradients = jax.value_and_grad(mean_loss, has_aux=True)(parameters)
        updates, moments = optimizer.update(gradients, moments, parameters)
        return (optax.apply_updates(parameters, updates), changed, moments), loss

    # copies: the first step gives its state away
    state = jax.tree.map(jax.numpy.copy, (public.parameters, public.rest, optimizer.init(public.parameters)))
    step = jax.jit(update, donate_argnums=0).lower(state, *batches[0]).compile()

    def run(steps: int) -> float:
        nonlocal state
        start = time.perf_counter()
        for index in range(steps):
            state, loss = step(state, *batches[index % len(batches)])
        loss.block_until_ready()
        return time.perf_counter() - start

    return run
