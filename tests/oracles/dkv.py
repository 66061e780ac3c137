"""dKV-Cache-Decode as slow, plain PyTorch.

LLaDA: steps 0 and 1 of a block and every ``refresh_interval``-th compute the whole canvas; the others what was masked
one step before. Dream: every ``refresh_interval``-th step computes the whole canvas; the others leave out positions
whose next token was known one step before, and the last position from step 2 on.
"""

from tests.oracles.buffer import Buffer
from tests.oracles.decoding import Decoding


def plain_dkv(run: Decoding, *, refresh_interval: int = 8) -> None:
    buffer, last = Buffer(run), run.length - 1
    rows_of_next = whole = list(range(run.length))
    for step in run.passes():
        refreshes = step % refresh_interval == 0 or (step == 1 and not run.model.is_dream)
        last_predicting = run.cut - (run.model.is_dream and run.cut < run.length and not refreshes)
        rows = [p for p in (whole if refreshes else rows_of_next) if p < last_predicting]
        rows_of_next = run.masked(0, run.length)
        if run.model.is_dream:
            masked = set(rows_of_next)
            rows_of_next = [p for p in whole if (step == 0 if p == last else p + 1 in masked)]
        run.fill(buffer.forward(rows, range(run.cut)), rows)
