"""Fast-dLLM's prefix and dual caches as slow, plain PyTorch.

Every block starts with a pass over the whole canvas. Later passes of the block compute the block and all behind it
(``prefix``) or the block alone (``dual``); they read everything else as that first pass left it. The authors' code
makes one more pass of a block that its first pass completed; here a block ends when it holds no mask.
"""

from typing import Any

from tests.oracles.buffer import Buffer
from tests.oracles.models import PlainModel
from tests.oracles.unmasking import Decoding


def plain_fast_dllm(model: PlainModel, prompt: list[int], cache: str, **asked: Any) -> Decoding:
    """Decode with ``cache`` "prefix" or "dual"; ``asked`` are fields of ``Decoding``."""
    run = Decoding(model, prompt, **asked)
    buffer = Buffer(model, run.length)
    for number, (first, end) in enumerate(run.blocks):
        step = 0
        while run.masked(first, end):
            if step == 0:
                rows = range(run.length)
            else:
                rows = range(first, {"prefix": run.length, "dual": end}[cache])
            logits, _ = buffer.forward(run.canvas, rows)
            run.computed.append(list(rows))
            run.fill(logits, number, step)
            step += 1
    return run
