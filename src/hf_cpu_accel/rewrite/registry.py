"""The rules, in the order in which they look at a module."""

from __future__ import annotations

from hf_cpu_accel.rewrite.attention import AttentionRule
from hf_cpu_accel.rewrite.batch_norm import BatchNormRule
from hf_cpu_accel.rewrite.convolution import ConvolutionRule
from hf_cpu_accel.rewrite.convolution_linear import ConvolutionLinearRule
from hf_cpu_accel.rewrite.embeddings import EmbeddingsRule
from hf_cpu_accel.rewrite.experts import ExpertsRule
from hf_cpu_accel.rewrite.ffn import FFNRule
from hf_cpu_accel.rewrite.gemm_convolution import GemmConvolutionRule
from hf_cpu_accel.rewrite.group_norm import GroupNormRule
from hf_cpu_accel.rewrite.grouped_convolution import GroupedConvolutionRule
from hf_cpu_accel.rewrite.linear import LinearRule, MergedProjectionsRule
from hf_cpu_accel.rewrite.linear_block import LinearBlockRule
from hf_cpu_accel.rewrite.norm import NormRule
from hf_cpu_accel.rewrite.processor_attention import ProcessorAttentionRule
from hf_cpu_accel.rewrite.rule import Rule
from hf_cpu_accel.rewrite.transposed_linear import TransposedLinearRule

_CONVOLUTIONS: tuple[Rule, ...] = (GemmConvolutionRule(), ConvolutionLinearRule(), ConvolutionRule())

# Larger structures first: what they take, the rules for its parts do not see. Modules are visited from the root
# downwards, so a linear is only alone if no module above it had a use for it.
RULES: tuple[Rule, ...] = (
    EmbeddingsRule(),
    AttentionRule(),
    ProcessorAttentionRule(),
    FFNRule(),
    ExpertsRule(),
    LinearBlockRule(),
    NormRule(),
    GroupNormRule(),
    BatchNormRule(_CONVOLUTIONS),
    *_CONVOLUTIONS,
    GroupedConvolutionRule(),
    MergedProjectionsRule(),
    LinearRule(),
    TransposedLinearRule(),
)
