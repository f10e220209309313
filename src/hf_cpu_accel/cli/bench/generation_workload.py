"""What `hf-cpu-accel bench --task text-generation` runs: a model that writes, a prompt, and how much it is to write."""

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
    """One model, decoder-only or encoder-decoder, that generates `new` tokens after prompts of `prompt` tokens.

    blocks: what loads the weights of a GGUF file as they are.
    """

    title: str
    batch: int
    prompt: int
    new: int
    load: Callable[[], PreTrainedModel]
    blocks: Load | None = None

    @property
    def facts(self) -> dict[str, object]:
        """What names the workload in results."""
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
        """The model in bfloat16 with a language modeling head, in eval mode, set to plain greedy search."""
        model = self.load()
        plain_greedy(model)
        return model

    def to_accelerate(self, eager: PreTrainedModel) -> PreTrainedModel:
        """Return what is accelerated beside `eager`, which `build` has built."""
        model: PreTrainedModel = model_to_accelerate(eager, self.blocks)
        plain_greedy(model)
        return model

    def inputs(self, model: PreTrainedModel, seed: int = 0) -> dict[str, Tensor]:
        """Random token ids and a full attention mask, both int64 [batch, prompt]; the same for the same seed.

        Raises ValueError if the model has no positions for so many tokens.
        """
        config = model.config.get_text_config()
        limit = getattr(config, "max_position_embeddings", None)
        longest = max(self.prompt, self.new) if config.is_encoder_decoder else self.prompt + self.new
        if limit is not None and longest > limit:
            raise ValueError(
                f"prompt={self.prompt}, new={self.new}: the model has positions for {limit} tokens; pass fewer"
            )
        # Published vocabularies keep the special tokens in the first ids.
        low = min(1000, config.vocab_size // 2)
        generator = torch.Generator().manual_seed(seed)
        ids = torch.randint(low, config.vocab_size, (self.batch, self.prompt), generator=generator)
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def workload(model: str | None, random_config: str | None, batch: int, prompt: int, new: int) -> Workload:
    """Check the arguments of the command line and make the workload; loads no weights yet.

    Raises ValueError naming the argument and the remedy.
    """
    title = source_title(model, random_config)
    if new < 2:
        raise ValueError(f"new={new}: two tokens are the fewest that have a time between them")
    if random_config is not None:
        name, head = random_config, auto_class(random_models.config(random_config), random_config)
        return Workload(
            title, batch, prompt, new, lambda: random_models.build(name, head, dtype=torch.bfloat16)
        )
    assert model is not None
    path = model
    return Workload(title, batch, prompt, new, lambda: load(path), blocks_of(path, "AutoModelForCausalLM"))


def load(model: str) -> PreTrainedModel:
    """A published or local model that generates text, in bfloat16.

    Raises OSError if there is no such model, ValueError if it does not generate.
    """
    from transformers import AutoConfig

    name, options = located(model)
    head = auto_class(AutoConfig.from_pretrained(name, **options), model)
    loaded: PreTrainedModel = load_eager(model, head, torch.bfloat16)
    return loaded


def auto_class(config: PreTrainedConfig, name: str) -> str:
    """The transformers auto class that gives a model of this configuration its language modeling head.

    Raises ValueError if it has none that generates; `name` is how the message calls the model.
    """
    from transformers.models.auto import modeling_auto

    if type(config) in modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING:
        return "AutoModelForSeq2SeqLM"
    if type(config) in modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING:
        return "AutoModelForCausalLM"
    raise ValueError(
        f"{name} is a {config.model_type} model, which does not generate text; give another task"
    )
