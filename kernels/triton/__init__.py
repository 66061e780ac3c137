"""Triton kernels and the functions that launch them. The operators of the folder above
run them on CUDA devices.

A module is imported when one of its kernels is first launched. A function takes the
arguments of the operator of the same name, which describes shapes and types.
"""
