"""Vision transformer (Dosovitskiy et al. 2020, arXiv:2010.11929): torchvision's own, without dropout."""

# Shapes: N batch; images are (N, channels, height, width).

from torch import nn
from torchvision.models.vision_transformer import VisionTransformer


def build(image: int, patch: int, layers: int, heads: int, width: int, hidden: int, classes: int) -> nn.Module:
    """Return a model that maps images (N, 3, ``image``, ``image``) to logits (N, classes).

    Images are cut into squares of ``patch`` x ``patch`` pixels. Each layer's MLP has ``hidden`` units. The weights are
    meaningless until ``weights.load`` sets them.
    """
    if image % patch:
        raise ValueError(f"vit_b16: an image of {image} pixels is no multiple of a patch of {patch}")
    return VisionTransformer(image, patch, layers, heads, width, hidden, num_classes=classes)
