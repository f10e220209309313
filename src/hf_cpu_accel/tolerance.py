"""All bounds on the difference between a replacement and its original, with the reason of each number.

By default a bound is one of `check.row_error`: the distance of the worst row, relative to the length of the row. An error (a wrong
activation, bias or mask) moves rows by 0.1 to 1; rounding moves them by at most these bounds. With quantization, a bound is as
large as the effect of one quantization step.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Tolerance:
    """Bounds for each dtype of the compared numbers, or of the packed weights."""

    float32: float
    bfloat16: float
    int8: float | None = None
    int4: float | None = None

    def of(self, dtype: torch.dtype | str, compute: torch.dtype | None = None) -> float:
        """Return the bound for a torch dtype, by its width, or for packed weights, by their name.

        Args:
            compute: the dtype of activations beside packed weights, whose rounding may exceed that of the weights.
        """
        if compute is torch.bfloat16:
            return max(self.of(dtype), self.bfloat16)
        if isinstance(dtype, torch.dtype):
            return self.float32 if dtype.itemsize >= 4 else self.bfloat16
        bound: float | None = getattr(self, dtype.removesuffix("-weight").replace("affine", "int"))
        if bound is None and dtype.startswith(
            "affine"
        ):  # the weights are identical, and activations are rounded to 16 bits
            return self.float32
        assert bound is not None
        return bound


@dataclass(frozen=True)
class Closeness:
    """Bounds for single values."""

    relative: float
    absolute: float


# A module or formula against another formula with the same weights: sums in another order; outputs rounded to 8 bits.
FORMULA = Tolerance(1e-5, 2e-2)
# Sums of three embeddings, and their norm. PyTorch rounds each sum of bfloat16 rows, the op rounds only the result.
EMBEDDINGS = Tolerance(2e-6, 2e-2)
# A value of a trace, recomputed from earlier values: a few sums of products of numbers around 1.
TRACED = Tolerance(1e-4, 2e-2)
# Packed weights against the original ones. Random inputs and weights give about 1e-6, 3e-3, 1.5e-2 and 0.1.
PACKED = Tolerance(1e-4, 2e-2, int8=0.1, int4=0.3)
# Experts in their checkpoint format: two consecutive products, each with inputs rounded to 16 bits. Random weights give up to
# 1.4e-4, MXFP4 weights 6e-5.
STORED_EXPERTS = Tolerance(1e-3, 2e-2)
# A fused layer against its original forward with the same packed weights: only rounding between ops differs. A wrong match, such
# as a missing activation, could hide below the bounds of PACKED for quantization, which are larger.
ENCODER_LAYER = Tolerance(2e-3, 2e-2)
# The same, if quantized inputs may round to the next step, which moves later values by this much.
DECODER_LAYER = Tolerance(2e-2, 3e-2)
RECURRENT_MIXER = Tolerance(2e-2, 4e-2)
FFN = Tolerance(2e-2, 4e-2)
CONVOLUTION_BLOCK = Tolerance(2e-2, 4e-2)  # relative to the value that the block adds to its input
# The worst pixel after up to twenty convolutions with the same packed weights, by the coarsest dtype.
RESIDUAL_BLOCKS = Tolerance(1e-3, 2e-2, int8=3e-2)

# Activations on a grid from -1000 to 1000. GELU and its tanh form differ by 5e-4.
ACTIVATION = Closeness(1e-5, 2e-6)
# Whether a norm is affine in its input, in float64 with numbers around 1.
AFFINE = Closeness(1e-9, 1e-9)
# Whether values are the numbers of features, in float64, times one factor.
FEATURE_NUMBERS = Closeness(1e-9, 0.0)
# Whether windows have the same bias, which is computed as a difference of scores.
WINDOW_BIAS = Closeness(0.0, 1e-4)
# Whether rows sum to 1 like attention weights, whose softmax may be in bfloat16.
ROW_SUMS = Closeness(1e-5, 1e-2)
# Factors from a trace, each a quotient of sums: relative to the largest factor.
SAME_FACTOR = 1e-4
# Whether all values of a tensor have the same factor: relative to each value, and the absolute error of a 0.
SAME_RATIO, SAME_ZERO = Tolerance(1e-5, 1e-2), 1e-6
# The rounding error of 1 - cosine for equal values times a factor.
SAME_DIRECTION = 1e-5
# A measured attention scale that counts as 1 / sqrt(n * head_size): the scales for n = 1, 2, 3 differ by at least 18 %.
MEASURED_SCALE = 1e-2
# A number in a graph that equals one in a formula: it may have passed through float32, with a rounding error of 6e-8.
SAME_NUMBER = 1e-6
# Biases that grow by one slope per key, by their dtype: the rounding error relative to the largest value of a row (a step of
# bfloat16 is 2^-8 of a number), and the distance of scores from a line.
SLOPES, LINE = Tolerance(1e-5, 2.0**-6), Tolerance(1e-4, 2.0**-7)
# An error that can only be float32 rounding: no other candidate needs to be tried.
EXACT = 1e-5
# The change of an output relative to its largest number if padding is read; rounding changes it by less.
MOVED = 1e-3

# Bounds of `row_error` for small rows are relative to this share of the largest row, because a row near 0 has no direction.
SMALL_ROW = 1e-2
# With quantization or a choice of experts, a number between two steps may round to either, which moves the few rows that contain
# it. FEW_ROWS: these rows may differ by this many tolerances (1.5 was measured for rows of 768). MOST_ROWS: this share of all
# rows (at most 7 % of rows were moved) must be within OTHER_ROWS tolerances.
FEW_ROWS, MOST_ROWS, OTHER_ROWS = 5, 0.75, 0.1

# Logits of a sequence in a batch against those of the sequence alone. Other sums move quantized inputs by single steps, which is
# a few hundredths. An ignored mask or position moves logits by more than this.
BATCHED = 0.05
# Chunks of a graph against the whole graph: other sums in each of several layers.
LAYERWISE = Tolerance(1e-3, 5e-2)
# A product with a matrix of three entries against PyTorch: only the order of two additions differs.
MATRIX_PRODUCT = Closeness(1e-5, 1e-6)
# Integers of quantized outputs by two engines, which may round to either of two steps.
QUANTIZED_OUTPUT = Closeness(0.0, 1.0)
# The ops of PyTorch against float64: rounding of sums; of bfloat16 inputs and outputs; of 8-bit inputs.
PROVIDER = Tolerance(1e-5, 1e-2, int8=2e-2)
# Sums of 144 products of random numbers, about 12, in bfloat16: the rounding error of the output is 2^-8 of it.
PROVIDER_CONVOLUTION = Closeness(0.02, 0.1)
