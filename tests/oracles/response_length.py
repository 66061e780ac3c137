"""DAEDAL's first stage (arXiv 2508.00819) as slow, plain PyTorch: one pass after the
other, no batch.
"""

import math

from tests.oracles.models import PlainModel


def plain_length(
    model: PlainModel,
    prompt: list[int],
    most: int,
    start: int = 64,
    tail: int = 32,
    threshold: float = 0.5,
    growth: float = 2.0,
) -> tuple[int, int]:
    """The length of the response to a prompt, and the number of passes that choose
    it.
    """
    end, mask = model.config["eos_token_id"], model.config["mask_token_id"]
    length, passes = min(start, most), 0
    while length < most:
        passes += 1
        predictions = model.predictions([*prompt, *[mask] * length])[len(prompt) :]
        met, total = 0, 0.0
        for logits in reversed(predictions):
            if logits.argmax() == end and met < tail:
                met += 1
                total += float(logits.softmax(-1)[end])
        if total / tail >= threshold:
            break
        length = min(max(length + 8, 8 * math.ceil(length * growth / 8)), most)
    return length, passes
