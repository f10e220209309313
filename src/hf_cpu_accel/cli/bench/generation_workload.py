"""The workload of `hf-cpu-accel bench --task text-generation`: a model, its prompts, and the number of new tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hf_cpu_accel.cli import random_models
from hf_cpu_accel.cli.bench.workload import TEXT_GENERATION, source_title
from hf_cpu_accel.cli.loading import Load, blocks_of, load_eager, model_to_accelerate
from hf_cpu_accel.frontends.gguf import located
from hf_cpu_accel.measure.generation import plain_greedy

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel


@dataclass(frozen=True)
class Workload:
    """A decoder-only or encoder-decoder model that generates `new` tokens after prompts of `prompt` tokens.

    Attributes:
        title: name of the model.
        batch: number of prompts.
        prompt: tokens per prompt.
        new: tokens to generate per prompt.
        load: loads the model.
        blocks: loads a GGUF file with its weights in blocks; None for other models.
    """

    title: str
    batch: int
    prompt: int
    new: int
    load: Callable[[], PreTrainedModel]
    blocks: Load | None = None

    @property
    def facts(self) -> dict[str, object]:
        """Return the description of the workload for JSON."""
        return {
            "model": self.title,
            "task": TEXT_GENERATION,
            "batch": self.batch,
            "prompt": self.prompt,
            "new": self.new,
        }

    def __str__(self) -> str:
        return f"{self.title}, {TEXT_GENERATION}, {self.batch} x {self.prompt} tokens, {self.new} new"

    def build(self) -> PreTrainedModel:
        """Load the model in bfloat16 with a language modeling head, in eval mode, set to plain greedy search."""
        model = self.load()
        plain_greedy(model)
        return model

    def to_accelerate(self, eager: PreTrainedModel) -> PreTrainedModel:
        """Return the model to accelerate and compare with `eager`, the result of `build`."""
        model: PreTrainedModel = model_to_accelerate(eager, self.blocks)
        plain_greedy(model)
        return model

    def inputs(self, model: PreTrainedModel, seed: int = 0) -> dict[str, Tensor]:
        """Return random token ids and a full attention mask, both int64 [batch, prompt], the same for the same seed.

        Raises:
            ValueError: the model has fewer positions than tokens.
        """
        config = model.config.get_text_config()
        limit = getattr(config, "max_position_embeddings", None)
        longest = max(self.prompt, self.new) if config.is_encoder_decoder else self.prompt + self.new
        if limit is not None and longest > limit:
            raise ValueError(
                f"prompt={self.prompt}, new={self.new}: the model has positions for {limit} tokens; pass fewer"
            )
        # In published vocabularies the special tokens have the first ids.
        low = min(1000, config.vocab_size // 2)
        generator = torch.Generator().manual_seed(seed)
        ids = torch.randint(low, config.vocab_size, (self.batch, self.prompt), generator=generator)
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def workload(model: str | None, random_config: str | None, batch: int, prompt: int, new: int) -> Workload:
    """Check the arguments of the command line and return the workload. No weights are loaded.

    Raises:
        ValueError: a wrong argument; the message contains the remedy.
    """
    title = source_title(model, random_config)
    if new < 2:
        raise ValueError(f"new={new}: pass 2 or more; the time per token is measured after the first token")
    if random_config is not None:
        name, head = random_config, auto_class(random_models.config(random_config), random_config)
        return Workload(
            title, batch, prompt, new, lambda: random_models.build(name, head, dtype=torch.bfloat16)
        )
    assert model is not None
    path = model
    return Workload(title, batch, prompt, new, lambda: load(path), blocks_of(path, "AutoModelForCausalLM"))


def load(model: str) -> PreTrainedModel:
    """Load a published or local model that generates text, in bfloat16.

    Raises:
        OSError: no such model.
        ValueError: the model does not generate text.
    """
    from transformers import AutoConfig

    name, options = located(model)
    head = auto_class(AutoConfig.from_pretrained(name, **options), model)
    loaded: PreTrainedModel = load_eager(model, head, torch.bfloat16)
    return loaded


def auto_class(config: PreTrainedConfig, name: str) -> str:
    """Return the name of the transformers auto class with a language modeling head for this configuration.

    Args:
        config: configuration of the model.
        name: name of the model for the message.

    Raises:
        ValueError: the model does not generate text.
    """
    from transformers.models.auto import modeling_auto

    if type(config) in modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING:
        return "AutoModelForSeq2SeqLM"
    if type(config) in modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING:
        return "AutoModelForCausalLM"
    raise ValueError(
        f"{name} is a {config.model_type} model, which does not generate text; pass another model or --task"
    )
