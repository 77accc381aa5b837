"""The benchmarks as public libraries write them in PyTorch, each with the inputs and outputs of the twin.

torchvision is there; transformers and PyTorch Geometric are not part of Duel's environments:

    .venv/pytorch/bin/python -m pip install --target DIR transformers==4.57.1 torch_geometric==2.8.1

and PYTHONPATH=DIR. Dropout and stochastic depth, which the twins have not, are off.
"""

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
    """PyTorch Geometric's layers, with the twin's normalised weights of edges."""

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


class _BasicNet(nn.Module):
    """ResNet-18 for small images of torchvision's blocks: a stem of 3 x 3, without its pooling."""

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
    "gcn": {"torch_geometric": lambda sizes: _GCN(**sizes)},
}
