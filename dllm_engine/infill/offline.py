"""Templates that an offline engine fills in: a request for each choice of the lengths of
their holes, and what the requests return.
"""

from collections.abc import Sequence
from itertools import islice
from typing import Any, NamedTuple

from vllm.outputs import RequestOutput

from dllm_engine.infill.edges import Opened
from dllm_engine.infill.hole_text import (
    improbable_repeats,
    inside_of,
    leave_out,
    without_edges,
)
from dllm_engine.infill.template import Piece, filled_in
from dllm_engine.lengths.forward_passes import Passes
from dllm_engine.lengths.holes import DEFAULT_BUDGET, ranked_lengths
from dllm_engine.params import DiffusionParams


class Attempt(NamedTuple):
    """A request that fills in a template."""

    number: int
    """Index of the template."""
    opened: Opened
    lengths: list[int]
    """Lengths of the open holes."""
    request: DiffusionParams

    def put_texts(
        self, output: RequestOutput, template: Sequence[Piece], tokenizer: Any
    ) -> None:
        """Set the texts of the request's completions."""
        extra_args = self.request.extra_args or {}
        for completion in output.outputs:
            texts = filled_in(
                completion.token_ids,
                self.request.response_template or [],
                tokenizer,
                with_given=False,
                sizes=self.opened.template.hole_sizes(self.lengths),
            )
            completion.text = without_edges(completion.text, extra_args)
            completion.holes = [without_edges(text, extra_args) for text in texts]
            holes = iter(completion.holes)
            completion.joined = "".join(
                piece if isinstance(piece, str) else next(holes) for piece in template
            )


def attempts_of(
    opened: Sequence[Opened],
    ranked: Sequence[Sequence[Sequence[int]]],
    params: DiffusionParams,
) -> list[Attempt]:
    """The requests of each template. ``ranked``: result of ``best_lengths``."""
    attempts = []
    for number, each in enumerate(opened):
        choices = each.template.choices(ranked[number], params.n)
        for rank, lengths in enumerate(choices):
            request = params.clone()
            if len(ranked[number]) == 1:  # responses differ by their lengths
                request.n = 1
            template = each.template.filled(lengths)
            request.response_template = template
            request.return_given = False
            each.put(request, template, rank=rank)
            attempts.append(Attempt(number, each, lengths, request))
    return attempts


def best_lengths(
    opened: Sequence[Opened], params: DiffusionParams, model_config: Any
) -> Passes[list[list[list[int]]]]:
    """At least ``params.n`` lengths, the best first, for each open hole of each
    template.
    """
    limit, mask = model_config.max_model_len, model_config.hf_config.mask_token_id
    holes = []
    for each in opened:
        if each.template.open_holes:
            sizes = each.sizes(
                len(each.prompt), params.min_tokens, DEFAULT_BUDGET, limit
            )
            holes += each.template.holes(each.prompt, sizes, mask)
    remaining = iter((yield from ranked_lengths(holes, params.n)))
    return [[*islice(remaining, each.template.open_holes)] for each in opened]


def returned(
    attempts: Sequence[Attempt],
    outputs: Sequence[RequestOutput],
    templates: Sequence[Sequence[Piece]],
    tokenizer: Any,
) -> Passes[list[RequestOutput]]:
    """One output per template, with the completions of all its requests."""
    texts = [
        (attempt.opened, inside_of(output.outputs[0], attempt.request))
        for attempt, output in zip(attempts, outputs, strict=True)
    ]
    repeats = yield from improbable_repeats(texts, tokenizer)
    merged: dict[int, RequestOutput] = {}
    for attempt, output, repeat in zip(attempts, outputs, repeats, strict=True):
        leave_out(attempt.request, repeat)
        attempt.put_texts(output, templates[attempt.number], tokenizer)
        first = merged.setdefault(attempt.number, output)
        if first is not output:
            for completion in output.outputs:
                completion.index = len(first.outputs)
                first.outputs.append(completion)
    return [*merged.values()]
