"""Public implementations of the image models in JAX, each built from the folder with the checkouts (``twins.py``)."""

import importlib
import importlib.util
import sys
import types
from collections.abc import Callable
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
