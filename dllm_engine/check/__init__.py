"""What ``dllm check`` runs: does this engine compute right on this machine?

The numbers are drawn on the CPU from a seed, so they are the same on every machine. What the device computes from them
is compared with the CPU: operators and dense attention with the plain versions, answers with stored ones.
"""
