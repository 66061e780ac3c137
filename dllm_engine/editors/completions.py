"""Completions at a cursor on ``/v1/completions``, in the forms that editors send:
``suffix`` or markers in the prompt, a length that is only a budget, penalties, texts of
any length.
"""

import asyncio
import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from vllm.utils.async_utils import make_async

from dllm_engine.editors.markers import Around, read_markers
from dllm_engine.families import every_end_token
from dllm_engine.infill.edges import stops_of
from dllm_engine.infill.http import Filling, check_suffix
from dllm_engine.infill.template import Template
from dllm_engine.lengths.holes import DEFAULT_BUDGET, LARGEST_BUDGET
from dllm_engine.options import EngineOptions
from dllm_engine.request_options.errors import InvalidRequestError

IGNORED_HEADER, CUT_HEADER = "x-dllm-ignored", "x-dllm-cut"
_PENALTIES = {
    "presence_penalty": 0,
    "frequency_penalty": 0,
    "repetition_penalty": 1,
}
"""Fields of penalties, and the values that ask for none."""
_LEAST_SHARE = 4
"""The suffix gets at least 1 / ``_LEAST_SHARE`` of a context that is too short for both
texts.
"""


class Fitted(NamedTuple):
    """Tokens of the texts around a cursor, with a flag if some were left out."""

    prefixes: list[list[int]]
    suffix: list[int]
    is_cut: bool


def is_at_cursor(fields: dict[str, Any]) -> bool:
    """Return True for a body that names the text behind the cursor, or that may have it
    in a prompt with markers.
    """
    prompt, suffix = fields.get("prompt"), fields.get("suffix")
    is_marked = isinstance(prompt, str) and read_markers(prompt) is not None
    return suffix is not None or is_marked


async def settle_completion(
    fields: dict[str, Any], serving: Any, current_request: Any
) -> dict[str, Any]:
    """The fields that vLLM reads, from a body that ``is_at_cursor``. If there is a hole
    to fill in, it becomes the ``filling`` of ``current_request``, an ``OpenRequest``.
    """
    around = _texts_around(fields, serving)
    if around is None:
        return fields
    _check(fields, around, serving)
    ignored = [
        name
        for name, unused in _PENALTIES.items()
        if fields.get(name) not in (None, unused)
    ]
    prefixes, suffix = around
    budget = min(fields.get("max_tokens") or DEFAULT_BUDGET, LARGEST_BUDGET)
    if _is_blank(suffix, serving):
        suffix = ""
    fit = make_async(fitted, serving.renderer._executor)  # in vLLM's threads
    max_model_len = serving.model_config.max_model_len
    room = max(max_model_len - budget, max_model_len // 2)
    texts = await fit(prefixes, suffix, tokenizer_of(serving), room)
    if texts.is_cut:
        current_request.headers[CUT_HEADER] = (
            f"texts of {room} tokens around the cursor"
        )
    longest = max(map(len, texts.prefixes)) + len(texts.suffix)
    budget = min(budget, max_model_len - longest)
    left_out = {"suffix", "prompt", "max_tokens", *_PENALTIES}
    kept = {name: value for name, value in fields.items() if name not in left_out}
    num_choices = fields.get("n") or 1
    is_open = not texts.suffix
    if is_open and num_choices > 1 and not temperature_of(fields, serving.model_config):
        # Behind the last line, no length differs: all choices would be equal.
        ignored.append("n")
        kept["n"] = 1
    if ignored:
        current_request.headers[IGNORED_HEADER] = ", ".join(ignored)
    if is_open:
        return {**kept, "prompt": texts.prefixes, "max_tokens": budget}
    template = Template((None, texts.suffix))
    stops = stops_of(
        {**fields, "stop": current_request.stops or fields.get("stop")}.get
    )
    min_tokens = max(fields.get("min_tokens") or 0, 0)
    current_request.filling = Filling(
        template, min_tokens, budget, num_choices, False, stops, in_chat=False
    )
    if all(isinstance(prefix, str) for prefix in prefixes):
        # Given tokens are not checked yet.
        current_request.filling.begin(serving.engine_client, texts.prefixes)
        await asyncio.sleep(0)  # so that the engine gets its calls now
    prompts = [each for each in texts.prefixes for _ in range(num_choices)]
    return {**kept, "n": 1, "prompt": prompts, "max_tokens": max(min_tokens, 1)}


def temperature_of(fields: dict[str, Any], model_config: Any) -> float:
    """The temperature of a body, or the default of the model."""
    stated = fields.get("temperature")
    defaults = model_config.override_generation_config
    return defaults["temperature"] if stated is None else stated


def _texts_around(
    fields: dict[str, Any], serving: Any
) -> tuple[list[str | list[int]], str] | None:
    """The prompts, and the text behind the cursor; None if there is none."""
    prompt, suffix = fields.get("prompt"), fields.get("suffix")
    if suffix is None:
        read = _read_markers(prompt, serving)
        return None if read is None else ([read.prefix], read.suffix)
    prompts: Any = [prompt] if isinstance(prompt, str) or _is_tokens(prompt) else prompt
    if not isinstance(prompts, list) or not prompts:
        return None
    is_readable = all(isinstance(each, str) or _is_tokens(each) for each in prompts)
    return (prompts, suffix) if is_readable else None


def around_cursor(prompt: str, serving: Any) -> Around:
    """The texts around the cursor, by the prompt's markers if it has some."""
    return _read_markers(prompt, serving) or Around(prompt, "")


def _read_markers(prompt: Any, serving: Any) -> Around | None:
    read = read_markers(prompt)
    if read is None:
        return None
    options = EngineOptions.from_vllm_config(serving.engine_client.vllm_config)
    return read if options.fim_markers else None


def _is_tokens(prompt: Any) -> bool:
    return (
        isinstance(prompt, list)
        and len(prompt) > 0
        and all(type(token) is int for token in prompt)
    )


def _check(fields: dict[str, Any], around: Any, serving: Any) -> None:
    """Raise ``InvalidRequestError`` for fields that a completion at a cursor cannot
    have.
    """
    _, suffix = around
    family = serving.model_config.hf_config.family
    check_suffix(
        suffix,
        fields.get("vllm_xargs") or {},
        fields.get("max_tokens"),
        echo=fields.get("echo"),
    )
    if tokenizer_of(serving) is None:
        raise InvalidRequestError(
            "the engine has no tokenizer (skip_tokenizer_init=True); give token ids as "
            "response_template"
        )
    if family.attention != "full" and not _is_blank(suffix, serving):
        raise InvalidRequestError(
            f"{family.name} cannot fill in before a suffix: its blocks are final before "
            f"what stands behind them is seen; use a model that attends to the whole "
            f"canvas (`dllm models`)"
        )


def tokenizer_of(serving: Any) -> Any:
    """The tokenizer of the served model; None: it has none."""
    return serving.renderer.tokenizer


def _is_blank(suffix: str, serving: Any) -> bool:
    """Return True for whitespace or an end token's text. Some clients send the latter
    if the cursor is at the end of a file.
    """
    tokenizer = tokenizer_of(serving)
    ends = every_end_token(serving.model_config.hf_config)
    names = {*tokenizer.convert_ids_to_tokens(sorted(ends)), "<|endoftext|>"}
    return not suffix.strip() or suffix.strip() in names


def fitted(
    prefixes: Sequence[str | list[int]], suffix: str, tokenizer: Any, room: int
) -> Fitted:
    """Tokens of the texts around a cursor. If they exceed ``room``, the far ends are
    left out, first that of the prefix.
    """
    # Keep a character more than may fit, so that the later cut removes at least one
    # token.
    most = room * tokenizer.max_chars_per_token + 1
    behind = plain_tokens(suffix[:most], tokenizer)
    before = [
        plain_tokens(prefix[-most:], tokenizer) if isinstance(prefix, str) else prefix
        for prefix in prefixes
    ]
    longest = max(map(len, before))
    num_behind = min(len(behind), max(room - longest, room // _LEAST_SHARE))
    num_before = room - num_behind
    is_cut = len(behind) > num_behind or longest > num_before
    line_end = plain_tokens("\n", tokenizer)  # A prompt has at least one token.
    cut = [tokens[-num_before:] or line_end for tokens in before]
    return Fitted(cut, behind[:num_behind], is_cut)


def plain_tokens(text: str, tokenizer: Any) -> list[int]:
    """Tokens of a text without special tokens: an edited file may have the text of a
    special token.
    """
    pattern = _special_texts(tokenizer)
    cuts = [match.start() + 1 for match in pattern.finditer(text)] if pattern else []
    tokens: list[int] = []
    for begin, end in zip([0, *cuts], [*cuts, len(text)], strict=True):
        tokens += tokenizer.encode(
            text[begin:end], add_special_tokens=False, verbose=False
        )
    return tokens


@lru_cache(maxsize=4)
def _special_texts(tokenizer: Any) -> re.Pattern[str] | None:
    """The texts of all special tokens."""
    added = [str(token) for token in tokenizer.added_tokens_decoder.values()]
    names = {*tokenizer.all_special_tokens, *added}
    texts = [name for name in names if name[:1] in "<[" and len(name) > 1]
    longest_first = sorted(texts, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first))) if texts else None
