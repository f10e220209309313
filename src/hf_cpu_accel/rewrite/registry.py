"""The rules, in the order in which they look at a module."""

from __future__ import annotations

from hf_cpu_accel.rewrite.attention.match import AttentionRule
from hf_cpu_accel.rewrite.attention.processor import ProcessorAttentionRule
from hf_cpu_accel.rewrite.convolution.as_linear import ConvolutionLinearRule
from hf_cpu_accel.rewrite.convolution.gemm import GemmConvolutionRule
from hf_cpu_accel.rewrite.convolution.grouped import GroupedConvolutionRule
from hf_cpu_accel.rewrite.convolution.match import ConvolutionRule
from hf_cpu_accel.rewrite.core.rule import Rule
from hf_cpu_accel.rewrite.encoder.embeddings import EmbeddingsRule
from hf_cpu_accel.rewrite.experts.match import ExpertsRule
from hf_cpu_accel.rewrite.linear.block import LinearBlockRule
from hf_cpu_accel.rewrite.linear.ffn import FFNRule
from hf_cpu_accel.rewrite.linear.match import LinearRule, MergedProjectionsRule
from hf_cpu_accel.rewrite.linear.transposed import TransposedLinearRule
from hf_cpu_accel.rewrite.norm.batch_norm import BatchNormRule
from hf_cpu_accel.rewrite.norm.group_norm import GroupNormRule
from hf_cpu_accel.rewrite.norm.match import NormRule

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
