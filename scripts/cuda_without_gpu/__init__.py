"""What stands in for a GPU: a Triton driver that only compiles, and a CUDA platform whose tensors lie on the CPU.

These modules run in the environment that `scripts/cuda_check.py` makes, and are started by it.
"""
