"""Tasks on text with images or sound."""

from __future__ import annotations

import copy
from typing import Any

import transformers as tf

from tests.acceptance.writer import TEMPLATE, make_tokenizer
from tests.tasks.case import IMAGES, SOUNDS, Case, call, each, picture, random_model, sound, wordpiece

_TINY = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
_EYES = {**_TINY, "image_size": 32, "patch_size": 8}
_SPECIAL = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2}
_SIZE = {"height": 32, "width": 32}


def _reader(**settings: Any) -> dict[str, Any]:
    """The settings of a text tower for `wordpiece`, which ends texts with [SEP]."""
    return {**_TINY, "vocab_size": len(wordpiece()), "eos_token_id": 102, "pad_token_id": 0, **settings}


def _clip() -> Any:
    config = tf.CLIPConfig(text_config=_reader(), vision_config=_EYES, projection_dim=32)
    return tf.pipeline(
        "zero-shot-image-classification",
        model=random_model("CLIPModel", config),
        tokenizer=wordpiece(),
        image_processor=tf.CLIPImageProcessorPil(size={"shortest_edge": 32}, crop_size=_SIZE),
        device="cpu",
    )


def _owlvit() -> Any:
    config = tf.OwlViTConfig(
        text_config=_reader(max_position_embeddings=16), vision_config=_EYES, projection_dim=64
    )
    return tf.pipeline(
        "zero-shot-object-detection",
        model=random_model("OwlViTForObjectDetection", config),
        tokenizer=wordpiece(),
        image_processor=tf.OwlViTImageProcessorPil(size=_SIZE),
        device="cpu",
    )


def _clap() -> Any:
    ears = {
        "hidden_size": 128,
        "patch_embeds_hidden_size": 32,
        "depths": [1, 1, 1],
        "num_attention_heads": [2, 2, 4],
        "num_mel_bins": 16,
        "spec_size": 64,
        "window_size": 4,
        "num_classes": 3,
    }
    config = tf.ClapConfig(text_config=_reader(pad_token_id=1), audio_config=ears, projection_dim=32)
    untyped = copy.deepcopy(wordpiece())
    untyped.model_input_names = ["input_ids", "attention_mask"]
    extractor = tf.ClapFeatureExtractor(
        feature_size=16, sampling_rate=16000, max_length_s=1, truncation="rand_trunc"
    )
    return tf.pipeline(
        "zero-shot-audio-classification",
        model=random_model("ClapModel", config),
        tokenizer=untyped,
        feature_extractor=extractor,
        device="cpu",
    )


def _talker(*tokens: str) -> Any:
    """A tokenizer of bytes with `tokens` besides, and a template that puts the last one where an image or a sound is."""
    tokenizer = make_tokenizer()
    tokenizer.add_tokens(list(tokens), special_tokens=True)
    return tokenizer


def _template(token: str) -> str:
    parts = (
        "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for part in message['content'] %}"
        "{% if part['type'] == 'text' %}{{ part['text'] }}{% else %}"
        + token
        + "{% endif %}{% endfor %}{% endif %}"
    )
    return TEMPLATE.replace("{{ message['role'] + ': ' + message['content'] + '\n' }}", parts)


def _llava() -> Any:
    tokenizer = _talker("<image>")
    text = tf.LlamaConfig(**_TINY, vocab_size=len(tokenizer), **_SPECIAL)
    vision = tf.CLIPVisionConfig(**_EYES)
    config = tf.LlavaConfig(
        text_config=text, vision_config=vision, image_token_index=len(tokenizer) - 1, vision_feature_layer=-1
    )
    processor = tf.LlavaProcessor(
        image_processor=tf.CLIPImageProcessorPil(size={"shortest_edge": 32}, crop_size=_SIZE),
        tokenizer=tokenizer,
        patch_size=8,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=_template("<image>"),
    )
    model = random_model("LlavaForConditionalGeneration", config)
    return tf.pipeline("image-text-to-text", model=model, processor=processor, device="cpu")


def _qwen2_audio() -> Any:
    tokenizer = _talker("<|audio_bos|>", "<|audio_eos|>", "<|AUDIO|>")
    text = tf.Qwen2Config(**_TINY, num_key_value_heads=2, vocab_size=len(tokenizer), **_SPECIAL)
    ears = {
        "d_model": 64,
        "encoder_layers": 2,
        "encoder_attention_heads": 4,
        "encoder_ffn_dim": 128,
        "num_mel_bins": 16,
        "max_source_positions": 50,
    }
    config = tf.Qwen2AudioConfig(audio_config=ears, text_config=text, audio_token_index=len(tokenizer) - 1)
    processor = tf.Qwen2AudioProcessor(
        feature_extractor=tf.WhisperFeatureExtractor(feature_size=16, chunk_length=1),
        tokenizer=tokenizer,
        chat_template=_template("<|audio_bos|><|AUDIO|><|audio_eos|>"),
    )
    model = random_model("Qwen2AudioForConditionalGeneration", config)
    return tf.pipeline("any-to-any", model=model, processor=processor, device="cpu")


_LABELS = {"candidate_labels": ["a cat", "a red house"]}
_QUESTION = "<|audio_bos|><|AUDIO|><|audio_eos|>What?"
_SHORT = {"generate_kwargs": {"max_new_tokens": 8, "do_sample": False}}

CASES = {
    "zero-shot-image-classification": Case(
        "CLIP", _clip, [call([picture(), picture(30, 90, 1)], **_LABELS)], each(IMAGES, **_LABELS)
    ),
    "zero-shot-object-detection": Case(
        "OWL-ViT", _owlvit, [call(picture(), threshold=0.0, **_LABELS)], each(IMAGES, **_LABELS)
    ),
    "zero-shot-audio-classification": Case(
        "CLAP", _clap, [call(sound(), **_LABELS)], each(SOUNDS, **_LABELS)
    ),
    "image-text-to-text": Case(
        "LLaVA (CLIP, Llama)",
        _llava,
        [call(picture(), text="<image> What is it?", **_SHORT)],
        each(IMAGES, text="<image> What?", **_SHORT),
    ),
    "any-to-any": Case(
        "Qwen2-Audio",
        _qwen2_audio,
        [call(_QUESTION, audio=sound(), **_SHORT)],
        {name: call(_QUESTION, audio=value, **_SHORT) for name, value in SOUNDS.items()},
    ),
}
