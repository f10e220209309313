"""Methods of transformers' models that write: on an accelerated model each does what it does in eager, or nothing."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from functools import cache as once
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune
from transformers import (
    BertConfig,
    BertForMaskedLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    T5Config,
    T5ForConditionalGeneration,
)

from hf_cpu_accel import accelerate_for_cpu, restore
from hf_cpu_accel.check import row_error
from hf_cpu_accel.patching.acceleration import acceleration_of

VOCABULARY = 320
IDS = torch.randint(3, VOCABULARY - 16, (2, 8), generator=torch.Generator().manual_seed(0))
CLOSE = {"float32": 1e-3, "int8": 0.2}

_SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
_T5 = {
    "vocab_size": VOCABULARY,
    "d_model": 64,
    "d_kv": 16,
    "d_ff": 128,
    "num_layers": 2,
    "num_heads": 4,
    "decoder_start_token_id": 0,
}

MODELS: dict[str, Callable[[], Any]] = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**_SIZES)),
    "llama tied": lambda: LlamaForCausalLM(LlamaConfig(**_SIZES, tie_word_embeddings=True)),
    "bert": lambda: BertForMaskedLM(BertConfig(**_SIZES)),
    "t5": lambda: T5ForConditionalGeneration(T5Config(**_T5)),
}


def _table(model: Any) -> nn.Embedding:
    torch.manual_seed(3)
    return nn.Embedding(VOCABULARY, model.get_input_embeddings().embedding_dim)


def _head(model: Any) -> nn.Linear:
    torch.manual_seed(3)
    return nn.Linear(model.get_input_embeddings().embedding_dim, VOCABULARY)


def _of_kind(model: Any) -> Any:
    """Another model with weights of its own."""
    return next(other for build in MODELS.values() if type(other := build()) is type(model))


def _other_values(module: nn.Module) -> dict[str, Tensor]:
    return {name: value * 1.5 for name, value in module.state_dict().items()}


def _layer(model: Any) -> nn.Module:
    """The first layer."""
    return next(m for m in model.modules() if isinstance(m, nn.ModuleList))[0]


CALLS: dict[str, Callable[[Any], Any]] = {
    "resize up": lambda m: m.resize_token_embeddings(VOCABULARY + 16),
    "resize down": lambda m: m.resize_token_embeddings(VOCABULARY - 16),
    "resize to a multiple": lambda m: m.resize_token_embeddings(pad_to_multiple_of=128),
    "resize to what it is": lambda m: m.resize_token_embeddings(VOCABULARY),
    "resize not": lambda m: m.resize_token_embeddings(),
    "resize to nonsense": lambda m: m.resize_token_embeddings("many"),
    "resize positions": lambda m: m.resize_position_embeddings(64),
    "tie": lambda m: m.tie_weights(),
    "set inputs": lambda m: m.set_input_embeddings(_table(m)),
    "set outputs": lambda m: m.set_output_embeddings(_head(m)),
    "set decoder": lambda m: m.set_decoder(_of_kind(m).eval().get_decoder()),
    "initialize": lambda m: m.initialize_weights(),
    "init": lambda m: m.init_weights(),
    "post init": lambda m: m.post_init(),
    "add adapter": lambda m: m.add_adapter(None, "a"),
    "set adapter": lambda m: m.set_adapter("a"),
    "load adapter": lambda m: m.load_adapter("no such folder"),
    "delete adapter": lambda m: m.delete_adapter("a"),
    "enable adapters": lambda m: m.enable_adapters(),
    "disable adapters": lambda m: m.disable_adapters(),
    "dequantize": lambda m: m.dequantize(),
    "checkpoint": lambda m: m.gradient_checkpointing_enable(),
    "checkpoint not": lambda m: m.gradient_checkpointing_disable(),
    "attention": lambda m: m.set_attn_implementation("eager"),
    "experts": lambda m: m.set_experts_implementation("eager"),
    "require input gradients": lambda m: m.enable_input_require_grads(),
    "tag": lambda m: m.add_model_tags("tag"),
    "half": lambda m: m.half(),
    "double": lambda m: m.double(),
    "float": lambda m: m.float(),
    "to meta": lambda m: m.to("meta"),
    "to empty": lambda m: m.to_empty(device="meta"),
    "load": lambda m: m.load_state_dict(_other_values(m)),
    "load a part": lambda m: m.base_model.load_state_dict(_other_values(m.base_model)),
    "load a layer": lambda m: _layer(m).load_state_dict(_other_values(_layer(m))),
    "halve a part": lambda m: m.base_model.half(),
    "halve a layer": lambda m: _layer(m).half(),
    "resize a part": lambda m: m.base_model.resize_token_embeddings(VOCABULARY + 16),
    "tie a part": lambda m: m.base_model.tie_weights(),
    "set inputs of a part": lambda m: m.base_model.set_input_embeddings(_table(m)),
    "initialize a part": lambda m: m.base_model.init_weights(),
    "adapter in a part": lambda m: m.base_model.add_adapter(None, "a"),
    "prune": lambda m: prune.l1_unstructured(m.get_output_embeddings(), "weight", 0.5),
    "freeze": lambda m: m.requires_grad_(False),
    "share": lambda m: m.share_memory(),
    "clear gradients": lambda m: m.zero_grad(),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("dtype", CLOSE)
@pytest.mark.parametrize("name", ["llama", "bert"])  # with a head of its own, and with a tied one
def test_it_takes_effect_or_changes_nothing(name: str, dtype: str, call: str) -> None:
    eager, model = map(copy.deepcopy, _models(name, dtype))
    before, settings = _logits(model), model.config.to_dict()
    untouched = _logits(eager)

    took, takes = (_raises(m, CALLS[call]) for m in (model, eager))
    if took:
        assert acceleration_of(model) is not None
        assert torch.equal(_logits(model), before)
        assert model.config.to_dict() == settings
        restore(model)
        assert torch.equal(_logits(model), untouched)
        return
    assert not takes, "eager refuses it"
    expected = _logits(eager)
    assert row_error(_logits(model), expected) <= CLOSE[dtype]
    restore(model)
    assert torch.equal(_logits(model), expected)
    assert _shapes(model) == _shapes(eager)
    assert model.config.to_dict() == eager.config.to_dict()


DONE = ("resize up", "resize down", "resize to a multiple", "tie", "set inputs", "set outputs", "checkpoint")


@pytest.mark.parametrize("call", DONE)
@pytest.mark.parametrize("name", MODELS)
def test_what_is_done_is_not_refused(name: str, call: str) -> None:
    model = accelerate_for_cpu(MODELS[name]().eval(), dtype="int8")
    assert not _raises(model, CALLS[call])
    assert acceleration_of(model) is not None


def test_resized_embeddings_are_those_of_the_model() -> None:
    model = accelerate_for_cpu(MODELS["bert"]().eval(), dtype="int8")
    assert model.resize_token_embeddings(VOCABULARY + 16) is model.get_input_embeddings()


@pytest.mark.parametrize("call", ["resize up", "tie", "set inputs"])
def test_without_originals_it_is_refused(call: str) -> None:
    model = accelerate_for_cpu(MODELS["bert"]().eval(), dtype="int8", originals="drop")
    before = _logits(model)
    with pytest.raises(RuntimeError, match="originals"):
        CALLS[call](model)
    assert torch.equal(_logits(model), before)


def test_a_copy_of_a_model_inside_does_not_take_the_whole_along() -> None:
    model = accelerate_for_cpu(MODELS["llama"]().eval(), dtype="float32")
    part = copy.deepcopy(model.base_model)
    with pytest.raises(RuntimeError, match=r"of the accelerated model, or restore it"):
        part.tie_weights()
    assert not any(module is model for module in part.modules())


def test_all_methods_that_write_are_known() -> None:
    """What transformers adds shows up here: it is called above, or does not write."""
    tested = inspect.getsource(inspect.getmodule(test_all_methods_that_write_are_known))  # type: ignore[arg-type]
    beginnings = ("set_", "resize_", "tie_", "init_", "initialize_", "add_", "load_", "delete_", "enable_",
                  "disable_", "prune_", "dequantize", "gradient_checkpointing_", "post_init", "half", "float")  # fmt: skip
    names = {
        name
        for name in dir(PreTrainedModel)
        if name.startswith(beginnings) and callable(getattr(PreTrainedModel, name))
    }
    others = {
        "set_encoder": "a model with one of its own; as set_decoder",
        "set_use_kernels": "needs the package kernels",
        "set_extra_state": "of a module's own state",
        "set_submodule": "a swap of a module, as an assignment",
        "add_module": "a new module",
        "enable_peft_hotswap": "sets an attribute",
        "disable_input_require_grads": "takes back enable_input_require_grads",
        "init_parallel_plans": "sets an attribute",
    }
    assert {name for name in names if f"m.{name}(" not in tested} <= set(others)


@once
def _models(name: str, dtype: str) -> tuple[Any, Any]:
    """The eager model and the accelerated one."""
    torch.manual_seed(0)
    eager = MODELS[name]().eval()
    return eager, accelerate_for_cpu(copy.deepcopy(eager), dtype=dtype)


def _raises(model: Any, call: Callable[[Any], Any]) -> bool:
    torch.manual_seed(7)
    try:
        call(model)
    except Exception:  # whatever it is: the model is looked at
        return True
    return False


def _logits(model: Any) -> Tensor:
    decoder = {"decoder_input_ids": IDS[:, :5]} if model.config.is_encoder_decoder else {}
    with torch.no_grad():
        logits: Tensor = model(input_ids=IDS, **decoder).logits
    return logits


def _shapes(model: nn.Module) -> dict[str, torch.Size]:
    return {name: value.shape for name, value in model.state_dict().items()}
