"""What the steps of an engine would take on a GPU that nobody has tried: computed, not measured.

Three steps: a GPU in figures (``gpus.py``), the kernels of a forward pass (``kernels.py``), and the time of a request's
steps (``prediction.py``). Every constant names its source; the same figures apply to all methods and batches.
"""
