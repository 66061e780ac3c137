"""dKV-Cache-Decode as slow, plain PyTorch.

LLaDA: steps 0 and 1 of a block and every ``refresh_interval``-th compute the whole canvas; the others what was masked
one step before. Dream: every ``refresh_interval``-th step computes the whole canvas; the others leave out positions
whose next token was known one step before, and the last position from step 2 on.
"""

from typing import Any

from tests.oracles.buffer import Buffer
from tests.oracles.models import PlainModel
from tests.oracles.unmasking import Decoding


def plain_dkv(model: PlainModel, prompt: list[int], *, refresh_interval: int = 8, **asked: Any) -> Decoding:
    """Decode; ``asked`` are fields of ``Decoding``."""
    run = Decoding(model, prompt, **asked)
    run.fills_first_alone = len(run.blocks) > 1
    buffer = Buffer(model, run.length)
    whole = list(range(run.length))
    for number, (first, end) in enumerate(run.blocks):
        step = 0
        rows_of_next = whole
        while run.masked(first, end):
            if step % refresh_interval == 0 or (step == 1 and not model.is_dream):
                rows = whole
            else:
                rows = rows_of_next
            masked = set(run.masked(0, run.length))
            if model.is_dream:
                last = run.length - 1
                rows_of_next = [p for p in whole if (step == 0 if p == last else p + 1 in masked)]
            else:
                rows_of_next = sorted(masked)
            logits, _ = buffer.forward(run.canvas, rows)
            run.computed.append(rows)
            run.fill(logits, number, step)
            step += 1
    return run
