"""Encoder layers and calls for the tests of encoder_layer: every option that a family has."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Case:
    batch: int = 2
    length: int = 19
    features: int = 64
    heads: int = 4
    head_size: int = 16
    intermediate: int = 96
    weights: str = "float32"
    dtype: torch.dtype = torch.float32
    pre_norm: bool = False
    activation: str = "gelu"
    mask: str = "none"
    qkv_order: tuple[int, int, int] = (0, 1, 2)
    biases: bool = True
    bf16_intermediates: bool = False
    norm: str = "layer_norm"
    gated: bool = False
    layer_scale: bool = False
    relative: int = 0  # tokens before and after, that have a bias of their own
    rotary: int = 0  # features of a head
    window: int | None = None
    positions: str = ""  # vectors of relative positions: "keys", "queries" or "keys and queries"
    scattered: int = 0  # tokens of sequences that lie anywhere in the batch

    def __str__(self) -> str:
        sizes = (
            f"{self.batch}x{self.length}x{self.features}-{self.heads}x{self.head_size}-{self.intermediate}"
        )
        when = "before" if self.pre_norm else "after"
        weights = f"{self.weights}{'-bf16-intermediates' * self.bf16_intermediates}"
        what = f"{weights}-{str(self.dtype)[6:]}-{when}-{self.mask}-{self.norm}"
        more = f"{'-gated' * self.gated}{'-layer-scale' * self.layer_scale}"
        more += f"-{self.positions}" if self.positions else ""
        return f"{sizes}-{what}{more}-{self.relative}-{self.rotary}-{self.window}-{self.scattered}"


PADDINGS = ["right padding", "left padding", "holes", "one sequence empty", "all empty"]
MASKS = ["bool keys", "bool per query", "float per head", "bfloat16 keys"]
CASES = [
    Case(),
    Case(batch=1, length=1),
    Case(batch=1, length=1, mask="right padding"),
    Case(
        batch=3, length=33, features=47, heads=1, head_size=32, intermediate=33
    ),  # ragged in every dimension but the heads'
    Case(
        batch=2, length=130, features=96, heads=2, head_size=32, activation="gelu_tanh"
    ),  # many tokens per thread
    Case(batch=16, length=40, mask="right padding"),
    Case(qkv_order=(2, 0, 1), pre_norm=True, activation="relu"),
    Case(biases=False, activation="silu"),
    *(Case(mask=mask, pre_norm=before) for mask in PADDINGS for before in (False, True)),
    *(Case(mask=mask) for mask in MASKS),
    *(
        Case(
            batch=3,
            length=length,
            weights=weights,
            dtype=dtype,
            mask="right padding",
            pre_norm=before,
            bf16_intermediates=narrow,
        )
        for weights in ("bfloat16", "int8")
        for narrow in (False, True)
        for dtype in (torch.float32, torch.bfloat16)
        for length in (9, 70)
        for before in (False, True)
    ),
    Case(dtype=torch.bfloat16),
    # T5: RMS norms, gated or not, a bias for distances that is longer or shorter than the text.
    *(
        Case(
            length=length,
            norm="rms_norm",
            pre_norm=True,
            biases=False,
            gated=gated,
            activation="gelu_tanh" if gated else "relu",
            relative=relative,
            mask=mask,
            weights=weights,
            bf16_intermediates=weights != "float32",
        )
        for length, relative, mask in (
            (19, 5, "right padding"),
            (70, 100, "holes"),
            (300, 20, "left padding"),
        )
        for gated, weights in ((False, "float32"), (True, "float32"), (True, "bfloat16"), (True, "int8"))
    ),
    # ModernBERT, Nomic: positions that are turned, windows, layers without a first norm.
    *(
        Case(
            batch=3,
            length=length,
            pre_norm=norm != "after",
            norm="none" if norm == "none" else "layer_norm",
            gated=True,
            rotary=rotary,
            window=window,
            mask=mask,
            dtype=dtype,
            bf16_intermediates=window == 4,
            weights="int8" if window == 4 else "float32",
        )
        for length, rotary, window, norm, mask, dtype in (
            (9, 16, None, "after", "right padding", torch.float32),
            (33, 12, 4, "none", "left padding", torch.bfloat16),
            (300, 16, 64, "before", "right padding", torch.float32),
            (300, 16, 64, "before", "float per head", torch.float32),
            (40, 2, 1, "before", "holes", torch.bfloat16),
        )
    ),
    # DINOv2, BEiT: gains; what is attended to besides the padding.
    *(
        Case(layer_scale=True, pre_norm=True, dtype=dtype, mask=mask)
        for dtype in (torch.float32, torch.bfloat16)
        for mask in (
            "none",
            "right padding",
            "float per head, padded",
            "bool per query, holes",
            "bfloat16 keys, holes",
        )
    ),
    Case(batch=16, length=40, layer_scale=True, pre_norm=True, gated=True, rotary=16),
    # Attention in integers: more keys than one block of them, ragged sizes, masks, queries in several blocks.
    *(
        Case(
            batch=1,
            length=length,
            heads=2,
            head_size=head_size,
            weights="int8",
            bf16_intermediates=True,
            mask=mask,
        )
        for length, head_size, mask in (
            (300, 48, "none"),
            (33, 80, "holes"),
            (270, 16, "float per head"),
            (45, 128, "bool per query"),
            (3, 272, "none"),
        )
    ),
]
CASES += [
    # Swin: windows of an image, each with a mask of its own, one for all, or those of one image for each of several.
    Case(
        batch=batch,
        length=length,
        scattered=scattered,
        mask=mask,
        pre_norm=True,
        weights=weights,
        dtype=dtype,
        bf16_intermediates=weights != "float32",
    )
    for batch, length, scattered in ((1, 36, 9), (2, 48, 16), (1, 784, 49), (3, 60, 20))
    for mask in ("none", "windows", "window")
    for weights, dtype in (
        ("float32", torch.float32),
        ("bfloat16", torch.float32),
        ("bfloat16", torch.bfloat16),
        ("int8", torch.float32),
    )
]


CASES += [
    # DeBERTa: vectors of relative positions, of keys, queries or both, for one block of keys and more, few rows and many.
    Case(
        batch=batch,
        length=length,
        heads=2,
        head_size=head_size,
        positions=positions,
        mask=mask,
        weights=weights,
        dtype=dtype,
        bf16_intermediates=weights != "float32" and dtype is torch.float32,
        scattered=scattered,
    )
    for batch, length, head_size, positions, mask, scattered in (
        (1, 1, 16, "keys and queries", "none", 0),
        (2, 5, 48, "keys and queries", "holes", 0),
        (3, 33, 16, "keys and queries", "right padding", 0),
        (1, 128, 64, "keys and queries", "none", 0),
        (2, 130, 32, "keys", "left padding", 0),
        (2, 131, 32, "queries", "float per head", 0),
        (1, 523, 80, "keys and queries", "one sequence empty", 0),
        (1, 290, 16, "keys and queries", "float per head, padded", 0),
        (16, 41, 16, "keys and queries", "right padding", 0),
        (2, 48, 16, "keys and queries", "windows", 16),
    )
    for weights, dtype in (
        ("float32", torch.float32),
        ("bfloat16", torch.float32),
        ("bfloat16", torch.bfloat16),
        ("int8", torch.float32),
        ("int4", torch.float32),
    )
]
