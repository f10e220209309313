"""Transcribe a recording with a pipeline, eager and accelerated; compare texts and times.

python examples/speech_recognition.py                       # downloads whisper-tiny
python examples/speech_recognition.py --model facebook/wav2vec2-base-960h --sound my.wav
python examples/speech_recognition.py --random-config       # offline: wav2vec2 with random weights, meaningless text
"""

from __future__ import annotations

import argparse
import copy
import difflib
import json
import tempfile
import wave
from pathlib import Path

import numpy as np
import torch
import transformers as tf

from hf_cpu_accel import accelerate_for_cpu
from hf_cpu_accel.measure import interleaved, speedup

MODEL = "openai/whisper-tiny"
SOUND = Path(__file__).parents[1] / "integrations" / "spaces" / "speech-to-text" / "sample.wav"
TOKENS = ["<pad>", "<s>", "</s>", "<unk>", "|", *"ABCDEFGHIJKLMNOPQRSTUVWXYZ'"]


def random_recognizer() -> tf.Pipeline:
    """Return a small wav2vec2 with random weights, which recognizes single letters."""
    with tempfile.TemporaryDirectory() as folder:
        vocabulary = Path(folder) / "vocab.json"
        vocabulary.write_text(json.dumps({token: number for number, token in enumerate(TOKENS)}))
        tokenizer = tf.Wav2Vec2CTCTokenizer(str(vocabulary))
    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "conv_dim": [64] * 7}
    model = tf.Wav2Vec2ForCTC(tf.Wav2Vec2Config(vocab_size=len(TOKENS), **sizes)).eval()
    extractor = tf.Wav2Vec2FeatureExtractor()
    parts = {"model": model, "tokenizer": tokenizer, "feature_extractor": extractor}
    return tf.pipeline("automatic-speech-recognition", **parts, device="cpu")


def read(path: Path) -> dict[str, object]:
    """Return the samples of a WAV file with 16-bit PCM: float32 [samples] from -1 to 1, and their rate in Hz."""
    with wave.open(str(path)) as file:
        samples = np.frombuffer(file.readframes(file.getnframes()), np.int16).astype(np.float32) / 32768
        return {
            "raw": samples.reshape(-1, file.getnchannels()).mean(axis=1),
            "sampling_rate": file.getframerate(),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description="Speech recognition, eager and accelerated.")
    parser.add_argument("--model", default=MODEL, help="hub id or folder of a speech recognizer")
    parser.add_argument("--random-config", action="store_true", help="offline: a small model, random weights")
    parser.add_argument("--dtype", default="auto", help="a dtype of accelerate_for_cpu")
    parser.add_argument("--sound", type=Path, default=SOUND, help="a WAV file of at most 30 seconds")
    options = parser.parse_args()

    if options.random_config:
        eager = random_recognizer()
    else:
        eager = tf.pipeline(
            "automatic-speech-recognition", model=options.model, device="cpu", dtype="float32"
        )
    accelerated = accelerate_for_cpu(copy.deepcopy(eager), dtype=options.dtype)

    sound = read(options.sound)  # copied for each call: the pipeline removes its entries
    calls = {
        "eager": lambda: eager(dict(sound))["text"],
        "accelerated": lambda: accelerated(dict(sound))["text"],
    }
    texts = {name: call() for name, call in calls.items()}
    timings = interleaved(calls, rounds=3, calls=1)
    gain = speedup(timings["eager"], timings["accelerated"]).value
    similarity = difflib.SequenceMatcher(None, *texts.values(), autojunk=False).ratio()
    for name, text in texts.items():
        print(f"{name:12} {text.strip()}")
    print(f"\n{'':12} {'seconds':>8} {'speedup':>8}  agreement")
    print(f"{'eager':12} {timings['eager'].seconds.value:8.4f}")
    print(
        f"{'accelerated':12} {timings['accelerated'].seconds.value:8.4f} {gain:7.2f}x"
        f"  {similarity:.1%} of the letters equal"
    )


if __name__ == "__main__":
    main()
