"""The Space `image-generation` without its page: the weights that are in its folder, and a few steps of their training."""

import sys

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits
from sklearn.neighbors import KNeighborsClassifier

from hf_cpu_accel.serve.comparison import Pair
from tests.spaces.folders import FOLDERS, module_of

drawing = module_of("image-generation", "drawing")


@pytest.fixture(scope="module")
def pair():
    return Pair(drawing.load(), dtype="float32")


def test_draws_the_requested_digit(pair):
    examples = load_digits()
    reader = KNeighborsClassifier(5).fit(examples.data, examples.target)
    right = 0
    for digit in (0, 2, 5, 8):
        images = drawing.draw(pair.accelerated, digit, 8, 12, seed=digit)
        assert images.shape == (8, drawing.SIZE, drawing.SIZE)
        assert 0 <= images.min() < 0.05
        assert 0.95 < images.max() <= 1
        small = 16 * torch.nn.functional.avg_pool2d(images[None], 2)[0]
        right += int((reader.predict(small.reshape(8, -1).numpy()) == digit).sum())
    assert right >= 24, f"{right} of 32"


def test_both_models_draw_the_same(pair):
    eager, accelerated = (drawing.draw(model, 3, 3, 4, seed=1) for model in (pair.eager, pair.accelerated))
    torch.testing.assert_close(accelerated, eager, rtol=0, atol=1e-3)
    assert torch.equal(eager, drawing.draw(pair.eager, 3, 3, 4, seed=1))
    assert not torch.equal(eager, drawing.draw(pair.eager, 3, 3, 4, seed=2))
    times = drawing.measure(pair, 3, 2, 1, seed=1)
    assert (times.amount, times.unit) == (2, "images")


def test_weights_are_small_and_are_of_the_model_that_is_trained(pair):
    assert (drawing.WEIGHTS / "diffusion_pytorch_model.safetensors").stat().st_size <= 2_000_000
    shapes = {name: weight.shape for name, weight in drawing.new_unet().state_dict().items()}
    assert {name: weight.shape for name, weight in pair.eager.state_dict().items()} == shapes


def test_sheet_has_four_in_a_row_dark_on_white():
    images = torch.zeros(5, drawing.SIZE, drawing.SIZE)
    images[4] = 1
    page = drawing.sheet(images, width=32)
    assert page.size == (128, 64)
    pixels = np.asarray(page)
    assert (pixels[:32] == 255).all()
    assert (pixels[32:, :32] == 0).all()
    assert (pixels[32:, 32:] == 255).all()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((10, 1, 1, 0), "The digit is 10; enter a whole number from 0 to 9"),
        ((1, 0, 1, 0), "The number of images is 0"),
        ((1, 17, 1, 0), "The number of images is 17; enter a whole number from 1 to 16"),
        ((1, 1, 51, 0), "The number of steps is 51"),
        ((1, 1, 1, -1), "The seed is -1"),
        ((1.5, 1, 1, 0), "The digit is 1.5"),
    ],
)
def test_invalid_settings_are_rejected(pair, arguments, message):
    with pytest.raises(ValueError, match=message):
        drawing.draw(pair.eager, *arguments)


def test_training_lowers_the_loss(monkeypatch):
    monkeypatch.setattr(sys, "path", [str(FOLDERS / "image-generation"), *sys.path])
    train = module_of("image-generation", "train")
    images, labels = train.digits()
    assert images.shape == (1797, 1, drawing.SIZE, drawing.SIZE)
    assert (images.min(), images.max()) == (-1, 1)
    assert labels.unique().tolist() == list(range(drawing.DIGITS))
    unet = drawing.new_unet()
    assert train.train(unet, steps=12, batch_size=8, learning_rate=3e-3) < 0.95
    monkeypatch.delitem(sys.modules, "drawing")
