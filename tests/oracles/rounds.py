"""Rounds of Nemotron-Labs-Diffusion as slow, plain PyTorch: the autoregressive mode and
self-speculation.

A round drafts some tokens behind the last one that is verified, all in one pass or in
several by a rule of parallel unmasking, and verifies them in a causal pass: drafts stay
up to the first one that the row before it does not predict, which that row replaces.
The first round, and each of the autoregressive mode, drafts nothing.
"""

from tests.oracles.decoding import Decoding


def plain_rounds(run: Decoding, round_length: int, *, keeps: bool) -> None:
    """``round_length``: tokens that a round verifies at most. ``keeps``: whether what is
    verified is computed no more."""
    model, first, size = run.model, len(run.prompt), 1
    run.in_rounds, kept = True, 0
    while model.mask in run.tokens:
        stop = min(first + size, run.length)
        run.may_fill = (first, stop - 1)
        run.verifies = False
        while run.masked(first, stop - 1):
            text = run.canvas[: stop - 1]
            logits = model.logits(text, len(text), 0, first - 1, drafts=True)
            run.predict(logits, range(kept, stop - 1))
            scored = sorted(
                map(run.score, run.predicted),
                key=lambda entry: (-entry.confidence, entry.position),
            )
            count = run.count_by_rule(scored) if run.parallel else len(scored)
            run.decide_between(scored, count)
            run.commit(scored[:count])
        drafted = run.canvas[first : stop - 1]
        run.canvas[first:stop] = [model.mask] * (stop - first)
        text = [*run.canvas[:first], *drafted]
        run.may_fill = (first, stop)
        run.verifies = True
        logits = model.logits(text, len(text), 0, len(text))
        run.predict(logits, range(kept, stop - 1))
        verified = []
        for position, draft in zip(range(first, stop), [*drafted, None], strict=True):
            verified.append(run.measure(position, run.unmasking))
            if verified[-1].token != draft:
                break
        run.commit(verified)
        # What was drafted counts as filled already.
        run.order[-1] = [p for p in run.order[-1] if p == stop - 1]
        first += len(verified)
        kept, size = first - 1 if keeps else 0, round_length
