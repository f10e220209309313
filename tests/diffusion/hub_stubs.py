"""pytest plugin: what diffusers' own tests of pipelines expect around them, on a machine without network.

That is the two tiny models of the hub that most of them load. Stand-ins for them lie in a cache of the hub in a temporary folder,
so that every `from_pretrained` finds them. Their words are not those of the originals: a test that compares an image with written
numbers fails, with acceleration and without.
"""

from __future__ import annotations

import os
import string
import tempfile
from importlib.util import find_spec
from pathlib import Path

_CACHE = tempfile.TemporaryDirectory(prefix="hub-")  # goes away with the process
os.environ["HF_HUB_CACHE"] = _CACHE.name  # read when huggingface_hub is imported

import torch  # noqa: E402
from diffusers.utils import import_utils  # noqa: E402
from transformers import (  # noqa: E402
    CLIPConfig,
    CLIPModel,
    CLIPTokenizer,
    T5Config,
    T5EncoderModel,
    T5Tokenizer,
)

_LETTERS = string.ascii_lowercase + string.digits + string.punctuation


def _folder(name: str) -> Path:
    """Where the hub's cache has the newest version of `name`."""
    model = Path(_CACHE.name, f"models--{name.replace('/', '--')}")
    (model / "refs").mkdir(parents=True)
    (model / "refs" / "main").write_text("0" * 40)
    return model / "snapshots" / ("0" * 40)


def _clip(folder: Path) -> None:
    words = (*_LETTERS, *(f"{letter}</w>" for letter in _LETTERS), "<|startoftext|>", "<|endoftext|>")
    vocabulary = {word: number for number, word in enumerate(words)}
    tokenizer = CLIPTokenizer(vocab=vocabulary, merges=[], model_max_length=77)
    tokenizer.save_pretrained(folder)
    size = {"hidden_size": 32, "intermediate_size": 37, "num_hidden_layers": 2, "num_attention_heads": 4}
    text = {
        **size,
        "vocab_size": 1000,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
    }
    vision = {**size, "image_size": 30, "patch_size": 2}
    CLIPModel(CLIPConfig(text_config=text, vision_config=vision, projection_dim=64)).save_pretrained(folder)


def _t5(folder: Path) -> None:
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -2.0)]
    pieces += [(letter, -3.0) for letter in string.ascii_uppercase + _LETTERS]
    T5Tokenizer(vocab=pieces, extra_ids=0, model_max_length=512).save_pretrained(folder)
    config = T5Config(
        vocab_size=1103, d_model=32, d_kv=8, d_ff=37, num_layers=5, num_heads=4, initializer_factor=0.002
    )
    T5EncoderModel(config).save_pretrained(folder)


# diffusers takes any part of optimum for this one, and its tests import it.
import_utils._optimum_quanto_available = bool(find_spec("optimum") and find_spec("optimum.quanto"))
torch.manual_seed(0)
_clip(_folder("hf-internal-testing/tiny-random-clip"))
_t5(_folder("hf-internal-testing/tiny-random-t5"))
