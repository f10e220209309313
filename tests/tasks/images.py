"""Tasks on images and video."""

from __future__ import annotations

from typing import Any
from unittest import mock

import numpy as np
import torch
import transformers as tf

from tests.tasks.case import IMAGES, Case, call, each, picture, random_model

_TINY = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
_SIZE = {"height": 32, "width": 32}


def _pipe(task: str, model: str, config: Any, processor: Any) -> Any:
    return tf.pipeline(task, model=random_model(model, config), image_processor=processor, device="cpu")


def _vit() -> Any:
    config = tf.ViTConfig(**_TINY, image_size=32, patch_size=8, num_labels=5)
    return _pipe(
        "image-classification", "ViTForImageClassification", config, tf.ViTImageProcessorPil(size=_SIZE)
    )


def _dinov2() -> Any:
    config = tf.Dinov2Config(**_TINY, image_size=32, patch_size=8)
    return _pipe("image-feature-extraction", "Dinov2Model", config, tf.ViTImageProcessorPil(size=_SIZE))


def _segformer() -> Any:
    config = tf.SegformerConfig(
        hidden_sizes=[32, 32, 48, 64],
        depths=[1, 1, 1, 1],
        decoder_hidden_size=32,
        num_attention_heads=[1, 2, 4, 8],
    )
    processor = tf.SegformerImageProcessorPil(size={"height": 64, "width": 64})
    return _pipe("image-segmentation", "SegformerForSemanticSegmentation", config, processor)


def _yolos() -> Any:
    config = tf.YolosConfig(**_TINY, image_size=[48, 64], patch_size=16, num_detection_tokens=7, num_labels=4)
    processor = tf.YolosImageProcessorPil(size={"shortest_edge": 48, "longest_edge": 64})
    return _pipe("object-detection", "YolosForObjectDetection", config, processor)


def _depth_anything() -> Any:
    backbone = tf.Dinov2Config(
        **_TINY,
        image_size=28,
        patch_size=7,
        out_indices=[1, 2],
        reshape_hidden_states=False,
        apply_layernorm=True,
    )
    config = tf.DepthAnythingConfig(
        backbone_config=backbone,
        reassemble_hidden_size=64,
        patch_size=7,
        neck_hidden_sizes=[16, 32],
        reassemble_factors=[1, 0.5],
        fusion_hidden_size=16,
        head_hidden_size=8,
        depth_estimation_type="metric",
        max_depth=10,
    )
    processor = tf.DPTImageProcessorPil(size={"height": 28, "width": 28})
    return _pipe("depth-estimation", "DepthAnythingForDepthEstimation", config, processor)


class _Frames:
    """What a video processor gives for frames that are arrays already, so that no decoder of video is needed."""

    model_input_names = ("pixel_values",)

    def __call__(self, video: np.ndarray, num_frames: int, **unused: Any) -> Any:
        chosen = np.linspace(0, len(video) - 1, num_frames).astype(int)
        frames = torch.from_numpy(video[chosen]).permute(0, 3, 1, 2).float() / 255
        return tf.BatchFeature({"pixel_values": frames[None]})


def _videomae() -> Any:
    config = tf.VideoMAEConfig(**_TINY, image_size=32, patch_size=8, num_frames=4, num_labels=5)
    model = random_model("VideoMAEForVideoClassification", config)
    with mock.patch("transformers.pipelines.video_classification.requires_backends"):
        return tf.pipeline(
            "video-classification",
            model=model,
            video_processor=_Frames(),
            image_processor=tf.ViTImageProcessorPil(size=_SIZE),
            device="cpu",
        )


def _video(frames: int) -> Any:
    return np.stack([np.asarray(picture(32, 32, seed)) for seed in range(frames)])


class _AllMasks(tf.SamImageProcessorPil):
    """Without torchvision, that drops masks which overlap."""

    def post_process_for_mask_generation(self, masks: Any, scores: Any, boxes: Any, threshold: float) -> Any:
        return masks, scores, None, boxes


def _sam() -> Any:
    vision = {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "mlp_dim": 128,
        "image_size": 64,
        "patch_size": 16,
        "output_channels": 32,
        "window_size": 3,
        "global_attn_indexes": [1],
        "num_pos_feats": 16,
    }
    prompts = {"hidden_size": 32, "image_size": 64, "patch_size": 16, "mask_input_channels": 8}
    decoder = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "mlp_dim": 64,
        "iou_head_hidden_dim": 32,
    }
    config = tf.SamConfig(vision_config=vision, prompt_encoder_config=prompts, mask_decoder_config=decoder)
    processor = _AllMasks(
        size={"longest_edge": 64},
        pad_size={"height": 64, "width": 64},
        mask_size={"longest_edge": 16},
        mask_pad_size={"height": 16, "width": 16},
    )
    return _pipe("mask-generation", "SamModel", config, processor)


def _superglue() -> Any:
    points = tf.SuperPointConfig(
        encoder_hidden_sizes=[8, 8, 16, 16],
        decoder_hidden_size=16,
        keypoint_decoder_dim=65,
        descriptor_decoder_dim=32,
        keypoint_threshold=0.0,
        max_keypoints=20,
        border_removal_distance=2,
    )
    config = tf.SuperGlueConfig(
        keypoint_detector_config=points,
        hidden_size=32,
        keypoint_encoder_sizes=[16, 32],
        gnn_layers_types=["self", "cross"],
        num_attention_heads=4,
        sinkhorn_iterations=5,
    )
    processor = tf.SuperGlueImageProcessorPil(size={"height": 48, "width": 64})
    return _pipe("keypoint-matching", "SuperGlueForKeypointMatching", config, processor)


_BAD_PAIRS = {
    "one image": call([picture()]),
    "nothing": call([]),
    "a cut one": call([picture(), IMAGES["cut short"]]),
    "one pixel": call([picture(), IMAGES["one pixel"]]),
}
_MASKS = {"points_per_crop": 2, "pred_iou_thresh": -10.0, "stability_score_thresh": 0.0}

CASES = {
    "image-classification": Case(
        "ViT",
        _vit,
        [call([picture(), picture(30, 90, 1)], batch_size=2), call(picture(7, 500))],
        each(IMAGES),
    ),
    "image-feature-extraction": Case("DINOv2", _dinov2, [call(picture(), return_tensors=True)], each(IMAGES)),
    "image-segmentation": Case("SegFormer", _segformer, [call(picture())], each(IMAGES)),
    "object-detection": Case("YOLOS", _yolos, [call(picture(), threshold=0.0)], each(IMAGES)),
    "depth-estimation": Case("Depth Anything", _depth_anything, [call(picture())], each(IMAGES)),
    "video-classification": Case(
        "VideoMAE",
        _videomae,
        [call(_video(9))],
        {"one frame": call(_video(1)), "no frame": call(_video(1)[:0]), "none": call(None)},
    ),
    "mask-generation": Case(
        "SAM",
        _sam,
        [call(picture(), **_MASKS)],
        each({name: IMAGES[name] for name in ("one pixel", "cut short", "a number")}, **_MASKS),
    ),
    "keypoint-matching": Case("SuperGlue", _superglue, [call([picture(), picture(60, 50, 1)])], _BAD_PAIRS),
}
