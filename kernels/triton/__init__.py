"""Triton kernels and the functions that launch them: what the operators of the folder above run on CUDA devices.

A module is imported when one of its kernels is first launched. What arguments are, the operators' signatures tell.
"""
