"""Block diffusion as slow, plain PyTorch: every pass computes all up to the end of the running block.

The cache is exact, so that it shows in what is fed alone: each block is fed once more, with the first pass of the next.
"""

from tests.oracles.decoding import Decoding


def plain_block(run: Decoding) -> None:
    kept = 0
    for step in run.passes():
        start, stop = run.window[0] - run.window[0] % run.block_length, run.window[1]
        run.fill(run.model.logits(run.canvas[:stop], run.block_length), range(start if step else kept, stop))
        kept = start
