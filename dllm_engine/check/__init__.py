"""Checks of ``dllm check``: kernels against their plain versions, and answers against
stored ones.
"""
