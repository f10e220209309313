"""The suite of TorchBench's models that run on CPUs and need no other package."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Generator, Tensor, nn

from benchmarks.suites.model import Inputs, Model, image, noise
from benchmarks.suites.nets import classic, mobile, others


def _images(family: str, build: Callable[[], nn.Module], size: int = 224) -> Model:
    return Model(family, build, image(size), by_name=False)


def _many(rows: int, inputs: Inputs) -> Inputs:
    """Return inputs with `rows` rows per item of the batch, since one row is too short to measure."""
    return lambda batch, generator: inputs(rows * batch, generator)


def _rows(family: str, build: Callable[[], nn.Module], rows: int, inputs: Inputs) -> Model:
    return Model(family, build, _many(rows, inputs), by_name=False)


def _clicks(batch: int, generator: Generator) -> dict[str, Tensor]:
    sparse = torch.randint(0, 20_000, (batch, 26, 10), generator=generator)
    return {"dense": torch.randn(batch, 13, generator=generator), "sparse": sparse}


MODELS: dict[str, Model] = {
    "alexnet": _images("convolutions", classic.alexnet),
    "attention_is_all_you_need": Model("transformers", others.Translator, noise(source=(32, 512), target=(32, 512)), by_name=False),
    "dcgan": _rows("image generators", others.dcgan, 8, noise(latents=(100, 1, 1))),
    "demucs": Model("sound", others.Demucs, noise(sound=(2, 87_040)), by_name=False),
    "densenet121": _images("convolutions", classic.densenet121),
    "dlrm": _rows("recommendation and control", others.DLRM, 256, _clicks),
    "lennard_jones": _rows("recommendation and control", others.lennard_jones, 1000, noise(distances=(1,))),
    "mnasnet1_0": _images("mobile", mobile.mnasnet),
    "mobilenet_v2": _images("mobile", mobile.mobilenet_v2),
    "mobilenet_v3_large": _images("mobile", mobile.MobileNetV3),
    "nvidia_deeprecommender": _rows("recommendation and control", others.deep_recommender, 16, noise(ratings=(17_768,))),
    "pytorch_unet": _images("image generators", others.UNet, 256),
    "resnet152": _images("convolutions", partial(classic.resnet, (3, 8, 36, 3))),
    "resnet18": _images("convolutions", classic.resnet18),
    "resnet50": _images("convolutions", partial(classic.resnet, (3, 4, 6, 3))),
    "resnext50_32x4d": _images("convolutions", partial(classic.resnet, (3, 4, 6, 3), groups=32, width=128)),
    "shufflenet_v2_x1_0": _images("mobile", mobile.shufflenet_v2),
    "soft_actor_critic": _rows("recommendation and control", others.soft_actor, 256, noise(states=(3,))),
    "squeezenet1_1": _images("mobile", mobile.squeezenet),
    "tts_angular": _rows("sound", others.SpeakerEncoder, 8, noise(features=(50, 40))),
    "vgg16": _images("convolutions", classic.vgg16),
    "yolov3": _images("convolutions", others.YOLOv3, 416),
}  # fmt: skip
