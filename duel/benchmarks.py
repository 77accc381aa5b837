"""The benchmarks. Each is one entry here and one file ``models/<name>.py`` in each of ``jax/`` and ``pytorch/``."""

from collections.abc import Mapping
from types import MappingProxyType

from duel.entry import SGD, AdamW, Benchmark, Citations, Images, Molecules, Size, Tokens


def _batch(cpu: int, accelerator: int, mps: int) -> Mapping[str, int]:
    """Return the samples per device and step for each device kind."""
    return MappingProxyType({"cpu": cpu, "gpu": accelerator, "tpu": accelerator, "mps": mps})


def _everywhere(samples: int) -> Mapping[str, int]:
    return _batch(samples, samples, samples)


# torchvision's table: input channels, kernel, expanded channels, output channels, squeeze-and-excitation, activation
# (RE: ReLU, HS: hard swish), stride.
_MOBILENET_V3_SMALL = (
    (16, 3, 16, 16, True, "RE", 2),
    (16, 3, 72, 24, False, "RE", 2),
    (24, 3, 88, 24, False, "RE", 1),
    (24, 5, 96, 40, True, "HS", 2),
    (40, 5, 240, 40, True, "HS", 1),
    (40, 5, 240, 40, True, "HS", 1),
    (40, 5, 120, 48, True, "HS", 1),
    (48, 5, 144, 48, True, "HS", 1),
    (48, 5, 288, 96, True, "HS", 2),
    (96, 5, 576, 96, True, "HS", 1),
    (96, 5, 576, 96, True, "HS", 1),
)
# expansion, kernel, stride, input channels, output channels, blocks
_EFFICIENTNET_B0 = (
    (1, 3, 1, 32, 16, 1),
    (6, 3, 2, 16, 24, 2),
    (6, 5, 2, 24, 40, 2),
    (6, 3, 2, 40, 80, 3),
    (6, 5, 1, 80, 112, 3),
    (6, 5, 2, 112, 192, 4),
    (6, 3, 1, 192, 320, 1),
)
# 0.15 without momentum in the code of Subramani et al.; with a momentum of 0.9 a gradient counts ten times.
_FAST_DPSGD = SGD(learning_rate=0.015, batch_size=100, source="github.com/TheSalon/fast-dpsgd: 0.15")

BENCHMARKS: Mapping[str, Benchmark] = MappingProxyType(
    {
        b.name: b
        for b in (
            Benchmark(
                name="resnet50",
                title="ResNet-50 (v1.5), ImageNet shapes",
                source="He et al. 2015, arXiv:1512.03385; stride in the 3x3 convolution as in torchvision",
                sizes={
                    "full": Size(
                        model={"layers": (3, 4, 6, 3), "width_per_group": 64, "classes": 1000},
                        inputs=Images(3, 224, 224, classes=1000),
                        batch_size=_batch(2, 128, 32),
                        flops=8_178_368_512,
                    ),
                    "tiny": Size(
                        model={"layers": (1, 1, 1, 1), "width_per_group": 8, "classes": 10},
                        # 64 pixels leave 2x2 for the last norms: on one pixel, a norm of two channels gives only signs
                        inputs=Images(3, 64, 64, classes=10),
                        batch_size=_everywhere(8),
                        flops=89_956_352,
                    ),
                },
                # A tenth of Goyal's: without their warm-up and their initial weights, 0.1 raises the losses.
                optimizer=SGD(learning_rate=0.01, batch_size=256, source="Goyal et al. 2017, section 5.1: 0.1"),
                torchvision="resnet50",
            ),
            Benchmark(
                name="vit_b16",
                title="ViT-Base/16, ImageNet shapes",
                source="Dosovitskiy et al. 2020, arXiv:2010.11929; as torchvision's vit_b_16",
                sizes={
                    "full": Size(
                        model={
                            "image": 224,
                            "patch": 16,
                            "layers": 12,
                            "heads": 12,
                            "width": 768,
                            "hidden": 3072,
                            "classes": 1000,
                        },
                        inputs=Images(3, 224, 224, classes=1000),
                        batch_size=_batch(2, 128, 32),
                        flops=35_127_656_448,
                    ),
                    "tiny": Size(
                        model={
                            "image": 32,
                            "patch": 8,
                            "layers": 2,
                            "heads": 2,
                            "width": 32,
                            "hidden": 64,
                            "classes": 10,
                        },
                        inputs=Images(3, 32, 32, classes=10),
                        batch_size=_everywhere(8),
                        flops=828_288,
                    ),
                },
                attention=True,
                odd_tokens=True,
                optimizer=AdamW(learning_rate=0.003, batch_size=4096, source="Dosovitskiy et al. 2020, table 3"),
                torchvision="vit_b_16",
            ),
            Benchmark(
                name="mobilenet_v3_small",
                title="MobileNetV3-Small, ImageNet shapes",
                source="Howard et al. 2019, arXiv:1905.02244; as torchvision's mobilenet_v3_small",
                sizes={
                    "full": Size(
                        model={"blocks": _MOBILENET_V3_SMALL, "last": 1024, "classes": 1000},
                        inputs=Images(3, 224, 224, classes=1000),
                        batch_size=_batch(8, 128, 64),
                        flops=113_020_800,
                    ),
                    "tiny": Size(
                        model={
                            "blocks": ((16, 3, 16, 16, False, "RE", 2), (16, 5, 48, 16, True, "HS", 1)),
                            "last": 32,
                            "classes": 10,
                        },
                        inputs=Images(3, 32, 32, classes=10),
                        batch_size=_everywhere(8),
                        flops=829_056,
                    ),
                },
                # The paper trains with RMSProp.
                optimizer=SGD(learning_rate=0.045, batch_size=256, source="torchvision's references, MobileNetV2"),
                depthwise=True,
                torchvision="mobilenet_v3_small",
            ),
            Benchmark(
                name="efficientnet_b0",
                title="EfficientNet-B0, ImageNet shapes",
                source="Tan and Le 2019, arXiv:1905.11946; as torchvision's efficientnet_b0",
                sizes={
                    "full": Size(
                        model={"blocks": _EFFICIENTNET_B0, "classes": 1000},
                        inputs=Images(3, 224, 224, classes=1000),
                        batch_size=_batch(4, 128, 32),
                        flops=771_629_504,
                    ),
                    "tiny": Size(
                        model={"blocks": ((1, 3, 2, 32, 16, 1), (6, 5, 1, 16, 16, 1)), "classes": 10},
                        inputs=Images(3, 32, 32, classes=10),
                        batch_size=_everywhere(8),
                        flops=1_380_096,
                    ),
                },
                # The paper trains with RMSProp.
                optimizer=SGD(learning_rate=0.4, batch_size=256, source="pycls, EN-B0_dds_8gpu.yaml"),
                depthwise=True,
                torchvision="efficientnet_b0",
            ),
            Benchmark(
                name="mnist",
                title="The small CNN of the per-sample-gradient literature, handwritten digits",
                source="Subramani et al. 2021, arXiv:2010.09063 (layer sizes); LeCun et al. 1998 (data)",
                dataset="mnist",
                sizes={
                    "full": Size(
                        model={"channels": (16, 32), "hidden": 32, "classes": 10},
                        inputs=Images(1, 28, 28, classes=10),
                        batch_size=_batch(64, 256, 256),
                        flops=844_416,
                    ),
                    "tiny": Size(
                        model={"channels": (4, 8), "hidden": 16, "classes": 10},
                        inputs=Images(1, 28, 28, classes=10),
                        batch_size=_everywhere(16),
                        flops=130_368,
                    ),
                },
                optimizer=_FAST_DPSGD,
                curve_steps=400,
            ),
            Benchmark(
                name="cifar10",
                title="The CNN of the per-sample-gradient literature, CIFAR-10 shapes",
                source="Subramani et al. 2021, arXiv:2010.09063 (layers), after Papernot et al. 2020, arXiv:2007.14191",
                sizes={
                    "full": Size(
                        model={"channels": (32, 64, 128, 256), "classes": 10},
                        inputs=Images(3, 32, 32, classes=10),
                        batch_size=_batch(64, 256, 256),
                        flops=87_441_408,
                    ),
                    "tiny": Size(
                        model={"channels": (4, 8, 8, 16), "classes": 10},
                        inputs=Images(3, 32, 32, classes=10),
                        batch_size=_everywhere(8),
                        flops=1_188_864,
                    ),
                },
                optimizer=_FAST_DPSGD,
            ),
            Benchmark(
                name="cifar10_resnet18",
                title="ResNet-18 for 32x32 images, CIFAR-10 shapes",
                source="He et al. 2015, arXiv:1512.03385; 3x3 stem without pooling",
                sizes={
                    "full": Size(
                        model={"layers": (2, 2, 2, 2), "width": 64, "classes": 10},
                        inputs=Images(3, 32, 32, classes=10),
                        batch_size=_batch(16, 256, 128),
                        flops=1_110_845_440,
                    ),
                    "tiny": Size(
                        model={"layers": (1, 1), "width": 8, "classes": 10},
                        inputs=Images(3, 32, 32, classes=10),
                        batch_size=_everywhere(8),
                        flops=4_636_992,
                    ),
                },
                # Without the paper's warm-up, its 0.1 raises the losses.
                optimizer=SGD(learning_rate=0.01, batch_size=128, source="He et al. 2015, section 4.2"),
            ),
            Benchmark(
                name="gpt2",
                title="GPT-2 (small), next token",
                source="Radford et al. 2019, 'Language Models are Unsupervised Multitask Learners'",
                sizes={
                    "full": Size(
                        model={"layers": 12, "heads": 12, "width": 768, "length": 1024, "vocabulary": 50257},
                        inputs=Tokens(1024, vocabulary=50257),
                        batch_size=_batch(1, 8, 2),
                        flops=291_648_307_200,
                    ),
                    "tiny": Size(
                        model={"layers": 2, "heads": 2, "width": 32, "length": 32, "vocabulary": 101},
                        inputs=Tokens(32, vocabulary=101),
                        batch_size=_everywhere(4),
                        flops=2_041_856,
                    ),
                },
                attention=True,
                # The smallest GPT-3's, of the same size: GPT-2's paper gives no rate. 512 sequences are 0.5M tokens.
                optimizer=AdamW(learning_rate=0.0006, batch_size=512, source="Brown et al. 2020, arXiv:2005.14165"),
                unit="sequences/s",
            ),
            Benchmark(
                name="bert",
                title="BERT-Base with a head for two classes",
                source="Devlin et al. 2018, arXiv:1810.04805",
                sizes={
                    "full": Size(
                        model={
                            "layers": 12,
                            "heads": 12,
                            "width": 768,
                            "hidden": 3072,
                            "length": 512,
                            "vocabulary": 30522,
                            "classes": 2,
                        },
                        inputs=Tokens(128, vocabulary=30522, classes=2),
                        batch_size=_batch(2, 64, 16),
                        flops=22_348_434_432,
                    ),
                    "tiny": Size(
                        model={
                            "layers": 2,
                            "heads": 2,
                            "width": 32,
                            "hidden": 64,
                            "length": 32,
                            "vocabulary": 101,
                            "classes": 2,
                        },
                        inputs=Tokens(16, vocabulary=101, classes=2),
                        batch_size=_everywhere(8),
                        flops=592_000,
                    ),
                },
                attention=True,
                # A tenth of the paper's: from random weights, without a warm-up, 2e-5 raises the losses.
                optimizer=AdamW(learning_rate=2e-6, batch_size=32, source="Devlin et al. 2018, section 4.1: 2e-5"),
                unit="sequences/s",
            ),
            Benchmark(
                name="graphnet",
                title="Graph network on molecule-shaped graphs",
                source="Battaglia et al. 2018, arXiv:1806.01261; sizes as in AlgoPerf's OGBG, arXiv:2306.07179",
                loss="sigmoid",
                sizes={
                    "full": Size(
                        model={"steps": 5, "width": 256, "node_features": 9, "edge_features": 3, "tasks": 128},
                        inputs=Molecules(nodes=26, edges=56, node_features=9, edge_features=3, tasks=128),
                        batch_size=_batch(32, 512, 128),
                        flops=211_756_032,
                    ),
                    "tiny": Size(
                        model={"steps": 2, "width": 16, "node_features": 9, "edge_features": 3, "tasks": 8},
                        inputs=Molecules(nodes=10, edges=20, node_features=9, edge_features=3, tasks=8),
                        batch_size=_everywhere(8),
                        flops=123_072,
                    ),
                },
                optimizer=AdamW(learning_rate=0.001, batch_size=256, source="flax, examples/ogbg_molpcba"),
                unit="graphs/s",
            ),
            Benchmark(
                name="gcn",
                title="Graph convolutional network on a Cora-sized graph",
                source="Kipf and Welling 2016, arXiv:1609.02907",
                sizes={
                    "full": Size(
                        model={"features": 1433, "hidden": 16, "classes": 7},
                        inputs=Citations(nodes=2708, edges=10556, features=1433, classes=7, labelled=140),
                        batch_size=_everywhere(1),
                        flops=124_784_640,
                    ),
                    "tiny": Size(
                        model={"features": 12, "hidden": 8, "classes": 4},
                        inputs=Citations(nodes=60, edges=240, features=12, classes=4, labelled=20),
                        batch_size=_everywhere(1),
                        flops=15_360,
                    ),
                },
                # The same at any batch size: in the paper, a step uses the whole data set.
                optimizer=AdamW(learning_rate=0.01, source="Kipf and Welling 2016, section 5.2"),
                unit="graphs/s",
            ),
        )
    }
)
