"""Filling in over HTTP: OpenAI's ``suffix`` of completions, and templates in
``vllm_xargs``.
"""

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from vllm.sampling_params import SamplingParams

from dllm_engine.infill.edges import (
    Opened,
    chosen_openings,
    openings,
    stops_of,
)
from dllm_engine.infill.hole_text import HoleText, without_edges
from dllm_engine.infill.template import (
    Template,
    check_length,
    filled_in,
    tokenized,
)
from dllm_engine.lengths.forward_passes import served_result
from dllm_engine.lengths.holes import (
    DEFAULT_BUDGET,
    LARGEST_BUDGET,
    ranked_lengths,
)
from dllm_engine.lengths.requests import Settled
from dllm_engine.request_options.errors import InvalidRequestError
from dllm_engine.request_options.fields import RequestOptions
from dllm_engine.request_options.sampling_params import parse_request_options
from dllm_engine.structured_output.requests import reading

LENGTHS = ("max_completion_tokens", "max_tokens", "max_output_tokens")
"""Names of the length in the request classes. The first one that is set counts."""
OPEN = -1
"""The number in JSON for a hole of a suitable length."""


@dataclass
class Filling:
    """A template with open holes, for each prompt of a request.

    Of ``num_choices`` equal prompts in a row, the first gets the best length, and each
    other one the next best.
    """

    template: Template
    min_tokens: int
    budget: int
    num_choices: int
    return_given: Any
    """The value of the request option."""
    stops: list[str] | None
    """Result of ``stops_of``."""
    in_chat: bool
    rankings: dict[int, "asyncio.Task[Ranked]"] = field(default_factory=dict)
    hole_sizes: dict[int, list[int]] = field(default_factory=dict)
    """Tokens of each hole, by the place of the prompt in the request."""

    def begin(self, engine: Any, prompts: Sequence[Sequence[int]]) -> None:
        """Begin to rank the lengths, so that an engine computes while vLLM reads the
        request.
        """
        for group, prompt in enumerate(prompts):
            self.ranking(group, engine, prompt)

    def ranking(
        self, group: int, engine: Any, prompt: Sequence[int]
    ) -> "asyncio.Task[Ranked]":
        """The ranking for a group of equal prompts."""
        if group not in self.rankings:
            self.rankings[group] = asyncio.ensure_future(self._ranked(engine, prompt))
        return self.rankings[group]

    def end(self) -> None:
        """Drop rankings that the request no longer needs."""
        for ranking in self.rankings.values():
            if not ranking.cancel() and not ranking.cancelled():
                ranking.exception()  # Otherwise, asyncio logs an error that nobody read.

    async def _ranked(self, engine: Any, prompt: Sequence[int]) -> "Ranked":
        openable = openings(
            list(prompt),
            self.template,
            engine.input_processor.tokenizer,
            self.stops,
            in_chat=self.in_chat,
        )
        (opened,) = await served_result(engine, chosen_openings([openable]))
        sizes = self.sizes(engine, opened)
        mask = engine.vllm_config.model_config.hf_config.mask_token_id
        holes = opened.template.holes(opened.prompt, sizes, mask)
        ranking = ranked_lengths(holes, self.num_choices)
        return Ranked(opened, sizes, await served_result(engine, ranking))

    def sizes(self, engine: Any, opened: Opened) -> range:
        """Lengths of an open hole."""
        limit = engine.vllm_config.model_config.max_model_len
        return opened.sizes(len(opened.prompt), self.min_tokens, self.budget, limit)

    def at(self, place: int) -> "HoleLengths":
        """The choice of lengths for the prompt with index ``place`` in the request."""
        return HoleLengths(self, *divmod(place, self.num_choices))


class Ranked(NamedTuple):
    """A template, and the lengths of each open hole, the best first."""

    opened: Opened
    sizes: range
    """Lengths that may be chosen."""
    lengths: list[list[int]]


class HoleLengths(NamedTuple):
    """The choice of the lengths of one prompt's holes."""

    filling: Filling
    group: int
    rank: int

    def begin(self, engine: Any, prompt: Sequence[int], params: SamplingParams) -> None:
        template = self.filling.template
        # Refuse min_tokens that does not fit.
        self.filling.sizes(engine, Opened(list(prompt), template))
        length = max(params.min_tokens, 1)
        self._fill(params, template.filled([length] * template.open_holes))

    async def settle(
        self, engine: Any, prompt: Sequence[int], params: SamplingParams
    ) -> Settled:
        ranking = self.filling.ranking(self.group, engine, prompt)
        opened, sizes, ranked = await ranking
        lengths = [each[min(self.rank, len(each) - 1)] for each in ranked]
        template = opened.template.filled(lengths)
        self._fill(params, template)
        place = self.group * self.filling.num_choices + self.rank
        self.filling.hole_sizes[place] = opened.template.hole_sizes(lengths)
        opened.put(params, template, rank=self.rank)
        settled = Settled(opened.prompt, is_cut=max(lengths) == sizes[-1])
        returned = [token for token in template if token is not None]
        if _options({"return_given": self.filling.return_given}).return_given is False:
            text = HoleText(opened, params, engine.input_processor.tokenizer)
            settled = settled._replace(cut=text.cut)
            returned = []
        return settled if None in template else settled._replace(whole=returned)

    def _fill(self, params: SamplingParams, template: list[int | None]) -> None:
        params.extra_args = {
            **(params.extra_args or {}),
            "response_template": template,
            "return_given": self.filling.return_given,
        }
        params.max_tokens = len(template)


async def settle_template(request: Any, serving: Any, current_request: Any) -> None:
    """Settle ``suffix``, or ``template`` in ``vllm_xargs``, in a request object of
    vLLM's server.

    The template becomes a ``response_template``, and the request gets its length; a
    longer length in the request is an upper bound. A template with open holes becomes
    the ``filling`` of ``current_request``, an ``OpenRequest``.
    """
    xargs = dict(getattr(request, "vllm_xargs", None) or {})
    suffix = getattr(request, "suffix", None)
    if suffix is not None:
        echo = getattr(request, "echo", False)
        check_suffix(suffix, xargs, length_of(request), echo=echo)
        # vLLM would render a suffix as the prompt of a model that was trained to
        # continue prompts.
        request.suffix = None
        xargs |= {"template": [OPEN, suffix], "return_given": False}
    pieces = xargs.pop("template", None)
    max_model_len = serving.model_config.max_model_len
    if pieces is not None:
        if "response_template" in xargs:
            raise InvalidRequestError(
                "template and response_template are one thing in two forms; give one"
            )
        if not isinstance(pieces, list):
            raise InvalidRequestError(
                f"template is a {type(pieces).__name__}, not a list of texts and of "
                f"holes' numbers of tokens"
            )
        check_length("template", pieces, max_model_len)
        read = [None if piece == OPEN else piece for piece in pieces]
        template = await reading(
            tokenized, read, serving.renderer.tokenizer, max_model_len
        )
        request.vllm_xargs = xargs
        if template.open_holes:
            _settle_filling(
                request, template, xargs.pop("return_given", None), current_request
            )
            return
        # vLLM parses a batch of chats again, and does not accept null.
        xargs["response_template"] = json.dumps(template.filled([]))
        current_request.hole_sizes = template.hole_sizes([])
    else:
        check_length("response_template", xargs.get("response_template"), max_model_len)
    if length := _options(xargs).returned_length:
        bound = length_of(request)
        set_length(request, length if bound is None else min(bound, length))


def _settle_filling(
    request: Any, template: Template, return_given: Any, current_request: Any
) -> None:
    budget = length_of(request) or DEFAULT_BUDGET
    num_choices = getattr(request, "n", None) or 1
    if num_choices > 1 and getattr(request, "prompt", None):
        # Each response is a separate prompt with its own length.
        prompts = request.prompt
        is_one = isinstance(prompts, str) or isinstance(prompts[0], int)
        request.prompt = [
            prompt
            for prompt in ([prompts] if is_one else prompts)
            for _ in range(num_choices)
        ]
        request.n = 1
    else:
        num_choices = 1
    budget = min(budget, LARGEST_BUDGET)
    min_tokens = max(getattr(request, "min_tokens", None) or 0, 0)
    stops = stops_of(lambda name: getattr(request, name, None))
    # The given text of a template is returned, and the prompt is not.
    current_request.filling = Filling(
        template, min_tokens, budget, num_choices, return_given, stops, in_chat=True
    )
    set_length(request, max(min_tokens, 1))  # vLLM leaves room for it behind the prompt


def template_fields(
    completion: Any,
    options: dict[str, Any],
    tokenizer: Any,
    sizes: Sequence[int] | None,
) -> dict[str, Any]:
    """The field ``holes`` of a choice: the text of each hole. ``options`` are those of
    its request, ``sizes`` those of the holes, if they are known.
    """
    given = _options(options)
    template = given.response_template
    if template is None or tokenizer is None:
        return {}
    with_given = given.return_given is not False
    holes = filled_in(
        completion.token_ids, template, tokenizer, with_given=with_given, sizes=sizes
    )
    return {"holes": [without_edges(hole, options) for hole in holes]}


def set_length(request: Any, length: int) -> None:
    """Set the limit on the tokens of a request's response."""
    setattr(
        request,
        next(name for name in LENGTHS if name in type(request).model_fields),
        length,
    )


def length_of(request: Any) -> int | None:
    """The length that the request names."""
    given = vars(request)  # Reading one of them as an attribute gives a warning.
    return next((given[name] for name in LENGTHS if given.get(name) is not None), None)


def check_suffix(
    suffix: Any, xargs: dict[str, Any], length: int | None, *, echo: Any
) -> None:
    """Raise ``InvalidRequestError`` for a request that cannot have this suffix."""
    if not isinstance(suffix, str):
        raise InvalidRequestError(f"suffix is a {type(suffix).__name__}, not a text")
    if xargs.keys() & {"template", "response_template"}:
        raise InvalidRequestError(
            "suffix and a template both say what is given; give one"
        )
    if echo:
        raise InvalidRequestError(
            "suffix is not supported with echo; leave one of them unset"
        )
    if length is not None and length < 1:
        raise InvalidRequestError(
            f"max_tokens={length}: with suffix it must be at least 1, the most tokens "
            f"to fill in"
        )


def _options(xargs: dict[str, Any]) -> RequestOptions:
    return parse_request_options(
        {name: xargs.get(name) for name in ("response_template", "return_given")}
    )
