"""Vision transformer (Dosovitskiy et al. 2020, arXiv:2010.11929): torchvision's own, without dropout."""

from torch import nn
from torchvision.models.vision_transformer import VisionTransformer


def build(image: int, patch: int, layers: int, heads: int, width: int, hidden: int, classes: int) -> nn.Module:
    """Maps images (N, 3, ``image``, ``image``), cut into squares of ``patch`` pixels, to logits (N, classes).

    ``hidden`` units are inside each layer's MLP. Its weights mean nothing until ``weights.load`` has set them.
    """
    if image % patch:
        raise ValueError(f"vit_b16: an image of {image} pixels is no multiple of a patch of {patch}")
    return VisionTransformer(image, patch, layers, heads, width, hidden, num_classes=classes)
