"""Options of sampling: how a token is drawn from the logits, and which biases are added
to them.
"""

import json
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from pydantic import Field

from dllm_engine.decoding.canvas_layout import CanvasLayout
from dllm_engine.decoding.option_types import MOST_TOKENS
from dllm_engine.decoding.spec import Sampling, TokenBias
from dllm_engine.families import barred_tokens
from dllm_engine.request_options.context import RequestContext, refused
from dllm_engine.request_options.facts import OptionGroup

if TYPE_CHECKING:
    from vllm.sampling_params import SamplingParams

MOST_BIASES = 8192
"""Limit on the biases of a request. This many take milliseconds to check, send and add.
"""
LARGEST_BIAS = 1e4
"""Limit on a bias: above the differences of logits, but small enough that float32 still
tells tokens apart.
"""


class SamplingOptions(OptionGroup):
    # vLLM clears its fields of these names for greedy requests, but policies with
    # tempered probabilities need them there too.
    top_p: float | None = Field(default=None, gt=0, le=1)
    """Sample from the smallest set of likeliest tokens whose probabilities reach this
    sum. It affects greedy requests too: the policies ``maskgit_plus``, ``entropy`` and
    ``topk_margin`` measure confidences of the filtered distribution."""
    top_k: int | None = Field(default=None, ge=-1, le=MOST_TOKENS)
    """Sample from this many likeliest tokens; 0 or -1 means all. It applies to greedy
    requests as ``top_p`` does.
    """


def resolve_sampling(
    request: RequestContext,
    options: SamplingOptions,
    layout: CanvasLayout,
    edges: bytes | None,
) -> Sampling:
    """Sampling settings of a request. ``edges``: tokens that its hole may begin and end
    with.
    """
    params = request.params
    top_p = params.top_p if options.top_p is None else options.top_p
    top_k = max(params.top_k if options.top_k is None else options.top_k, 0)
    if params.temperature == 0 and not request.family.filters_greedy:
        top_p = 1.0
        top_k = 0
    added = {
        token: number for token, number in (params.logit_bias or {}).items() if number
    }
    bias = TokenBias(layout.canvas_length, tuple(sorted(added.items())))
    barred = TokenBias.barring(barred_tokens(request.hf_config), layout.canvas_length)
    return Sampling(
        params.temperature,
        top_p,
        top_k,
        token_biases=(
            *(biases for biases in (barred, bias) if biases.values),
            *_edge_biases(edges, layout),
        ),
    )


def _edge_biases(edges: bytes | None, layout: CanvasLayout) -> Iterator[TokenBias]:
    carried = json.loads(edges) if edges else {"allowed": (), "barred": ()}
    for place, tokens in carried["allowed"]:
        yield TokenBias.only(tokens, layout.prompt_length + place)
    for place, tokens in carried["barred"]:
        start = layout.prompt_length + place
        yield TokenBias.barring(tokens, start + 1, start)


def check_num_responses(n: int, temperature: float) -> None:
    """Refuse several responses if they would be equal."""
    if n > 1 and temperature == 0:
        raise refused(
            f"n={n} needs a temperature above 0, as greedy decoding gives equal "
            f"responses; set temperature or leave n at 1"
        )


def check_token_numbers(params: "SamplingParams", vocab_size: int) -> None:
    """Refuse token ids outside the vocabulary, and biases that cannot be added to
    logits.
    """
    biases = params.logit_bias or {}
    if len(biases) > MOST_BIASES:
        raise refused(
            f"logit_bias has {len(biases)} tokens; leave some out, at most "
            f"{MOST_BIASES} can be"
        )
    for name, tokens in (
        ("stop_token_ids", params.stop_token_ids or ()),
        ("logit_bias", biases),
    ):
        for token in tokens:
            if not 0 <= token < vocab_size:
                raise refused(
                    f"{name} holds {token}, outside the vocabulary of {vocab_size}; "
                    f"leave it out"
                )
    for token, number in biases.items():
        if not (number == -math.inf or -LARGEST_BIAS <= number <= LARGEST_BIAS):
            raise refused(
                f"logit_bias[{token}]={number} is out of range: it must be a number of "
                f"−{LARGEST_BIAS:g} … {LARGEST_BIAS:g}; −100 keeps a token out, 100 "
                f"brings it in"
            )
