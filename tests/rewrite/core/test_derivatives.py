"""Derivatives of accelerated models equal those of eager, or raise an error that names `restore`; they are never zeros or None."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, func, nn
from torch.autograd import forward_ad
from transformers import (
    BertConfig,
    BertModel,
    LlamaConfig,
    LlamaForCausalLM,
    ResNetConfig,
    ResNetModel,
    T5Config,
    T5EncoderModel,
    ViTConfig,
    ViTModel,
)

from hf_cpu_accel import accelerate_for_cpu, restore
from hf_cpu_accel.ops.derivatives import TransformError

SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
Run = Callable[[Tensor], Tensor]


def mlp() -> nn.Module:
    sizes = nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64), nn.LayerNorm(64), nn.Linear(64, 10)
    return nn.Sequential(*sizes)


def cnn() -> nn.Module:
    first = nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()
    rest = nn.Conv2d(16, 16, 3, stride=2), nn.GroupNorm(4, 16), nn.SiLU(), nn.ConvTranspose2d(16, 8, 2, 2)
    return nn.Sequential(*first, *rest, nn.Flatten())


def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
    return nn.TransformerEncoder(layer, 2)


class First(nn.Module):
    """The first output of an LSTM, for vectors of 64 as well."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(64, 64, num_layers=2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.lstm(x)[0]
        return output


# What makes a model, the shape of its input, the name of that, and of the output.
MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], str | None, str | None]] = {
    "MLP": (mlp, (5, 64), None, None),
    "CNN": (cnn, (2, 3, 16, 16), None, None),
    "LSTM": (First, (2, 5, 64), None, None),
    "TransformerEncoder": (encoder, (2, 5, 32), None, None),
    "BERT": (
        lambda: BertModel(BertConfig(vocab_size=99, **SIZES)),
        (2, 7, 32),
        "inputs_embeds",
        "last_hidden_state",
    ),
    "ViT": (
        lambda: ViTModel(ViTConfig(image_size=32, patch_size=8, **SIZES)),
        (2, 3, 32, 32),
        "pixel_values",
        "last_hidden_state",
    ),
    "ResNet": (
        lambda: ResNetModel(ResNetConfig(embedding_size=16, hidden_sizes=[16, 32], depths=[1, 1])),
        (2, 3, 32, 32),
        "pixel_values",
        "last_hidden_state",
    ),
    "T5": (
        lambda: T5EncoderModel(
            T5Config(d_model=32, d_ff=64, d_kv=16, num_layers=2, num_heads=2, vocab_size=99)
        ),
        (2, 7, 32),
        "inputs_embeds",
        "last_hidden_state",
    ),
    "Llama": (
        lambda: LlamaForCausalLM(LlamaConfig(vocab_size=99, **SIZES)),
        (2, 7, 32),
        "inputs_embeds",
        "logits",
    ),
}


def reverse(run: Run, x: Tensor, _: Tensor) -> Tensor:
    leaf = x.clone().requires_grad_()
    return torch.autograd.grad(run(leaf).sin().sum(), leaf)[0]


def twice(run: Run, x: Tensor, _: Tensor) -> Tensor:
    leaf = x.clone().requires_grad_()
    first = torch.autograd.grad(run(leaf).sin().sum(), leaf, create_graph=True)[0]
    return torch.autograd.grad(first.square().sum(), leaf)[0]


def dual(run: Run, x: Tensor, v: Tensor) -> Tensor:
    with forward_ad.dual_level():
        tangent = forward_ad.unpack_dual(run(forward_ad.make_dual(x, v))).tangent
        return torch.zeros(()) if tangent is None else tangent.clone()


def quiet_dual(run: Run, x: Tensor, v: Tensor) -> Tensor:
    with torch.no_grad():
        return dual(run, x, v)


DERIVATIVES: dict[str, Callable[[Run, Tensor, Tensor], Tensor]] = {
    "reverse": reverse,
    "double backward": twice,
    "dual": dual,
    "dual under no_grad": quiet_dual,
    "grad": lambda run, x, _: func.grad(lambda x: run(x).sin().sum())(x),
    "vjp": lambda run, x, _: func.vjp(run, x)[1](torch.ones_like(run(x).detach()))[0],
    "jvp": lambda run, x, v: func.jvp(run, (x,), (v,))[1],
    "jacrev": lambda run, x, _: func.jacrev(lambda x: run(x).flatten(1).mean(1))(x),
    "linearize": lambda run, x, v: func.linearize(run, x)[1](v),
    "vmap": lambda run, x, v: func.vmap(run)(torch.stack((x, v))),
    "vmap of rows": lambda run, x, _: func.vmap(lambda row: run(row[None])[0])(x),
}


class Case:
    """A model, its input, a direction, and each derivative in eager: None where eager raises."""

    def __init__(self, name: str) -> None:
        self.name = name
        make, shape, self._input, self._output = MODELS[name]
        torch.manual_seed(0)
        self.model = make().eval()
        self.x, self.v = torch.randn(shape), torch.randn(shape)
        self.eager = {kind: self._attempt(kind) for kind in DERIVATIVES}
        accelerate_for_cpu(self.model, dtype="float32")

    def run(self, x: Tensor) -> Tensor:
        if self._input is None:
            output: Tensor = self.model(x)
            return output
        given: Tensor = getattr(self.model(**{self._input: x}), str(self._output))
        return given

    def derivative(self, kind: str) -> Tensor:
        return DERIVATIVES[kind](self.run, self.x, self.v).detach()

    def _attempt(self, kind: str) -> Tensor | None:
        try:
            return self.derivative(kind)
        except (RuntimeError, NotImplementedError):  # vmap and forward mode do not know every op of torch
            return None


@pytest.fixture(scope="module", params=MODELS)
def case(request: pytest.FixtureRequest) -> Iterator[Case]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield Case(request.param)


def check(case: Case, kind: str) -> None:
    expected = case.eager[kind]
    try:
        found = case.derivative(kind)
    except (RuntimeError, NotImplementedError) as error:
        if expected is not None and "hf_cpu_accel.restore" not in str(error):
            raise
        return
    assert expected is not None
    torch.testing.assert_close(found, expected, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("kind", DERIVATIVES)
def test_derivatives_are_those_of_eager_or_refused(case: Case, kind: str) -> None:
    check(case, kind)
    with torch.no_grad():
        outputs = [case.run(case.x) for _ in range(2)]
    torch.testing.assert_close(outputs[0], outputs[1])
    check(case, kind)  # nor does it matter what was called before


def test_an_accelerated_model_is_a_constant_of_transforms(case: Case) -> None:
    """Images are refused: torch makes tensors of the transform out of what lies between two layers."""
    factor = torch.tensor(0.5)

    def scaled(factor: Tensor) -> Tensor:
        return (factor * case.run(case.x)).sin().sum()

    with torch.no_grad():
        output = case.run(case.x)
    expected = func.grad(lambda factor: (factor * output).sin().sum())(factor)
    transforms = {
        "grad": lambda: func.grad(scaled)(factor),
        "jvp": lambda: func.jvp(scaled, (factor,), (factor,))[1] / factor,
    }
    for transform in transforms.values():
        if case.name in ("CNN", "ResNet"):
            with pytest.raises(
                TransformError, match=r"hf_cpu_accel.restore\(model\) first, or call the model outside"
            ):
                transform()
        else:
            torch.testing.assert_close(transform(), expected, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("name", MODELS)
def test_parameters_that_ask_for_gradients_again_get_them_or_an_error(name: str) -> None:
    case = Case(name)
    assert not any(p.requires_grad for p in case.model.parameters())
    for parameter in case.model.parameters():
        parameter.requires_grad_()
    named = {
        n: p for n, p in case.model.named_parameters() if n.partition(".")[0] not in ("shared", "pooler")
    }
    try:
        loss = case.run(case.x).sin().sum()
    except RuntimeError as error:
        if "hf_cpu_accel.restore" not in str(error):
            raise
        return
    gradients = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
    assert all(gradient is not None for gradient in gradients), named.keys()


def test_after_restore_derivatives_are_as_before(case: Case) -> None:
    restore(case.model)
    try:
        for kind, expected in case.eager.items():
            if expected is not None:
                torch.testing.assert_close(case.derivative(kind), expected)
    finally:
        accelerate_for_cpu(case.model, dtype="float32")
