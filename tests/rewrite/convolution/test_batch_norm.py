"""Batch norms folded into the convolution before them: the same values for every reader, and restored."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import Tensor, nn

from hf_cpu_accel import accelerate_for_cpu, explain, restore
from hf_cpu_accel.rewrite.convolution.batch_norm import followers
from hf_cpu_accel.rewrite.convolution.folded_norm import FoldedNorm, fold_of
from tests.rewrite.convolution.convolution_blocks import Bottleneck, Fork, FrozenNorm, Layer, with_statistics

# {name: (host of 32 channels, how many norms it has)}
HOSTS = {
    "sequential": (lambda: nn.Sequential(nn.Conv2d(32, 48, 3), nn.BatchNorm2d(48), nn.ReLU()), 1),
    "layer": (lambda: Layer(32, 40, 3, act=nn.SiLU()), 1),
    "frozen": (lambda: Layer(32, 40, 3, act=nn.GELU(), frozen=True), 1),
    "pixels": (lambda: Layer(32, 64, 1, act=nn.ReLU()), 1),
    "bottleneck": (lambda: Bottleneck(32, 16, stride=2), 4),
    "depthwise": (
        lambda: nn.Sequential(nn.Conv2d(32, 32, 3, groups=32), nn.BatchNorm2d(32), nn.Hardswish()),
        1,
    ),
}
TOLERANCES = {"float32": 1e-5, "bfloat16": 0.02, "int8": 0.04}


def model_of(kind: str) -> tuple[nn.Module, Tensor, int]:
    make, norms = HOSTS[kind]
    image = torch.randn(2, 32, 11, 9).contiguous(memory_format=torch.channels_last)
    return with_statistics(nn.Sequential(make(), nn.MaxPool2d(2))), image, norms


def folded(model: nn.Module) -> int:
    return sum(isinstance(module, FoldedNorm) for module in model.modules())


def assert_close(output: Tensor, expected: Tensor, dtype: str) -> None:
    assert (output - expected).norm() <= TOLERANCES[dtype] * expected.norm()


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("kind", HOSTS)
def test_values_and_the_way_back(kind: str, dtype: str) -> None:
    model, image, norms = model_of(kind)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    expected = model(image).detach()
    accelerate_for_cpu(model, dtype=dtype)
    assert folded(model) == norms == explain(model).counts()["batch norm, folded"]
    for input in (image, image.contiguous(), image[:1]):
        output = model(input)
        assert type(output) is Tensor
        assert_close(output, expected[: len(input)], dtype)
    restore(model)
    assert folded(model) == 0
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert torch.equal(model(image), expected)


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("kind", ["sequential", "pixels", "depthwise"])
def test_who_reads_the_convolution_itself_gets_it(kind: str, dtype: str) -> None:
    """Although one channel of its norm multiplies it by nothing."""
    model, image, _ = model_of(kind)
    convolution = next(path for path, module in model.named_modules() if isinstance(module, nn.Conv2d))
    expected, output = model.get_submodule(convolution)(image).detach(), model(image).detach()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    accelerate_for_cpu(model, dtype=dtype)
    assert_close(model.get_submodule(convolution)(image) + 0, expected, dtype)
    assert_close(model.get_submodule(convolution)(image[0]), expected[0], dtype)
    for name, value in model.state_dict().items():
        assert_close(value.double(), state[name].double(), dtype)
    seen: list[Tensor] = []
    hook = model.get_submodule(convolution).register_forward_hook(
        lambda module, args, out: seen.append(out + 0)
    )
    assert_close(model(image), output, dtype)
    assert_close(seen[0], expected, dtype)
    hook.remove()
    assert_close(model(image), output, dtype)


@pytest.mark.parametrize("dtype", ["float32", "int8"])
@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_fold_too(duplicate: object, dtype: str) -> None:
    model, image, norms = model_of("bottleneck")
    accelerate_for_cpu(model, dtype=dtype)
    expected = model(image)
    other = duplicate(model)  # type: ignore[operator]
    restore(model)
    assert folded(other) == norms
    assert_close(other(image), expected, "float32")


def test_a_norm_keeps_its_class_and_its_state() -> None:
    model = with_statistics(nn.Sequential(nn.Conv2d(16, 16, 1), nn.BatchNorm2d(16)))
    names, norm = list(model.state_dict()), model[1]
    x, other = torch.randn(2, 16, 4, 4), torch.randn(2, 16, 5, 5)
    expected, alone = model(x).detach(), norm(other).detach()
    accelerate_for_cpu(model, dtype="float32")
    assert isinstance(model[1], nn.BatchNorm2d)
    assert list(model.state_dict()) == names
    torch.testing.assert_close(model[1](other), alone)
    model.bfloat16()
    assert_close(model(x.bfloat16()).float(), expected, "bfloat16")
    restore(model)
    assert model[1] is norm


@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_a_compiled_model_folds_too(dtype: str) -> None:
    """Pixels, whose weight can be traced."""
    model, image, _ = model_of("pixels")
    expected = model(image).detach()
    accelerate_for_cpu(model, dtype=dtype)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        assert_close(compiled(image), expected, dtype)


class _Shared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(16, 16, 3), nn.Conv2d(16, 16, 3)
        self.norm = nn.BatchNorm2d(16)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.first(x)) + self.norm(self.second(x))


class _TwoInputs(nn.Sequential):
    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        return super().forward(x) * scale


def _hooked() -> nn.Module:
    model = nn.Sequential(nn.Conv2d(16, 16, 3), nn.BatchNorm2d(16))
    model[1].register_forward_hook(lambda module, args, output: output * 2)
    return model


LEFT = {
    "read besides": lambda: Fork(16),
    "used twice": _Shared,
    "norm first": lambda: nn.Sequential(nn.BatchNorm2d(16), nn.Conv2d(16, 16, 3)),
    "activation between": lambda: nn.Sequential(nn.Conv2d(16, 16, 3), nn.ReLU(), nn.BatchNorm2d(16)),
    "statistics of the batch": lambda: nn.Sequential(
        nn.Conv2d(16, 16, 3), nn.BatchNorm2d(16, track_running_stats=False)
    ),
    "group norm": lambda: nn.Sequential(nn.Conv2d(16, 16, 3), nn.GroupNorm(4, 16)),
    "hooked": _hooked,
}


@pytest.mark.parametrize("kind", LEFT)
def test_what_is_not_a_norm_of_one_convolution_is_left(kind: str) -> None:
    model, x = with_statistics(nn.ModuleList([LEFT[kind]()])), torch.randn(2, 16, 9, 9)
    expected = model[0](x).detach()
    accelerate_for_cpu(model, dtype="float32")
    assert folded(model) == 0
    torch.testing.assert_close(model[0](x), expected, atol=1e-5, rtol=1e-4)


def test_hosts_that_take_more_than_an_image_are_not_looked_into() -> None:
    model = with_statistics(nn.ModuleList([_TwoInputs(nn.Conv2d(16, 16, 3), nn.BatchNorm2d(16))]))
    accelerate_for_cpu(model, dtype="float32")
    assert folded(model) == 0


def test_skipped_modules_keep_their_norms() -> None:
    for skipped in ("0.convolution", "0.norm"):
        model = with_statistics(nn.Sequential(Layer(16, 16, 3, act=nn.ReLU())))
        accelerate_for_cpu(model, skip_modules=[skipped])
        assert folded(model) == 0


def test_looking_leaves_nothing_behind() -> None:
    layer = with_statistics(Layer(16, 24, 3, act=nn.ReLU()))
    assert followers(layer, [layer.convolution], [layer.norm]) == [(layer.convolution, layer.norm)]
    assert not any((module._forward_hooks or module._forward_pre_hooks) for module in layer.modules())


def test_what_a_norm_does_is_told_by_its_values() -> None:
    norm = with_statistics(FrozenNorm(5))
    fold = fold_of(norm, 5)
    assert fold is not None
    x = torch.randn(2, 5, 3, 3)
    torch.testing.assert_close(fold.normalize(x), norm(x))
    assert fold_of(nn.BatchNorm2d(5).eval(), 6) is None
    assert fold_of(nn.BatchNorm2d(5), 5) is None  # in training mode
    assert fold_of(nn.InstanceNorm2d(5, affine=True).eval(), 5) is None
    assert fold_of(nn.PReLU(5).eval(), 5) is None
