"""Triton kernels and the functions that launch them: what the operators of the folder
above run on CUDA devices.

A module is imported when one of its kernels is first launched. The functions take the
arguments of the operators of the same names, where shapes and types are described.
"""
