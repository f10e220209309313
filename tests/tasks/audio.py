"""Tasks on sound."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers as tf
from tokenizers import pre_tokenizers

from tests.tasks.case import RATE, SOUNDS, TEXTS, Case, call, characters, each, random_model, sound

_TINY = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
_LETTERS = ["<pad>", "<s>", "</s>", "<unk>", "|", *"abcdefghijklmnopqrstuvwxyz'"]


def _ast() -> Any:
    config = tf.ASTConfig(**_TINY, patch_size=8, max_length=64, num_mel_bins=16, num_labels=5)
    extractor = tf.ASTFeatureExtractor(num_mel_bins=16, max_length=64)
    model = random_model("ASTForAudioClassification", config)
    return tf.pipeline("audio-classification", model=model, feature_extractor=extractor, device="cpu")


def _with_vocabulary(tokenizer: type, tokens: list[str], **settings: Any) -> Any:
    """A tokenizer of a class that reads its vocabulary from a file."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "vocab.json"
        file.write_text(json.dumps({token: number for number, token in enumerate(tokens)}), encoding="utf-8")
        return tokenizer(str(file), **settings)


def wav2vec2() -> Any:
    config = tf.Wav2Vec2Config(
        **_TINY,
        vocab_size=len(_LETTERS),
        conv_dim=[16] * 7,
        num_conv_pos_embeddings=16,
        num_conv_pos_embedding_groups=4,
        num_feat_extract_layers=7,
    )
    return tf.pipeline(
        "automatic-speech-recognition",
        model=random_model("Wav2Vec2ForCTC", config),
        tokenizer=_with_vocabulary(tf.Wav2Vec2CTCTokenizer, _LETTERS),
        feature_extractor=tf.Wav2Vec2FeatureExtractor(),
        device="cpu",
    )


def whisper() -> Any:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    # What stands behind the last one would be read as times.
    tokens = ["<|endoftext|>", "<|startoftranscript|>", *letters, "<|notimestamps|>"]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    special = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0, "decoder_start_token_id": 1}
    config = tf.WhisperConfig(
        vocab_size=len(tokens),
        num_mel_bins=16,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=128,
        decoder_ffn_dim=128,
        d_model=64,
        max_source_positions=50,
        max_target_positions=32,
        **special,
    )
    model = random_model("WhisperForConditionalGeneration", config)
    model.generation_config = tf.GenerationConfig(
        **special, no_timestamps_token_id=len(tokens) - 1, is_multilingual=False
    )
    return tf.pipeline(
        "automatic-speech-recognition",
        model=model,
        tokenizer=tf.WhisperTokenizer(vocab=vocabulary, merges=[], pad_token="<|endoftext|>"),
        feature_extractor=tf.WhisperFeatureExtractor(feature_size=16, chunk_length=1),
        device="cpu",
    )


def vits() -> Any:
    config = tf.VitsConfig(
        vocab_size=len(_LETTERS),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        ffn_dim=64,
        flow_size=32,
        spectrogram_bins=9,
        prior_encoder_num_flows=2,
        prior_encoder_num_wavenet_layers=2,
        posterior_encoder_num_wavenet_layers=2,
        duration_predictor_filter_channels=32,
        duration_predictor_num_flows=2,
        depth_separable_num_layers=2,
        upsample_initial_channel=32,
        upsample_rates=[4, 4],
        upsample_kernel_sizes=[8, 8],
        resblock_kernel_sizes=[3],
        resblock_dilation_sizes=[[1, 3]],
        noise_scale=0.0,
        noise_scale_duration=0.0,
    )
    tokenizer = _with_vocabulary(tf.VitsTokenizer, _LETTERS, phonemize=False, normalize=True)
    return tf.pipeline(
        "text-to-audio", model=random_model("VitsModel", config), tokenizer=tokenizer, device="cpu"
    )


def speecht5() -> Any:
    config = tf.SpeechT5Config(
        vocab_size=len(characters()),
        hidden_size=64,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=128,
        decoder_ffn_dim=128,
        num_mel_bins=16,
        speech_decoder_prenet_units=32,
        speech_decoder_prenet_dropout=0.0,
        speech_decoder_postnet_layers=2,
        speech_decoder_postnet_units=32,
        speaker_embedding_dim=8,
        pad_token_id=0,
        positional_dropout=0.0,
    )
    vocoder = tf.SpeechT5HifiGanConfig(
        model_in_dim=16,
        upsample_initial_channel=16,
        upsample_rates=[4, 4],
        upsample_kernel_sizes=[8, 8],
        resblock_kernel_sizes=[3],
        resblock_dilation_sizes=[[1, 3]],
    )
    return tf.pipeline(
        "text-to-audio",
        model=random_model("SpeechT5ForTextToSpeech", config),
        vocoder=random_model("SpeechT5HifiGan", vocoder),
        tokenizer=characters(),
        device="cpu",
    )


_WORDS = {"max_new_tokens": 12}
_SPEECH = {"speaker_embeddings": torch.ones(1, 8), "maxlenratio": 2.0}
_LONG = {"raw": sound(2.3), "sampling_rate": RATE}

CASES = {
    "audio-classification": Case("AST", _ast, [call([sound(), sound(0.2, 1)], batch_size=2)], each(SOUNDS)),
    "automatic-speech-recognition (CTC)": Case(
        "wav2vec2",
        wav2vec2,
        [call(sound()), call(_LONG, chunk_length_s=1, stride_length_s=0.2)],
        each(SOUNDS),
    ),
    "automatic-speech-recognition": Case(
        "Whisper",
        whisper,
        [call([sound(), sound(0.7, 1)], batch_size=2, generate_kwargs=_WORDS)],
        each(SOUNDS, generate_kwargs=_WORDS),
    ),
    "text-to-audio": Case(
        "VITS", vits, [call(TEXTS)], {"empty": call(""), "none": call(None), "a number": call(7)}
    ),
    "text-to-audio (spectrogram)": Case(
        "SpeechT5",
        speecht5,
        [call(TEXTS[0], forward_params=_SPEECH)],
        {"no speaker": call(TEXTS[0]), "none": call(None)},
    ),
}
