"""CUDA graphs: one launch for the hundreds of kernels of a forward pass, and of filling
in its tokens.

A step that computes few rows keeps a GPU busy for less time than the host needs to
launch its kernels. The forward passes of two such steps differ only in the contents of
a few tensors, and so does filling in their tokens. Each is recorded over tensors of a
rounded size, and replayed after a later batch has written its numbers into them.
"""
