"""Models: plain `nn.Module` factories by name, `factory(input_shape, classes, *, settings) -> nn.Module`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fedlens.base.errors import ConfigError
from fedlens.base.registry import INSTANCE, Entry, Factory, OwnSettings, Registry
from fedlens.core.dataset_info import Kind


@dataclass(frozen=True)
class ModelRegistry(Registry):
    """The table of models, which also takes what PyTorch has: classes, functions and `nn.Module` objects."""

    def find(self, name: str, where: str | None = None) -> Factory:
        """The factory of this name; one of a user's own is adapted to be called as fedlens calls it."""
        if name == INSTANCE:
            raise ConfigError(
                "the run's model was given as an object in Python, which config.toml cannot hold",
                where=where,
                hint="pass an equal object: resume(directory, model=...) or load_result(directory, model=...)",
            )
        found = super().find(name, where)
        return found if name in self.entries else self.given(found)[0]

    def given(self, thing: Any) -> tuple[Factory, str]:
        """The factory and the name of a model that was given in Python."""
        from torch import nn  # names alone are listed without PyTorch

        from fedlens.models.user_models import Instance, UserModel

        if isinstance(thing, nn.Module):
            return Instance.of(thing), INSTANCE
        if isinstance(thing, Instance):
            return thing, INSTANCE
        factory, name = super().given(thing)
        own = isinstance(thing, OwnSettings) or name.startswith("fedlens.")
        return factory if own else UserModel(thing, name), name


@dataclass(frozen=True)
class ModelEntry(Entry):
    """One row of the table of models.

    Attributes:
        source: the paper, and who wrote the code where fedlens did not.
        licence: of the code; SPDX's name.
        shape: of one image or text, for which parameters and multiply-adds are counted.
        classes: of the model that is counted.
        task: the kind of data that it is for.
        extra: the extra of fedlens with the package that makes it, if it needs one.
        vocabulary: of the model of texts that is counted, if that is not the number of classes.
    """

    source: str
    shape: tuple[int, ...] = (3, 32, 32)
    classes: int = 10
    licence: str = "Apache-2.0"
    task: str = "classification"
    extra: str | None = None
    vocabulary: int | None = None

    def fits(self, kind: Kind) -> bool:
        """Whether it is for data of this kind. A classifier also gives images several classes, or features alone."""
        return kind == self.task or (self.task == "classification" and kind in ("multi-label", "unlabelled"))


_MCMAHAN = "McMahan et al. 2017 (arXiv 1602.05629)"
_HE = "He et al. 2016 (arXiv 1512.03385)"
_GKT = "He, Annavaram and Avestimehr 2020 (arXiv 2007.14513)"
_DARTS = "Liu, Simonyan and Yang 2019 (arXiv 1806.09055); written by fedlens"
_FEDCV = "He et al. 2021 (arXiv 2111.11066)"
_YOLO = "Bochkovskiy et al. 2020 (arXiv 2004.10934); written by fedlens"
_VIT = "Dosovitskiy et al. 2021 (arXiv 2010.11929)"


def _timm(function: str, summary: str, source: str) -> ModelEntry:
    target = f"fedlens.models.timm_models:{function}"
    return ModelEntry(target, f"{summary}; of timm", f"{source}; timm", (3, 224, 224), 1000, extra="vision")


def _cifar_resnet(layers: int, blocks: int) -> ModelEntry:
    return ModelEntry(
        f"fedlens.models.resnet:resnet{layers}",
        f"ResNet-{layers} for small images: three stages of {blocks} blocks, of 16, 32 and 64 channels",
        f"{_HE}, section 4.2",
    )


def _torchvision(function: str, summary: str, source: str) -> ModelEntry:
    target, side = f"fedlens.models.torchvision_detectors:{function}", 320 if function == "ssdlite" else 640
    return ModelEntry(
        target,
        f"{summary}; of torchvision",
        f"{source}; torchvision",
        (3, side, side),
        80,
        "BSD-3-Clause",
        "detection",
    )


def _yolov5(size: str, what: str) -> ModelEntry:
    name = f"yolov5{size}"
    return ModelEntry(
        f"fedlens.models.yolov5.detector:{name}",
        f"YOLOv5, release 4.0, {what}",
        f"{_FEDCV}, section 6.3; {_YOLO}",
        (3, 640, 640),
        80,
        task="detection",
    )


def _segmentation(function: str, summary: str, paper: str) -> ModelEntry:
    return ModelEntry(
        f"fedlens.models.segmentation:{function}",
        f"{summary}; of segmentation-models-pytorch",
        f"{paper}; segmentation-models-pytorch",
        (3, 512, 512),
        21,
        "MIT",
        "segmentation",
        "vision",
    )


MODELS = ModelRegistry(
    "model",
    {
        "linear": ModelEntry(
            "fedlens.models.simple:linear",
            "multinomial logistic regression on the pixels",
            "fedlens",
            (1, 28, 28),
        ),
        "mlp": ModelEntry(
            "fedlens.models.simple:mlp",
            "McMahan's 2NN: two hidden layers of 200 ReLU units",
            _MCMAHAN,
            (1, 28, 28),
        ),
        "small-cnn": ModelEntry(
            "fedlens.models.simple:small_cnn",
            "two 3x3 convolutions for small images such as digits",
            "fedlens",
            (1, 8, 8),
        ),
        "mcmahan-cnn": ModelEntry(
            "fedlens.models.simple:mcmahan_cnn",
            "McMahan's CNN, 1,663,370 parameters at 28x28x1",
            _MCMAHAN,
            (1, 28, 28),
        ),
        "hsu-cnn": ModelEntry(
            "fedlens.models.simple:hsu_cnn",
            "the CNN of Hsu et al. 2019, 1,756,426 parameters on CIFAR-10",
            "Hsu et al. 2019 (arXiv 1909.06335), section 4",
        ),
        "vgg9": ModelEntry(
            "fedlens.models.simple:vgg9",
            "the VGG-9 of FedMA, 3,491,530 parameters on CIFAR-10",
            "Wang et al. 2020 (arXiv 2002.06440); written by fedlens",
        ),
        "resnet20": _cifar_resnet(20, 3),
        "resnet32": _cifar_resnet(32, 5),
        "resnet44": _cifar_resnet(44, 7),
        "resnet56": _cifar_resnet(56, 9),
        "gkt-resnet8": ModelEntry(
            "fedlens.models.resnet:gkt_resnet8",
            "the client's ResNet of FedGKT: one stage of 2 bottlenecks, 10,586 parameters on CIFAR-10",
            _GKT,
        ),
        "gkt-resnet56": ModelEntry(
            "fedlens.models.resnet:gkt_resnet56",
            "the large ResNet of FedGKT: three stages of 6 bottlenecks, 591,322 parameters on CIFAR-10",
            _GKT,
        ),
        "darts-search": ModelEntry(
            "fedlens.models.darts:darts_search",
            "the search network of DARTS: eight operations on every edge, weighted by alphas",
            _DARTS,
        ),
        "darts": ModelEntry(
            "fedlens.models.darts:darts", "the network of one architecture of DARTS' space", _DARTS
        ),
        "resnet18": _timm("resnet18", "ResNet-18, 11.7 million parameters", _HE),
        "resnet34": _timm("resnet34", "ResNet-34, 21.8 million parameters", _HE),
        "resnet50": _timm("resnet50", "ResNet-50, 25.6 million parameters", _HE),
        "mobilenet-v2": _timm(
            "mobilenet_v2", "MobileNetV2, 3.5 million parameters", "Sandler et al. 2018 (arXiv 1801.04381)"
        ),
        "mobilenet-v3-large": _timm(
            "mobilenet_v3_large",
            "MobileNetV3-Large, 5.5 million parameters",
            "Howard et al. 2019 (arXiv 1905.02244)",
        ),
        "efficientnet-b0": _timm(
            "efficientnet_b0", "EfficientNet-B0, 5.3 million parameters", "Tan and Le 2019 (arXiv 1905.11946)"
        ),
        "vit-b-16": _timm("vit_b_16", "ViT-B/16, 86.6 million parameters", _VIT),
        "vit-tiny": _timm(
            "vit_tiny", "ViT-Tiny, 5.7 million parameters", "Touvron et al. 2021 (arXiv 2012.12877)"
        ),
        "projection": ModelEntry(
            "fedlens.models.projection:projection",
            "another model with MOON's projection head before its last layer",
            "Li, He and Song 2021 (arXiv 2103.16257)",
            (1, 8, 8),
        ),
        "ssdlite": _torchvision(
            "ssdlite", "SSDLite on MobileNetV3-Large", "Howard et al. 2019 (arXiv 1905.02244)"
        ),
        "fasterrcnn-mobilenet": _torchvision(
            "fasterrcnn_mobilenet", "Faster R-CNN on MobileNetV3-Large", "Ren et al. 2015 (arXiv 1506.01497)"
        ),
        "retinanet": _torchvision(
            "retinanet", "RetinaNet on ResNet-50", "Lin et al. 2017 (arXiv 1708.02002)"
        ),
        "yolov5n": _yolov5("n", "nano: half as wide as small"),
        "yolov5s": _yolov5("s", "small, 7.3 million parameters"),
        "yolov5m": _yolov5("m", "medium, 21.4 million parameters"),
        "yolov5l": _yolov5("l", "large, 47.1 million parameters"),
        "yolov5x": _yolov5("x", "extra large, 87.8 million parameters"),
        "lstm": ModelEntry(
            "fedlens.models.language:lstm",
            "embedding and two LSTM layers of 256 units, 822,570 parameters at 90 tokens",
            "McMahan et al. 2017 (arXiv 1602.05629); Chen et al. 2022 (arXiv 2206.11488), appendix C.1",
            (80,),
            90,
            task="language",
        ),
        "mean-embedding": ModelEntry(
            "fedlens.models.language:mean_embedding",
            "a linear layer on the mean of the embeddings of a text's words",
            "fedlens",
            (25,),
            2,
            task="language",
            vocabulary=10_002,
        ),
        "distilbert": ModelEntry(
            "fedlens.models.distilbert:distilbert",
            "DistilBERT with a classifier, 67.0 million parameters; of transformers",
            "Sanh et al. 2019 (arXiv 1910.01108); transformers",
            (64,),
            2,
            task="language",
            extra="text",
            vocabulary=30_522,
        ),
        "unet": _segmentation(
            "unet", "U-Net on MobileNetV2 or a ResNet", "Ronneberger et al. 2015 (arXiv 1505.04597)"
        ),
        "deeplabv3plus": _segmentation(
            "deeplabv3plus",
            "DeepLabV3+ on MobileNetV2 or a ResNet",
            "Chen et al. 2018 (arXiv 1802.02611)",
        ),
    },
)
"""The models by name; `MODELS.find(name)(input_shape, classes)` makes one."""
