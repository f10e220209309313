"""Examples of all kinds become calls; without any there are built-in ones; wrong ones are named."""

from itertools import pairwise

import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from torch import nn
from torch.utils.data import DataLoader

from hf_cpu_accel import accelerate_for_cpu, explain
from hf_cpu_accel.accuracy.built_in import built_in_calls
from hf_cpu_accel.accuracy.examples import make_examples
from hf_cpu_accel.accuracy.texts import built_in_texts
from hf_cpu_accel.hosts.find import find
from hf_cpu_accel.patching.acceleration import accelerated_parts
from tests.accuracy.models import bert, llama, token_ids


def layers(*sizes):
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(*pair) for pair in pairwise(sizes)), nn.Softmax(dim=-1)).eval()


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"accuracy": 0}, ValueError, r"accuracy=0: expected more than 0 and less than 1"),
        ({"accuracy": 1.5}, ValueError, r"accuracy=1.5: expected more than 0 and less than 1"),
        ({"accuracy": 1}, ValueError, r"accuracy=1: "),
        ({"accuracy": float("nan")}, ValueError, r"accuracy=nan: expected more than 0"),
        ({"accuracy": "high"}, TypeError, r"accuracy='high': expected a number between 0 and 1"),
        ({"accuracy": True}, TypeError, r"accuracy=True"),
        (
            {"accuracy": 0.9, "dtype": "int8"},
            ValueError,
            r"accuracy=0.9 chooses the dtypes, so dtype='int8' is not accepted",
        ),
        ({"examples": ["text"]}, ValueError, r"examples need accuracy=..., which is measured on them"),
        (
            {"accuracy": 0.9, "examples": "a text"},
            TypeError,
            r"examples is a str: .*pass a single example in a list",
        ),
        (
            {"accuracy": 0.9, "examples": torch.ones(3)},
            TypeError,
            r"examples is a Tensor: expected a list of",
        ),
        ({"accuracy": 0.9, "examples": {"input_ids": 1}}, TypeError, r"examples is a dict"),
        ({"accuracy": 0.9, "examples": 3}, TypeError, r"examples is a int"),
        ({"accuracy": 0.9, "examples": []}, ValueError, r"examples is empty"),
        ({"accuracy": 0.9, "examples": iter(())}, ValueError, r"examples is empty"),
        (
            {"accuracy": 0.9, "examples": [3.5]},
            TypeError,
            r"examples\[0\] is a float: expected a list of texts",
        ),
        ({"accuracy": 0.9, "examples": ["a text"]}, TypeError, r"examples\[0\]: texts need a tokenizer"),
        ({"accuracy": 0.9, "examples": [np.zeros(4)]}, TypeError, r"audio inputs need a feature extractor"),
        ({"accuracy": 0.9, "examples": [np.zeros((4, 4, 3))]}, TypeError, r"images need a image processor"),
        ({"accuracy": 0.9, "examples": [{}]}, TypeError, r"examples\[0\] is a dict with the keys \[\]"),
        (
            {"accuracy": 0.9, "examples": [token_ids(1)[0], {"input_ids": torch.ones(1, 99).long()}]},
            ValueError,
            r"examples\[1\] is not accepted by BertModel",
        ),
        ({"dtypes": {"encoder.layer.9": "int8"}}, ValueError, r"dtypes: 'encoder.layer.9' matches no module"),
    ],
)
def test_wrong_examples_are_named_and_change_nothing(options, error, message):
    model = bert()
    with pytest.raises(error, match=message):
        accelerate_for_cpu(model, **options)
    assert not accelerated_parts(model)


@pytest.mark.parametrize(
    "examples",
    [
        [torch.randn(3, 64), torch.randn(1, 64)],
        [(torch.randn(3, 64),)],
        [{"input": torch.randn(2, 64)}],
        DataLoader(torch.randn(10, 64), batch_size=4),
        (torch.randn(1, 64) for _ in range(100)),
    ],
    ids=["tensors", "tuples", "dicts", "loader", "generator"],
)
def test_any_module_accepts_its_inputs_as_examples(examples):
    model = accelerate_for_cpu(layers(64, 64, 64), accuracy=0.9, examples=examples)
    (choice,) = explain(model).choices
    assert choice.holds
    assert choice.layers == {"int8": 2}


def test_an_endless_iterable_is_cut():
    made = make_examples(*_of(layers(8, 8)), (torch.ones(1, 8) for _ in iter(int, 1)))
    assert (len(made.calls[0]), made.description) == (64, "64 examples")


def test_a_module_without_examples():
    with pytest.raises(ValueError, match=r"no built-in examples fit Sequential: pass examples"):
        accelerate_for_cpu(layers(8, 8), accuracy=0.9)


def _of(model):
    return model, find(model)


def tiny(name, **settings):
    config = getattr(transformers, f"{name}Config")
    sizes = {
        "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64, "d_model": 32,
        "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "vocab_size": 99,
        "encoder_attention_heads": 2, "decoder_attention_heads": 2, "d_ff": 64, "d_kv": 16, "num_layers": 1, "num_heads": 2,
    }  # fmt: skip
    known = {key: value for key, value in sizes.items() if key in config().to_dict() or key in settings}
    return config(**{**known, **settings})


@pytest.mark.parametrize(
    ("model", "names"),
    [
        (lambda: transformers.ViTModel(tiny("ViT", image_size=32, patch_size=8)), ["pixel_values"]),
        (lambda: transformers.T5Model(tiny("T5")), ["input_ids", "decoder_input_ids"]),
        (
            lambda: transformers.WhisperModel(
                tiny(
                    "Whisper",
                    max_source_positions=30,
                    num_mel_bins=8,
                    decoder_start_token_id=1,
                    pad_token_id=0,
                )
            ),
            ["input_features", "decoder_input_ids"],
        ),
        (
            lambda: transformers.Wav2Vec2Model(
                tiny(
                    "Wav2Vec2",
                    conv_dim=(32,) * 7,
                    num_conv_pos_embeddings=16,
                    num_conv_pos_embedding_groups=2,
                )
            ),
            ["input_values"],
        ),
        (lambda: llama(), ["input_ids"]),
        (lambda: transformers.ASTModel(tiny("AST", max_length=64, num_mel_bins=32)), ["input_values"]),
    ],
    ids=["vit", "t5", "whisper", "wav2vec2", "llama", "ast"],
)
def test_built_in_examples_fit_the_model(model, names):
    model = model().eval()
    calls = built_in_calls(model)
    assert [name for name in calls[0].kwargs if name != "use_cache"] == names
    assert "use_cache" not in calls[0].kwargs or calls[0].kwargs["use_cache"] is False
    for call in calls:
        call(model)
    again = built_in_calls(model)
    assert all(
        torch.equal(a.kwargs[n], b.kwargs[n]) for a, b in zip(calls, again, strict=True) for n in names
    )
    assert not torch.equal(calls[0].kwargs[names[0]], calls[1].kwargs[names[0]])


def test_image_processors_of_pipelines_convert_images():
    model = transformers.ViTForImageClassification(tiny("ViT", image_size=32, patch_size=8)).eval()
    processor = transformers.ViTImageProcessor(size={"height": 32, "width": 32})
    pipe = transformers.pipeline("image-classification", model=model, image_processor=processor, device="cpu")
    images = [Image.new("RGB", (40, 30), color) for color in ("red", "green")] + [
        np.full((9, 9, 3), 7, np.uint8)
    ]
    made = make_examples(*_of(pipe), images)
    assert [tuple(call.kwargs["pixel_values"].shape) for call in made.calls[0]] == [(1, 3, 32, 32)] * 3
    accelerate_for_cpu(pipe, accuracy=0.9, examples=images)
    assert explain(pipe).choices[0].holds


def test_built_in_texts_are_not_empty():
    texts = built_in_texts()
    assert len(texts) == len(set(texts)) >= 20
    assert all(text == text.strip() != "---" for text in texts)
