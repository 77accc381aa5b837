"""The benchmarks as public libraries write them in JAX, each with the inputs and outputs of the twin.

Flax is installed. transformers (the last version with JAX) and jraph are not part of Duel's environments:

    .venv/jax/bin/python -m pip install --target DIR transformers==4.57.1 jraph==0.0.6.dev0

and set PYTHONPATH=DIR. The others are built from a folder with their checkouts:

- bonsai: github.com/jax-ml/bonsai at 36284254 (ResNet-50, ViT-B/16 and EfficientNet-B0; NNX)
- flax: github.com/google/flax at 18f8f311, examples/imagenet (ResNet-50; linen)
- vision_transformer: github.com/google-research/vision_transformer at c6de1e53 (ViT-B/16; linen)
- efficientnet-jax: github.com/rwightman/efficientnet-jax at 06d7ed6c (EfficientNet-B0 and MobileNetV3-Small; linen)

They run without dropout and stochastic depth, which the twins do not have, and otherwise as their authors wrote them:
bonsai and flax use the one-pass variance in batch norm, both vision transformers the tanh approximation of GELU, and
jraph recomputes gcn's edge weights at every step, where the twins compute what PyTorch does.
"""

import functools
import importlib
import importlib.util
import itertools
import sys
import types
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple


class Public(NamedTuple):
    """A public implementation in JAX: ``apply(parameters, rest, inputs, train)`` gives (logits, new rest)."""

    parameters: Any
    rest: Any
    apply: Callable[[Any, Any, tuple[Any, ...], bool], tuple[Any, Any]]


def _layers_mnist(folder: Path) -> Public:
    from flax import nnx

    rngs = nnx.Rngs(0)
    pool = functools.partial(nnx.max_pool, window_shape=(2, 2), strides=(1, 1))
    model = nnx.Sequential(
        *(nnx.Conv(1, 16, (8, 8), strides=2, padding=3, rngs=rngs), nnx.relu, pool),
        *(nnx.Conv(16, 32, (4, 4), strides=2, padding=0, rngs=rngs), nnx.relu, pool),
        *(lambda x: x.reshape(len(x), -1), nnx.Linear(512, 32, rngs=rngs), nnx.relu, nnx.Linear(32, 10, rngs=rngs)),
    )
    return _nnx(model, lambda model, inputs, train: model(*inputs))


def _layers_cifar10(folder: Path) -> Public:
    from flax import nnx

    layers: list[Callable[[Any], Any]] = []
    for inputs, outputs in itertools.pairwise((3, 32, 32, 64, 64, 128, 128, 256, 10)):
        layers += [nnx.Conv(inputs, outputs, (3, 3), rngs=nnx.Rngs(0)), nnx.relu]
        if len(layers) in (4, 9, 14):
            layers.append(functools.partial(nnx.avg_pool, window_shape=(2, 2), strides=(2, 2)))
    model = nnx.Sequential(*layers[:-1], lambda x: x.mean((1, 2)))
    return _nnx(model, lambda model, inputs, train: model(*inputs))


def _layers_resnet18(folder: Path) -> Public:
    from flax import nnx

    rngs = nnx.Rngs(0)

    def convolution(inputs: int, outputs: int, size: int, stride: int) -> Any:
        norm = nnx.BatchNorm(outputs, momentum=0.9, rngs=rngs)
        return nnx.Sequential(nnx.Conv(inputs, outputs, (size, size), stride, use_bias=False, rngs=rngs), norm)

    class Block(nnx.Module):
        def __init__(self, inputs: int, outputs: int, stride: int) -> None:
            self.first, self.second = convolution(inputs, outputs, 3, stride), convolution(outputs, outputs, 3, 1)
            self.aside = convolution(inputs, outputs, 1, stride) if inputs != outputs else lambda x: x

        def __call__(self, x: Any) -> Any:
            return nnx.relu(self.second(nnx.relu(self.first(x))) + self.aside(x))

    widths = (64, 64, 64, 128, 128, 256, 256, 512, 512)
    blocks = [Block(a, b, 1 if a == b else 2) for a, b in itertools.pairwise(widths)]
    head = (lambda x: x.mean((1, 2)), nnx.Linear(512, 10, rngs=rngs))
    model = nnx.Sequential(convolution(3, 64, 3, 1), nnx.relu, *blocks, *head)
    return _nnx(model, lambda model, inputs, train: model(*inputs))


def _transformers_gpt2(folder: Path) -> Public:
    library = importlib.import_module("transformers")
    config = library.GPT2Config(**dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0), use_cache=False)
    return _transformers(library.FlaxGPT2LMHeadModel(config))


def _transformers_bert(folder: Path) -> Public:
    library = importlib.import_module("transformers")
    config = library.BertConfig(**dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0))
    return _transformers(library.FlaxBertForSequenceClassification(config))


def _transformers(model: Any) -> Public:
    def apply(parameters: Any, rest: Any, ids: Any, train: bool) -> Any:
        return model(*ids, params=parameters, train=False).logits, rest

    return Public(model.params, {}, apply)


def _jraph_gcn(folder: Path) -> Public:
    import jax
    import jax.numpy as jnp
    from flax import nnx

    jraph = importlib.import_module("jraph")
    layers = nnx.List([nnx.Linear(1433, 16, rngs=nnx.Rngs(0)), nnx.Linear(16, 7, rngs=nnx.Rngs(0))])

    def call(layers: Any, inputs: Any, train: bool) -> Any:
        nodes, senders, receivers, _ = inputs
        graph = jraph.GraphsTuple(nodes[0], None, receivers[0], senders[0], None, jnp.array([2708]), None)
        first, second = map(jraph.GraphConvolution, layers)
        graph = first(graph)
        return second(graph._replace(nodes=jax.nn.relu(graph.nodes))).nodes[None]

    return _nnx(layers, call)


def _jraph_graphnet(folder: Path) -> Public:
    """Return jraph's network with AlgoPerf's updates: a linear layer, a layer norm and a ReLU.

    Each graph is followed by one that takes its padding, as in jraph's own batches.
    """
    import jax.numpy as jnp
    from flax import nnx

    jraph, rngs, width = importlib.import_module("jraph"), nnx.Rngs(0), 256

    def update(inputs: int) -> Any:
        return nnx.Sequential(nnx.Linear(inputs, width, rngs=rngs), nnx.LayerNorm(width, rngs=rngs), nnx.relu)

    given = (128, *4 * (width,))
    model = nnx.Dict(
        nodes=nnx.Linear(9, width, rngs=rngs),
        edges=nnx.Linear(3, width, rngs=rngs),
        steps=nnx.List([nnx.List([update(n * width + more) for n in (3, 3, 2)]) for more in given]),
        decoder=nnx.Linear(width, 128, rngs=rngs),
    )

    def call(model: Any, inputs: Any, train: bool) -> Any:
        nodes, edges, senders, receivers, node_mask, edge_mask = inputs
        graphs, offsets = len(nodes), nodes.shape[1] * jnp.arange(len(nodes))[:, None]
        graph = jraph.GraphsTuple(
            nodes=model.nodes(nodes.reshape(-1, 9)),
            edges=model.edges(edges.reshape(-1, 3)),
            senders=(senders + offsets).reshape(-1),
            receivers=(receivers + offsets).reshape(-1),
            globals=jnp.zeros((2 * graphs, 128)),
            n_node=_with_padding(node_mask),
            n_edge=_with_padding(edge_mask),
        )
        for updates in model.steps:
            graph = jraph.GraphNetwork(*(jraph.concatenated_args(update) for update in updates))(graph)
        return model.decoder(graph.globals[::2])

    return _nnx(model, call)


def _with_padding(mask: Any) -> Any:
    """Return (2 * N,): for each graph of ``mask`` (N, size), how much is not padding, and how much is."""
    import jax.numpy as jnp

    real = mask.sum(1).astype(int)
    return jnp.stack((real, mask.shape[1] - real), 1).reshape(-1)


def _flax_resnet50(folder: Path) -> Public:
    import jax

    module = _file(folder / "flax/examples/imagenet/models.py")
    public = _linen(module.ResNet50(num_classes=1000), "train")

    # Its batch norm averages over devices, along a named axis: here one of size 1, which costs nothing.
    def apply(parameters: Any, rest: Any, inputs: Any, train: bool) -> Any:
        forward = jax.vmap(lambda *x: public.apply(*x, train), None, None, axis_name="batch", axis_size=1)
        return forward(parameters, rest, inputs)

    return public._replace(apply=apply)


def _bonsai_resnet50(folder: Path) -> Public:
    from flax import nnx

    module = _file(folder / "bonsai/bonsai/models/resnet/modeling.py")
    model = module.ResNet(module.ModelConfig.resnet50(), rngs=nnx.Rngs(0))
    return _nnx(model, lambda model, inputs, train: model(*inputs))


def _bonsai_vit_b16(folder: Path) -> Public:
    from flax import nnx

    module = _file(folder / "bonsai/bonsai/models/vit/modeling.py")
    model = module.ViTClassificationModel(module.ModelConfig.vit_p16_224(), rngs=nnx.Rngs(0))
    return _nnx(model, lambda model, inputs, train: model(*inputs, rngs=None))


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
    return _nnx(model, lambda model, inputs, train: model(*inputs, training=train))


def _jeffnet(variant: str) -> Callable[[Path], Public]:
    def build(folder: Path) -> Public:
        from flax import linen

        # Flax has removed this module; only a function is imported from it, which dropout would call.
        sys.modules.setdefault("flax.nn", types.SimpleNamespace(make_rng=None))
        sys.path.append(str(folder / "efficientnet-jax"))
        model, _ = importlib.import_module("jeffnet.linen").create_model(variant)
        assert isinstance(model, linen.Module)
        return _linen(model, "training")

    return build


PEERS: dict[str, dict[str, Callable[[Path], Public]]] = {
    "mnist": {"flax's layers": _layers_mnist},
    "cifar10": {"flax's layers": _layers_cifar10},
    "cifar10_resnet18": {"flax's layers": _layers_resnet18},
    "gpt2": {"transformers": _transformers_gpt2},
    "bert": {"transformers": _transformers_bert},
    "gcn": {"jraph": _jraph_gcn},
    "graphnet": {"jraph": _jraph_graphnet},
    "resnet50": {"flax": _flax_resnet50, "bonsai": _bonsai_resnet50},
    "vit_b16": {"vision_transformer": _google_vit_b16, "bonsai": _bonsai_vit_b16},
    "mobilenet_v3_small": {"efficientnet-jax": _jeffnet("pt_mobilenetv3_small_100")},
    "efficientnet_b0": {"efficientnet-jax": _jeffnet("pt_efficientnet_b0"), "bonsai": _bonsai_efficientnet_b0},
}


def _file(path: Path) -> types.ModuleType:
    """Return the module in ``path`` alone, without what its package would import."""
    spec = importlib.util.spec_from_file_location(f"public_{path.parent.name}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look there
    spec.loader.exec_module(module)
    return module


def _linen(model: Any, flag: str) -> Public:
    """Return ``model`` as ``Public``; ``flag`` is its argument for training."""
    import jax
    import jax.numpy as jnp

    variables = jax.jit(lambda key: model.init(key, jnp.zeros((1, 224, 224, 3)), **{flag: False}))(jax.random.key(0))
    rest = {name: tree for name, tree in variables.items() if name != "params"}

    def apply(parameters: Any, rest: Any, inputs: Any, train: bool) -> Any:
        changing = list(rest) if train else []
        logits, changed = model.apply({"params": parameters, **rest}, *inputs, **{flag: train}, mutable=changing)
        # MobileNetV3's are (N, 1, 1, classes) in efficientnet-jax
        return logits.reshape(len(logits), -1), {**rest, **changed}

    return Public(variables["params"], rest, apply)


def _nnx(model: Any, call: Callable[[Any, Any, bool], Any]) -> Public:
    from flax import nnx

    graph, parameters, rest = nnx.split(model, nnx.Param, ...)

    def apply(parameters: Any, rest: Any, inputs: Any, train: bool) -> Any:
        model = nnx.merge(graph, parameters, rest)
        model.set_attributes(use_running_average=not train, deterministic=True, raise_if_not_found=False)
        logits = call(model, inputs, train)
        return logits, nnx.to_pure_dict(nnx.state(model, nnx.Not(nnx.Param)))

    # plain dictionaries, as in the twin: less work for Python at every step
    return Public(nnx.to_pure_dict(parameters), nnx.to_pure_dict(rest), apply)


def inference(benchmark: Any, public: Public, batches: Any) -> Callable[[Any, Any], Any]:
    """Return a compiled step of ``public`` over inputs and labels: the logits."""
    import jax

    jitted = jax.jit(lambda parameters, rest, inputs: public.apply(parameters, rest, inputs, False)[0])
    forward = jitted.lower(public.parameters, public.rest, batches[0][0]).compile()
    return lambda inputs, labels: forward(public.parameters, public.rest, inputs)


def training(benchmark: Any, public: Public, batches: Any) -> Callable[[Any, Any], Any]:
    """Return a compiled step of ``public`` over inputs and labels, with the twin's loss and optimizer: the loss."""
    import jax
    import optax

    twin: Any = importlib.import_module("training")
    optimizer, loss_of = twin._optimizer(benchmark.optimizer), twin.LOSSES[benchmark.loss]

    def update(state: Any, inputs: Any, labels: Any) -> Any:
        parameters, rest, moments = state

        def mean_loss(parameters: Any) -> Any:
            logits, changed = public.apply(parameters, rest, inputs, True)
            return loss_of(logits, labels), changed

        (loss, changed), gradients = jax.value_and_grad(mean_loss, has_aux=True)(parameters)
        updates, moments = optimizer.update(gradients, moments, parameters)
        return (optax.apply_updates(parameters, updates), changed, moments), loss

    # copies: the first step donates its state
    state = jax.tree.map(jax.numpy.copy, (public.parameters, public.rest, optimizer.init(public.parameters)))
    compiled = jax.jit(update, donate_argnums=0).lower(state, *batches[0]).compile()

    def step(inputs: Any, labels: Any) -> Any:
        nonlocal state
        state, loss = compiled(state, inputs, labels)
        return loss

    return step
