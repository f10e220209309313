"""Embedding models and classifiers, loaded and accelerated for `Encoder`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from hf_cpu_accel.api import accelerate_for_cpu
from hf_cpu_accel.serve.encoders.encoder import LoadedEncoder
from hf_cpu_accel.serve.encoders.tokenizing import TextTokenizer


def load_sentence_transformer(name: str, source: str, **options: Any) -> LoadedEncoder:
    """A model of sentence-transformers; `options` are of `accelerate_for_cpu`.

    Raises:
        OSError: there is no such model.
        ValueError: sentence-transformers is not installed, or the model does not read texts.
    """
    if find_spec("sentence_transformers") is None:
        raise ValueError(f'{source} is a model of sentence-transformers: pip install "sentence-transformers"')
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(source, device="cpu").eval()
    accelerate_for_cpu(model, originals="drop", **options)
    limit = model.max_seq_length or _positions(model.tokenizer, model[0])
    # A text that a model's pooling is to leave the prompt out of would need that prompt's length.
    includes_prompt = all(getattr(module, "include_prompt", True) for module in model)
    prompts = {key: prompt for key, prompt in model.prompts.items() if prompt} if includes_prompt else {}
    return LoadedEncoder(
        name, TextTokenizer(model.tokenizer, limit), sentence_embedding(model), model, prompts=prompts
    )


def load_embedder(name: str, source: str, **options: Any) -> LoadedEncoder:
    """An encoder of transformers, whose embedding of a text is the mean of its last hidden states."""
    from transformers import AutoModel

    return _loaded(name, source, AutoModel, _mean_of_tokens, **options)


def load_classifier(name: str, source: str, **options: Any) -> LoadedEncoder:
    """A model of transformers that classifies texts or pairs of them; with one label it can rank, as cross-encoders do."""
    from transformers import AutoModelForSequenceClassification

    loaded = _loaded(name, source, AutoModelForSequenceClassification, _logits, **options)
    config = loaded.model.config
    labels = [config.id2label[number] for number in range(config.num_labels)]
    multi_label = config.problem_type == "multi_label_classification"
    return LoadedEncoder(name, loaded.tokenizer, loaded.forward, loaded.model, labels, multi_label)


def _loaded(
    name: str,
    source: str,
    auto_class: Any,
    forward: Callable[[nn.Module], Callable[[dict[str, Tensor]], Tensor]],
    **options: Any,
) -> LoadedEncoder:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(source)
    model = auto_class.from_pretrained(source, dtype=torch.float32).eval()
    accelerate_for_cpu(model, originals="drop", **options)
    return LoadedEncoder(name, TextTokenizer(tokenizer, _positions(tokenizer, model)), forward(model), model)


def _positions(tokenizer: Any, model: Any) -> int:
    """The longest text in tokens. Tokenizers without a limit name a huge number."""
    config: Any = getattr(model, "config", None)
    known = (tokenizer.model_max_length, getattr(config, "max_position_embeddings", None))
    return min((limit for limit in known if limit and limit < 10**9), default=8192)


def sentence_embedding(model: Any) -> Callable[[dict[str, Tensor]], Tensor]:
    """The forward pass of a model of sentence-transformers, without the normalization at its end."""
    from sentence_transformers.sentence_transformer.modules import Normalize

    modules = list(model)
    while isinstance(modules[-1], Normalize):
        modules.pop()  # whoever asks says whether

    def forward(inputs: dict[str, Tensor]) -> Tensor:
        features: Mapping[str, Any] = inputs
        for module in modules:
            features = module(features)
        embedding: Tensor = features["sentence_embedding"]
        return embedding

    return forward


def _mean_of_tokens(model: nn.Module) -> Callable[[dict[str, Tensor]], Tensor]:
    def forward(inputs: dict[str, Tensor]) -> Tensor:
        hidden_states = model(**inputs).last_hidden_state
        mask = inputs["attention_mask"][..., None].to(hidden_states.dtype)
        mean: Tensor = (hidden_states * mask).sum(1) / mask.sum(1)
        return mean

    return forward


def _logits(model: nn.Module) -> Callable[[dict[str, Tensor]], Tensor]:
    def forward(inputs: dict[str, Tensor]) -> Tensor:
        logits: Tensor = model(**inputs).logits
        return logits

    return forward
