"""The models of TorchInductor's public dashboards, each eager, compiled and ours.

After `benchmarks/dynamo/*_models_list*.txt` of PyTorch, at a batch of one: Hugging Face's, TorchBench's and timm's, built of their
published sizes with random weights, and a few of their neighbors that transformers has (CvT, PVT, LeViT, Swin v2, ...). Left out
are those that need torchvision's operators or another package.
"""
