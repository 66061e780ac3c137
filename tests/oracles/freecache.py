"""FreeCache as slow, plain PyTorch.

Readings where the paper leaves room:

* The first forward pass computes the whole canvas. The prompt's keys and values come from it and are never renewed.
* Later passes feed the current block and, with ``include_suffix``, the masked positions behind it. They attend to the
  cached clean positions (the prompt and finished blocks) and to each other.
* A cache block is so many tokens of the response, in whole blocks; without ``cache_block_length`` it is a block.
  Finished blocks of a cache block that is not finished are fed in every pass.
* A finished cache block is fed once more, with its final tokens, in the next block's first pass; its keys and values
  come from there, without a pass of its own. The last block's are never needed.
* Without ``include_suffix`` no pass after the first sees what is behind the block.
* Dream goes by its block rule, also if there is one block only: a block's first pass fills only its first position,
  outside the schedule. That position is predicted by the row before it, which that pass computes: it belongs to the
  finished block or, in the first pass of all, to the prompt. Afterwards all predicting rows lie in the block.
* A block ends when it holds no mask. The prompt's outputs are not kept, only its keys and values.
"""

from tests.oracles.buffer import Buffer
from tests.oracles.decoding import Decoding


def plain_freecache(run: Decoding, *, include_suffix: bool = True, cache_block_length: int | None = None) -> None:
    run.window_alone = True
    prompt_length, size = len(run.prompt), cache_block_length or run.block_length

    def clean(first: int) -> int:
        """Positions whose keys and values are cached when the window begins at ``first``."""
        return prompt_length + (first - prompt_length) // size * size

    buffer, num_layers = Buffer(run), len(run.model.layers)
    retained = run.traces["retained_positions"] = []
    for step in run.passes():
        first, end = run.window
        cached = clean(first)
        last_fed = len(run.seen) if include_suffix else min(end, run.cut)
        if not run.order:
            start, last_fed = 0, len(run.seen)
        else:
            begins = step == 0 and run.running_before
            start = clean(run.blocks[run.running_before[0]][0]) if begins else cached
        if not run.order or start < cached:
            # What later passes of the window find in the cache.
            retained.append([list(range(cached))] * num_layers)
        fed = range(start, last_fed)
        run.fill(buffer.forward(fed, range(last_fed)), fed)
