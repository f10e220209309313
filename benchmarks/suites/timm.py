"""The suite of timm's image models: from transformers where it has them, else from `nets`; an image of 224 x 224."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn

from benchmarks.suites.model import Model, image
from benchmarks.suites.nets import classic, mobile, patches


def _build(kind: str, ending: str, sizes: dict[str, Any]) -> nn.Module:
    import transformers

    config = getattr(transformers, f"{kind}Config")(num_labels=1000, **sizes)
    made: nn.Module = getattr(transformers, kind + ending)(config)
    return made


def _model(
    family: str, kind: str, ending: str = "ForImageClassification", size: int = 224, **sizes: Any
) -> Model:
    return Model(family, partial(_build, kind, ending, sizes), image(size))


def _own(family: str, build: Callable[[], nn.Module]) -> Model:
    return Model(family, build, image(), by_name=False)


_SWIN_B = {"embed_dim": 128, "depths": [2, 2, 18, 2], "num_heads": [4, 8, 16, 32]}
_CONVNEXT_B = {"hidden_sizes": [128, 256, 512, 1024], "depths": [3, 3, 27, 3]}
_CONVNEXT_V2_NANO = {"hidden_sizes": [80, 160, 320, 640], "depths": [2, 2, 8, 2]}
_DEIT_TINY = {"hidden_size": 192, "num_attention_heads": 3, "intermediate_size": 768}
_EFFICIENTNET_B0 = {"width_coefficient": 1.0, "depth_coefficient": 1.0, "image_size": 224, "hidden_dim": 1280}
_POOLFORMER_M36 = {"depths": [6, 6, 18, 6], "hidden_sizes": [96, 192, 384, 768]}
_REGNET_Y_002 = {
    "embedding_size": 32,
    "hidden_sizes": [24, 56, 152, 368],
    "depths": [1, 1, 4, 7],
    "groups_width": 8,
}

MODELS: dict[str, Model] = {
    "beit_base_patch16_224": _model("image transformers", "Beit"),
    "cvt_13": _model("image transformers", "Cvt"),
    "deit_base_distilled_patch16_224": _model("image transformers", "DeiT", "ForImageClassificationWithTeacher"),
    "deit_tiny_patch16_224": _model("image transformers", "DeiT", **_DEIT_TINY),
    "levit_128": _model("image transformers", "Levit"),
    "mobilevit_s": _model("image transformers", "MobileViT", size=256),
    "pvt_tiny": _model("image transformers", "Pvt"),
    "swin_base_patch4_window7_224": _model("image transformers", "Swin", **_SWIN_B),
    "swinv2_tiny": _model("image transformers", "Swinv2"),
    "vit_base_patch14_dinov2": _model("image transformers", "Dinov2", image_size=518, patch_size=14),
    "vit_base_patch16_224": _model("image transformers", "ViT"),
    "vit_base_patch16_siglip_256": _model("image transformers", "SiglipVision", "Model", size=256, image_size=256),
    "convmixer_768_32": _own("mixers", patches.convmixer_768_32),
    "gmlp_s16_224": _own("mixers", patches.gmlp_s16),
    "mixer_b16_224": _own("mixers", patches.mixer_b16),
    "poolformer_m36": _model("mixers", "PoolFormer", **_POOLFORMER_M36),
    "resmlp_12_224": _own("mixers", patches.resmlp_12),
    "convnext_base": _model("convolutions", "ConvNext", **_CONVNEXT_B),
    "convnextv2_nano": _model("convolutions", "ConvNextV2", **_CONVNEXT_V2_NANO),
    "cspdarknet53": _own("convolutions", classic.cspdarknet53),
    "regnety_002": _model("convolutions", "RegNet", **_REGNET_Y_002),
    "repvgg_a2": _own("convolutions", classic.repvgg_a2),
    "ghostnet_100": _own("mobile", mobile.ghostnet),
    "mnasnet_100": _own("mobile", mobile.mnasnet),
    "mobilenetv1": _model("mobile", "MobileNetV1"),
    "mobilenetv2_100": _model("mobile", "MobileNetV2"),
    "mobilenetv3_large_100": _own("mobile", mobile.MobileNetV3),
    "tf_efficientnet_b0": _model("mobile", "EfficientNet", **_EFFICIENTNET_B0),
}  # fmt: skip
