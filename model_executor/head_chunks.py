"""Chunks of rows that go through a model's head at once, so that their logits fit in
memory.
"""

MAX_LOGITS_PER_CHUNK = 1 << 24
"""Logits held at once (64 MiB in float32), unless a GPU's tiles need more."""
TILE_ROWS, LEAST_ROWS = 128, 512
"""``TILE_ROWS``: rows of a tile in a GPU's matrix product. ``LEAST_ROWS``: with fewer
rows a chunk waits for the head's weights, which it has to read. A chunk of constrained
or biased rows is one tile, because it takes up to four times as much memory per logit.
"""


def rows_at_once(vocab_size: int, *, on_gpu: bool, least_rows: int = LEAST_ROWS) -> int:
    """Rows of a chunk for a head of ``vocab_size`` tokens."""
    rows = max(1, MAX_LOGITS_PER_CHUNK // vocab_size)
    if not on_gpu:
        return rows
    return max(rows // TILE_ROWS * TILE_ROWS, least_rows)


def head_chunks(
    num_rows: int, vocab_size: int, *, on_gpu: bool, least_rows: int = LEAST_ROWS
) -> list[slice]:
    """The chunks of ``num_rows`` rows, in order."""
    size = rows_at_once(vocab_size, on_gpu=on_gpu, least_rows=least_rows)
    return [slice(start, start + size) for start in range(0, num_rows, size)]
