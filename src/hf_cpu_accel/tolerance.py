"""How far what we put in the place of something may be from it: every bound, and why it is that number.

Unless it says otherwise a bound is one of `verify.row_error`: the distance of the worst row, relative to its length. What is wrong
(an activation, a bias, a mask) moves rows by 0.1 to 1, rounding by what stands here; where quantization stands between, a bound is
as large as one step of it makes rows move.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Tolerance:
    """Bounds by the dtype of the numbers that are compared, or of the packed weights that made them."""

    float32: float
    bfloat16: float
    int8: float | None = None
    int4: float | None = None

    def of(self, dtype: torch.dtype | str) -> float:
        """Of a dtype of torch, by its width, or of packed weights, by their name."""
        if isinstance(dtype, torch.dtype):
            return self.float32 if dtype.itemsize >= 4 else self.bfloat16
        bound: float | None = getattr(self, dtype.removesuffix("-weight").replace("affine", "int"))
        if bound is None and dtype.startswith(
            "affine"
        ):  # the same weights: activations are rounded to 16 bits
            return self.float32
        assert bound is not None
        return bound


@dataclass(frozen=True)
class Closeness:
    """Bounds of values one by one."""

    relative: float
    absolute: float

    def holds(self, values: Tensor, reference: Tensor) -> bool:
        return torch.allclose(values, reference, rtol=self.relative, atol=self.absolute)


# A module or formula against another formula of the same weights: sums in another order; outputs rounded to 8 bits.
FORMULA = Tolerance(1e-5, 2e-2)
# Sums of three rows that were looked up, and their norm. Torch rounds every sum of bfloat16 rows, the op only the result.
EMBEDDINGS = Tolerance(2e-6, 2e-2)
# What a trace saw, made again from what it saw before: a few sums of products of numbers around 1.
TRACED = Tolerance(1e-4, 2e-2)
# Packed weights against the original ones. Random inputs and weights give about 1e-6, 3e-3, 1.5e-2 and 0.1.
PACKED = Tolerance(1e-4, 2e-2, int8=0.1, int4=0.3)
# Experts as a checkpoint stores them: two products one after another, each of inputs that are rounded to 16 bits. Random
# ones gave up to 1.4e-4, those of MXFP4 6e-5.
STORED_EXPERTS = Tolerance(1e-3, 2e-2)
# A fused layer against its own forward over the same packed weights: what is left is rounding between the ops. A wrong match (no
# activation, say) may hide below the bounds of quantization, which is why those of PACKED are not used.
ENCODER_LAYER = Tolerance(2e-3, 2e-2)
# The same, where quantized inputs may fall on the other side of a step: one moves what comes after by so much.
DECODER_LAYER = Tolerance(2e-2, 3e-2)
RECURRENT_MIXER = Tolerance(2e-2, 4e-2)
FFN = Tolerance(2e-2, 4e-2)
CONVOLUTION_BLOCK = Tolerance(2e-2, 4e-2)  # of what the block adds to its input
# The worst pixel after up to twenty convolutions over the same packed weights, by the coarsest of these.
RESIDUAL_BLOCKS = Tolerance(1e-3, 2e-2, int8=3e-2)

# Activations on a grid from -1000 to 1000. GELU and its tanh form differ by 5e-4.
ACTIVATION = Closeness(1e-5, 2e-6)
# In float64, of numbers around 1: whether a norm is affine in its input.
AFFINE = Closeness(1e-9, 1e-9)
# Whether windows have the same bias, which is found by a subtraction of scores.
WINDOW_BIAS = Closeness(0.0, 1e-4)
# Whether sums of a row are 1, as those of attention weights are: their softmax may be in bfloat16.
ROW_SUMS = Closeness(1e-5, 1e-2)
# Factors that were read off a trace, each a quotient of sums: relative to the largest.
SAME_FACTOR = 1e-4
# The same factor for all values of a tensor: relative to each of them, and what rounding leaves of a 0.
SAME_RATIO, SAME_ZERO = Tolerance(1e-5, 1e-2), 1e-6
# How far 1 - cosine of the same values, times a factor, may be from 0 by rounding.
SAME_DIRECTION = 1e-5
# A scale of attention that was measured, to be taken for 1 / sqrt(n * head_size): those of n = 1, 2, 3 are 18 % apart at least.
MEASURED_SCALE = 1e-2
# A number in a graph that is one of a formula: it may have been float32 meanwhile, which keeps 6e-8 of it.
SAME_NUMBER = 1e-6
# Biases that grow by one slope with each key, by their dtype: what rounding may make of them, relative to the largest of a row (a
# step of bfloat16 is 2^-8 of a number), and how far scores may be from a line through them.
SLOPES, LINE = Tolerance(1e-5, 2.0**-6), Tolerance(1e-4, 2.0**-7)
# An error that can be nothing but rounding of float32: no other candidate needs to be tried.
EXACT = 1e-5
# What an output is moved by, relative to its largest number, where the numbers in padding are read; rounding moves it by less.
MOVED = 1e-3

# How bounds of `row_error` are applied. Rows far smaller than the largest one are judged against this part of it: a row that is
# nearly 0 has no direction.
SMALL_ROW = 1e-2
# Where quantization, or a choice of experts, stands between, a number between two steps may go to either, which moves the few rows
# that have one. These may be off by so many tolerances (seen were 1.5 for rows of 768), while so many of all rows (at most 7 % were
# moved) must be within a part of it.
FEW_ROWS, MOST_ROWS, OTHER_ROWS = 5, 0.75, 0.1

# Logits of a sequence in a batch against those of it alone. Other sums move quantized inputs by single steps, which is a few
# hundredths; a mask or a position that is not heeded moves logits by more than this.
BATCHED = 0.05
# Chunks of a graph against all of it: other sums in each of some layers. Values, relative and to the largest.
LAYERWISE = Tolerance(1e-3, 5e-2)
# A product with a matrix of three entries against torch's: nothing but the order of two additions.
MATRIX_PRODUCT = Closeness(1e-5, 1e-6)
# Torch's own ops against float64: rounding of sums; of bfloat16 inputs and outputs; of 8-bit inputs.
PROVIDER = Tolerance(1e-5, 1e-2, int8=2e-2)
# Sums of 144 products of random numbers, 12 on average, in bfloat16 from bfloat16: rounding of the output is 2^-8 of them.
PROVIDER_CONVOLUTION = Closeness(0.02, 0.1)
# A compiled form against level 1: what 1 - cosine of the worst row may be, and the greatest error, relative to the greatest value.
# Both round at other places; what is compiled wrongly turns rows by more.
COMPILED_DIRECTION = Tolerance(1e-5, 1e-3, int8=2e-3, int4=2e-3)
COMPILED_ERROR = Tolerance(1e-3, 5e-2, int8=0.1, int4=0.1)
