"""A model for every rule and stage: families of transformers, and image models."""

import warnings

import torch
from diffusers.models.attention_processor import Attention
from torch import nn
from torch.ao import quantization
from torch.nn.utils import weight_norm as hooked_weight_norm
from torch.nn.utils.parametrizations import weight_norm
from transformers import ConvNextConfig, ConvNextModel, ResNetConfig, ResNetModel, SwinConfig, SwinModel
from transformers.integrations.gguf.utils import GgufLinear

from tests.checkpoints.writers import fp8, gptq, stored_linear
from tests.rewrite.families import FAMILIES, VOCABULARY, Family

GPT = {"vocab_size": VOCABULARY, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64}
Q8_0 = 8  # the number of this kind of block
MIXTRAL = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_local_experts": 4,
}
ALL = FAMILIES | {
    "gpt2": Family("GPT2LMHeadModel", "GPT2Config", GPT, {}),
    "mixtral": Family("MixtralForCausalLM", "MixtralConfig", MIXTRAL, {}),
}


class Snake(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.alpha = nn.Parameter(torch.ones(1, channels, 1))

    def forward(self, sound):
        return sound + (self.alpha + 1e-9).reciprocal() * torch.sin(self.alpha * sound).pow(2)


class Picture(nn.Module):
    """What models of images and sound have and those of text have not, once each."""

    def __init__(self):
        super().__init__()
        self.patches = nn.Conv2d(3, 16, 2, stride=2)
        self.norm = nn.GroupNorm(4, 16)
        self.convolution = nn.Conv2d(16, 32, 3, padding=1)
        self.grouped = nn.Conv2d(32, 32, 3, padding=1, groups=2)
        self.folded = nn.Sequential(nn.Conv2d(32, 32, 3, padding=1), nn.BatchNorm2d(32))
        self.positions = weight_norm(nn.Conv1d(32, 32, 16, padding=8, groups=2), dim=2)
        self.wider = weight_norm(nn.Conv1d(32, 32, 3, padding=2, dilation=2))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            self.coarser = hooked_weight_norm(nn.Conv1d(32, 32, 3, padding=1))
        self.snake = Snake(32)
        self.finer = nn.ConvTranspose1d(32, 32, 4, 2, padding=1)
        self.larger = nn.ConvTranspose2d(32, 32, 2, 2)
        self.attention = Attention(query_dim=32, heads=2, dim_head=16, bias=True)

    def forward(self, image):
        pixels = self.folded(self.grouped(self.convolution(self.norm(self.patches(image)))))
        pixels = (pixels + self.larger(pixels)[..., ::2, ::2]).flatten(2)
        pixels = pixels + self.coarser(self.snake(self.wider(pixels)))
        pixels = pixels + self.positions(pixels)[..., 1:] + self.finer(pixels)[..., ::2]
        return self.attention(pixels.transpose(1, 2))


class Pictures:
    """A model of images in the form of a `Family`."""

    def __init__(self, make, height, width):
        self.make, self.height, self.width = make, height, width

    def build(self):
        torch.manual_seed(0)
        return self.make().eval()

    def run(self, model, batch):
        with torch.no_grad():
            output = model(torch.ones(1, 3, self.height, self.width).cumsum(-1) / self.width)
        return output if isinstance(output, torch.Tensor) else output[0]


def swin():
    return SwinModel(SwinConfig(image_size=56, embed_dim=32, depths=[2], num_heads=[2], window_size=7))


def resnet():
    return ResNetModel(
        ResNetConfig(embedding_size=32, hidden_sizes=[32, 64], depths=[2, 1], layer_type="basic")
    )


def convnext():
    return ConvNextModel(ConvNextConfig(hidden_sizes=[32, 64], depths=[1, 1], num_stages=2))


class FromFile(nn.Module):
    """Linears over the blocks of a GGUF file, the tensors of a GPTQ one in an order by activation, and 8 bits of floating point."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(64)
        self.query, self.key = (GgufLinear(64, 64, Q8_0) for _ in range(2))
        for linear in (self.query, self.key):
            blocks = torch.randint(0, 256, (64 * 2, 34), dtype=torch.uint8)
            blocks[:, :2] = torch.randn(64 * 2, 1).half().view(torch.uint8)
            linear.weight.data = blocks.view(64, -1)
        index = (torch.arange(64) // 32)[torch.randperm(64)]
        self.value = stored_linear(
            {"quant_method": "gptq", "bits": 4, "group_size": 32}, gptq(64, 64, index=index)
        )
        self.output = stored_linear({"quant_method": "fp8"}, fp8(64, 64, block=None))

    def forward(self, image):
        rows = self.norm(
            image[:, :, :4].reshape(-1, 64).repeat(5, 1)
        )  # more rows than ask for the host's kernel
        return self.query(rows) + self.key(rows) + self.value(rows) + self.output(rows)


class _SplitHead(nn.Module):
    """Scores of words by two matrices, as MobileBERT's."""

    def __init__(self):
        super().__init__()
        self.transform = nn.Sequential(nn.Linear(96, 96), nn.GELU())
        self.dense = nn.Linear(200, 64, bias=False)
        self.decoder = nn.Linear(32, 200)

    def forward(self, rows):
        both = torch.cat([self.decoder.weight.t(), self.dense.weight])
        return self.transform(rows) @ both + self.decoder.bias


class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = _SplitHead()

    def forward(self, image):
        return self.head(image.flatten()[:192].reshape(2, 96))


class Attending(nn.Module):
    """An encoder of torch's own, and an LSTM."""

    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(64, 4, 96, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.recurrent = nn.LSTM(64, 128)

    def forward(self, image):
        return self.recurrent(self.encoder(image[:, :, :8].flatten().repeat(2)[: 6 * 64].view(2, 3, 64)))[0]


def static():
    """A convolution that torch.ao has quantized with its input's range."""
    model = nn.Sequential(quantization.QuantStub(), nn.Conv2d(3, 16, 3), quantization.DeQuantStub()).eval()
    model.qconfig = quantization.get_default_qconfig("x86")
    prepared = quantization.prepare(model)
    prepared(torch.rand(1, 3, 8, 12))
    return quantization.convert(prepared).eval()


ALL["static"] = Pictures(static, 8, 12)
ALL["file"] = Pictures(FromFile, 8, 16)
ALL["torch"] = Pictures(Attending, 8, 16)
ALL["words"] = Pictures(Words, 8, 12)
ALL["picture"] = Pictures(Picture, 8, 12)
ALL["swin"] = Pictures(swin, 56, 56)
ALL["resnet"] = Pictures(resnet, 32, 32)
ALL["convnext"] = Pictures(convnext, 32, 32)


class Injected(Exception):
    """The failure that the tests inject."""
