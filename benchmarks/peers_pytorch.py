"""The benchmarks as public libraries write them in PyTorch, each with the inputs and outputs of the twin.

torchvision is installed; transformers and PyTorch Geometric are not part of Duel's environments:

    .venv/pytorch/bin/python -m pip install --target DIR transformers==4.57.1 torch_geometric==2.8.1

and set PYTHONPATH=DIR. Dropout and stochastic depth, which the twins do not have, are off.
"""

import functools
import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import nn


class _Called(nn.Module):
    """``model``, called as the twin is: ``call(model, *inputs)`` gives logits."""

    def __init__(self, model: nn.Module, call: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.model, self.call = model, call

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        return self.call(self.model, *inputs)


def _torchvision(name: str, **options: Any) -> Callable[[dict[str, Any]], nn.Module]:
    def build(sizes: dict[str, Any]) -> nn.Module:
        model: nn.Module = getattr(importlib.import_module("torchvision.models"), name)(weights=None, **options)
        return model

    return build


def _gpt2(sizes: dict[str, Any]) -> nn.Module:
    library = importlib.import_module("transformers")
    config = library.GPT2Config(
        vocab_size=sizes["vocabulary"],
        n_positions=sizes["length"],
        n_embd=sizes["width"],
        n_layer=sizes["layers"],
        n_head=sizes["heads"],
        **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
        use_cache=False,
    )
    return _Called(library.GPT2LMHeadModel(config), lambda model, ids: model(ids).logits)


def _bert(sizes: dict[str, Any]) -> nn.Module:
    library = importlib.import_module("transformers")
    config = library.BertConfig(
        vocab_size=sizes["vocabulary"],
        hidden_size=sizes["width"],
        num_hidden_layers=sizes["layers"],
        num_attention_heads=sizes["heads"],
        intermediate_size=sizes["hidden"],
        max_position_embeddings=sizes["length"],
        num_labels=sizes["classes"],
        **dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0),
    )
    return _Called(library.BertForSequenceClassification(config), lambda model, ids: model(ids).logits)


def _vit(sizes: dict[str, Any]) -> nn.Module:
    library = importlib.import_module("transformers")
    config = library.ViTConfig(
        hidden_size=sizes["width"],
        num_hidden_layers=sizes["layers"],
        num_attention_heads=sizes["heads"],
        intermediate_size=sizes["hidden"],
        image_size=sizes["image"],
        patch_size=sizes["patch"],
        num_labels=sizes["classes"],
        **dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0),
    )
    return _Called(library.ViTForImageClassification(config), lambda model, images: model(images).logits)


class _GCN(nn.Module):
    """PyTorch Geometric's layers, with the twin's normalised edge weights."""

    def __init__(self, features: int, hidden: int, classes: int) -> None:
        super().__init__()
        layer = importlib.import_module("torch_geometric.nn").GCNConv
        self.conv1 = layer(features, hidden, normalize=False)
        self.conv2 = layer(hidden, classes, normalize=False)

    def forward(
        self, nodes: torch.Tensor, senders: torch.Tensor, receivers: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        (x,), edges = nodes, torch.stack((senders[0], receivers[0]))  # one graph
        x = torch.relu(self.conv1(x, edges, weights[0]))
        return self.conv2(x, edges, weights[0])[None]


class _Update(nn.Module):
    """A linear layer, a layer norm and a ReLU, for a part of PyTorch Geometric's MetaLayer: ``gather`` picks its inputs
    from all that the layer passes."""

    def __init__(self, inputs: int, width: int, gather: Callable[..., tuple[torch.Tensor, ...]]) -> None:
        super().__init__()
        self.linear, self.norm, self.gather = nn.Linear(inputs, width), nn.LayerNorm(width, 1e-6), gather

    def forward(self, *given: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.norm(self.linear(torch.cat(self.gather(*given), -1))))


class _GraphNetwork(nn.Module):
    """PyTorch Geometric's MetaLayer with its scatter. Each graph is followed by one that takes its padding."""

    def __init__(self, steps: int, width: int, node_features: int, edge_features: int, tasks: int) -> None:
        super().__init__()
        layer = importlib.import_module("torch_geometric.nn").MetaLayer
        add = functools.partial(importlib.import_module("torch_geometric.utils").scatter, reduce="sum")
        self.node_embedding, self.edge_embedding = nn.Linear(node_features, width), nn.Linear(edge_features, width)
        self.steps, self.decoder, self.tasks = nn.ModuleList(), nn.Linear(width, tasks), tasks

        def edges(source: Any, target: Any, edges: Any, u: Any, batch: Any) -> tuple[torch.Tensor, ...]:
            return edges, source, target, u[batch]

        def nodes(x: Any, ends: Any, edges: Any, u: Any, batch: Any) -> tuple[torch.Tensor, ...]:
            return x, *(add(edges, end, dim_size=len(x)) for end in ends), u[batch]

        def graphs(x: Any, ends: Any, edges: Any, u: Any, batch: Any) -> tuple[torch.Tensor, ...]:
            return add(x, batch, dim_size=len(u)), add(edges, batch[ends[0]], dim_size=len(u)), u

        for more in [tasks] + [width] * (steps - 1):
            parts = ((3, edges), (3, nodes), (2, graphs))
            self.steps.append(layer(*(_Update(count * width + more, width, gather) for count, gather in parts)))

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        nodes, edges, senders, receivers, node_mask, _ = inputs
        graphs, size = node_mask.shape
        first = torch.arange(graphs, device=nodes.device)[:, None]
        ends = torch.stack([(end + size * first).flatten() for end in (senders, receivers)])
        batch = (2 * first + (node_mask == 0)).flatten()
        x, edges = self.node_embedding(nodes.flatten(0, 1)), self.edge_embedding(edges.flatten(0, 1))
        u = x.new_zeros(2 * graphs, self.tasks)
        for step in self.steps:
            x, edges, u = step(x, ends, edges, u, batch)
        logits: torch.Tensor = self.decoder(u[::2])
        return logits


class _BasicNet(nn.Module):
    """ResNet-18 for small images, from torchvision's blocks: a 3 x 3 stem, without its pooling."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        models = importlib.import_module("torchvision.models")
        self.net = models.resnet18(weights=None, num_classes=classes)
        self.net.conv1 = nn.Conv2d(3, 64, 3, padding=1, bias=False)
        self.net.maxpool = nn.Identity()

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.net(images)
        return logits


PEERS: dict[str, dict[str, Callable[[dict[str, Any]], nn.Module]]] = {
    "resnet50": {"torchvision": _torchvision("resnet50")},
    "vit_b16": {"torchvision": _torchvision("vit_b_16"), "transformers": _vit},
    "mobilenet_v3_small": {"torchvision": _torchvision("mobilenet_v3_small", dropout=0.0)},
    "efficientnet_b0": {"torchvision": _torchvision("efficientnet_b0", dropout=0.0, stochastic_depth_prob=0.0)},
    "cifar10_resnet18": {"torchvision": lambda sizes: _BasicNet(10)},
    "gpt2": {"transformers": _gpt2},
    "bert": {"transformers": _bert},
    "graphnet": {"torch_geometric": lambda sizes: _GraphNetwork(**sizes)},
    "gcn": {"torch_geometric": lambda sizes: _GCN(**sizes)},
}
