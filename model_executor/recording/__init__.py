"""Parts of a step recorded as CUDA graphs: one launch for the hundreds of kernels of each. On a CPU, as the operators
that they call.

A step that computes few rows keeps a device busy for less time than the host needs to launch its kernels. What the
forward pass of such a step does differs from another's in the contents of a few tensors alone, and so does what fills
its tokens in. Each is recorded over tensors of a rounded size and replayed over what later batches put into them.
"""
