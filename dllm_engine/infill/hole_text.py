"""The text of a hole, as a client gets it: without the edges of the hole, and without an
end that repeats the text behind it.

A model that has more tokens to fill in than the text needs may write the beginning of
the text behind the hole. Such an end is dropped if the text around it is more probable
without it: by the mean log-probability of each token, with every other token masked.
"""

import json
from collections.abc import Iterable, Sequence
from itertools import chain, islice
from typing import Any

from vllm.outputs import CompletionOutput
from vllm.sampling_params import RequestOutputKind, SamplingParams

from dllm_engine.decoding.probe import Logprobs, Probe
from dllm_engine.infill.edges import Opened, given_around
from dllm_engine.lengths.forward_passes import Passes
from dllm_engine.request_options.sampling_params import HOLE_EDGES, bytes_in

_SEEN = 128
"""Number of tokens on either side of a hole that a comparison sees."""
_BEFORE, _BEHIND = 2, 8
"""Number of tokens on either side of a hole whose probabilities are compared."""


class HoleText:
    """The text that fills in a template, as it comes. Of a template with several holes,
    nothing is left out.
    """

    def __init__(self, opened: Opened, params: SamplingParams, tokenizer: Any) -> None:
        self._opened, self._params, self._tokenizer = opened, params, tokenizer
        _, self._following = _texts_around(opened, tokenizer)
        self._in_parts = params.output_kind is RequestOutputKind.DELTA
        self._text, self._num_shown = "", 0

    def cut(self, completion: CompletionOutput) -> Passes[None]:
        """Leave out of a completion what is not the hole's text. Text that may have to
        be left out is held back.
        """
        text = completion.text
        self._text = self._text + text if self._in_parts else text
        before, behind = self._opened.texts
        inside = self._text[len(before) :]
        if completion.finish_reason is None:
            inside = inside[: max(len(inside) - len(behind), 0)]
            inside = inside.removesuffix(_repeat(inside, self._following))
        elif not _is_stopped(completion):
            inside = inside.removesuffix(behind)
            hole = self._opened, inside
            (repeat,) = yield from improbable_repeats([hole], self._tokenizer)
            inside = inside.removesuffix(repeat)
            leave_out(self._params, repeat)
        completion.text = inside[self._num_shown :] if self._in_parts else inside
        self._num_shown = len(inside)


def _is_stopped(completion: CompletionOutput) -> bool:
    """Return True if a stop string has ended the text, inside the hole."""
    return isinstance(completion.stop_reason, str)


def inside_of(completion: CompletionOutput, params: SamplingParams) -> str:
    """The text of a complete hole without its edges. Empty if a stop string has ended
    it.
    """
    if _is_stopped(completion):
        return ""
    return without_edges(completion.text, params.extra_args or {})


def without_edges(text: str, extra_args: dict[str, Any]) -> str:
    """The text of a complete hole without its edges."""
    packed = extra_args.get(HOLE_EDGES)
    if packed is None:
        return text
    before, behind = json.loads(packed)["texts"]
    return text[len(before) :].removesuffix(behind)


def leave_out(params: SamplingParams, repeat: str) -> None:
    """Make a repeat a part of the edge of the request's hole."""
    packed = bytes_in(params, HOLE_EDGES)
    if repeat and packed is not None:
        carried = json.loads(packed)
        before, behind = carried["texts"]
        carried["texts"] = before, repeat + behind
        edges = json.dumps(carried).encode()
        params.extra_args = {**(params.extra_args or {}), HOLE_EDGES: edges}


def improbable_repeats(
    holes: Sequence[tuple[Opened, str]], tokenizer: Any
) -> Passes[list[str]]:
    """The end of each hole's text that repeats the text behind it. Empty if there is
    none, or if the text around it is less probable without it.
    """
    repeats, compared = [], []
    for opened, text in holes:
        before, behind = _texts_around(opened, tokenizer)
        repeat = _repeat(text, behind)
        repeats.append(repeat)
        if repeat:
            compared += [
                _probes(before, shown, behind, tokenizer)
                for shown in (text, text.removesuffix(repeat))
            ]
    answers = iter((yield list(chain.from_iterable(compared))))
    means = iter([_mean(islice(answers, len(probes))) for probes in compared])
    return [
        repeat if repeat and next(means) < next(means) else "" for repeat in repeats
    ]


def _texts_around(opened: Opened, tokenizer: Any) -> tuple[str, str]:
    """The given texts next to a hole. Empty behind a hole whose length is given."""
    if not opened.has_free_end:
        return "", ""
    left, right = given_around(opened.template)
    before, behind = opened.texts
    left = [*opened.prompt, *left]
    return (
        tokenizer.decode(left[-_SEEN:]) + before,
        behind + tokenizer.decode(right[:_SEEN]),
    )


def _repeat(text: str, behind: str) -> str:
    """The longest end of a text with which the text behind it begins."""
    lengths = range(min(len(text), len(behind)), 0, -1)
    return next((behind[:n] for n in lengths if text.endswith(behind[:n])), "")


def _probes(before: str, text: str, behind: str, tokenizer: Any) -> list[Probe]:
    """Probes for the tokens of a hole and of the texts next to it: each has every other
    token masked.
    """
    first, end, canvas = (
        tokenizer.encode(part, add_special_tokens=False)
        for part in (before, before + text, before + text + behind)
    )
    compared = range(max(len(first) - _BEFORE, 1), min(len(end) + _BEHIND, len(canvas)))
    masked = [list(places) for places in (compared[::2], compared[1::2]) if places]
    return [
        Probe(canvas, places, [canvas[place] for place in places]) for places in masked
    ]


def _mean(answers: Iterable[Logprobs]) -> float:
    logprobs = [logprob for answer in answers for logprob in answer.tokens]
    return sum(logprobs) / max(len(logprobs), 1)
