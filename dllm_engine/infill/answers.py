"""Templates filled in offline: one request for each combination of the sizes of a template's holes."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from vllm import LLM, RequestOutput

from dllm_engine.infill.template import Piece, filled_in, response_template, sized
from dllm_engine.params import DiffusionParams


@dataclass(frozen=True)
class Candidate:
    """A template with one size for each of its holes, as a request."""

    owner: int
    """Index of its template."""
    pieces: Sequence[str | int]
    template: list[int | None]
    params: DiffusionParams


def candidates(
    templates: Sequence[Sequence[Piece]], params: DiffusionParams, tokenizer: Any, max_model_len: int
) -> list[Candidate]:
    """The requests that templates make, in the order of the templates; raises as ``LLM.fill_in``."""
    choices = [sized(template) for template in templates]
    if params.n > 1 and any(len(one_size_each) > 1 for one_size_each in choices):
        raise ValueError(f"n={params.n}: of several sizes one answer is kept; leave n at 1, or give one size per hole")
    made = []
    for owner, one_size_each in enumerate(choices):
        for pieces in one_size_each:
            template = response_template(pieces, tokenizer, max_model_len)
            made.append(Candidate(owner, pieces, template, _params(params, template, len(one_size_each))))
    return made


def fill_in(
    llm: LLM, prompts: Sequence[Any], templates: Sequence[Sequence[Piece]], params: DiffusionParams
) -> list[RequestOutput]:
    """See ``LLM.fill_in`` of this package."""
    if len(prompts) != len(templates):
        raise ValueError(f"{len(prompts)} prompts and {len(templates)} templates: give one template per prompt")
    tokenizer = None if llm.model_config.skip_tokenizer_init else llm.get_tokenizer()
    asked = candidates(templates, params, tokenizer, llm.model_config.max_model_len)
    outputs = answered(llm, [prompts[each.owner] for each in asked], [each.params for each in asked])
    best: dict[int, RequestOutput] = {}
    for each, output in zip(asked, outputs, strict=True):
        for completion in output.outputs:
            _set_texts(completion, each.pieces, each.template, tokenizer)
        if each.owner not in best or _mean_logprob(output) > _mean_logprob(best[each.owner]):
            best[each.owner] = output
    return [best[number] for number in range(len(prompts))]


def _params(params: DiffusionParams, template: list[int | None], num_candidates: int) -> DiffusionParams:
    params = params.clone()
    params.response_template, params.return_given = template, False
    if num_candidates > 1 and params.logprobs is None:
        params.logprobs = 0
    return params


def answered(llm: LLM, prompts: list[Any], params: Any) -> list[RequestOutput]:
    """Responses to prompts, or to messages, by parameters of all or of each."""
    chats = [isinstance(prompt, list) for prompt in prompts]
    if any(chats) and not all(chats):
        raise ValueError("prompts are texts or messages, not some of each")
    return llm.chat(prompts, params, use_tqdm=False) if any(chats) else llm.generate(prompts, params, use_tqdm=False)


def _set_texts(completion: Any, pieces: Sequence[str | int], template: list[int | None], tokenizer: Any) -> None:
    completion.holes = filled_in(completion.token_ids, template, tokenizer, with_given=False)
    texts = iter(completion.holes)
    completion.joined = "".join(piece if isinstance(piece, str) else next(texts) for piece in pieces)


def _mean_logprob(output: RequestOutput) -> float:
    """Per token filled in."""
    completion = output.outputs[0]
    return (completion.cumulative_logprob or 0.0) / max(len(completion.token_ids), 1)
