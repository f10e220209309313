"""The models that TorchInductor's public dashboards run on CPUs, each eager, compiled and ours.

After `benchmarks/dynamo/*_models_list_cpu.txt` of PyTorch, at a batch of one: Hugging Face's, TorchBench's and timm's, built of
their published sizes with random weights. Left out are those that need torchvision's operators or another package.
"""
