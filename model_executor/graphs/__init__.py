"""CUDA graphs: one launch for the hundreds of kernels of a forward pass, and of filling
in its tokens.

A step that computes few rows keeps a GPU busy for less time than the host needs to
launch its kernels. The forward pass of such a step differs from another's in the
contents of a few tensors alone, and so does filling in its tokens. Each is recorded
over tensors of a rounded size and replayed over what later batches put into them.
"""
