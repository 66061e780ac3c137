"""d3LLM's cache as slow, plain PyTorch: finished blocks are kept some passes after they were finished."""

from tests.oracles.buffer import Buffer
from tests.oracles.decoding import Decoding


def plain_delayed(run: Decoding, *, cache_delay: int = 1, refresh_interval: int = 10_000) -> None:
    buffer, num_layers = Buffer(run), len(run.model.layers)
    blocks = [(0, len(run.prompt)), *run.blocks]
    retained = run.traces["retained_positions"] = []
    reached = {0: 0}
    """When each block was first found finished with all before it."""
    kept = 0
    for number, _ in enumerate(run.passes(), start=1):
        stores, waits = kept, False
        for block, (first, end) in enumerate(blocks):
            if end <= kept:
                continue
            if block > 0 and run.masked(first, end):
                break
            if number - reached.setdefault(block, number) >= cache_delay:
                stores = end
            else:
                waits = True
                if not run.model.is_dream:
                    break
        refreshes = stores == kept and (not kept or waits or number % refresh_interval == 0)
        clean = 0 if refreshes else kept
        if stores > kept or (refreshes and kept):
            run.cut = run.length
        fed = range(clean, len(run.seen))
        logits = buffer.forward(fed, run.seen)
        if run.model.is_dream and clean:
            logits[clean - 1] = logits[clean]
        if stores > kept or (refreshes and kept):
            retained.append([list(range(stores))] * num_layers)
        kept = stores
        run.fill(logits, fed)
