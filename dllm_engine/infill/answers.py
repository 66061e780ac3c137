"""Templates filled in offline: one request for each combination of the sizes of a template's holes."""

from collections.abc import Sequence
from typing import Any

from vllm import LLM, RequestOutput

from dllm_engine.infill.template import Piece, filled_in, response_template, sized
from dllm_engine.params import DiffusionParams


def fill_in(
    llm: LLM, prompts: Sequence[Any], templates: Sequence[Sequence[Piece]], params: DiffusionParams
) -> list[RequestOutput]:
    """See ``LLM.fill_in`` of this package."""
    if len(prompts) != len(templates):
        raise ValueError(f"{len(prompts)} prompts and {len(templates)} templates: give one template per prompt")
    tokenizer = None if llm.model_config.skip_tokenizer_init else llm.get_tokenizer()
    candidates = [sized(template) for template in templates]
    if params.n > 1 and any(len(of_prompt) > 1 for of_prompt in candidates):
        raise ValueError(f"n={params.n}: of several sizes one answer is kept; leave n at 1, or give one size per hole")
    pieces = [of_one for of_prompt in candidates for of_one in of_prompt]
    tokens = [response_template(of_one, tokenizer, llm.model_config.max_model_len) for of_one in pieces]
    owners = [number for number, of_prompt in enumerate(candidates) for _ in of_prompt]
    asked = [_params(params, template, len(candidates[n])) for n, template in zip(owners, tokens, strict=True)]
    outputs = _answers(llm, [prompts[number] for number in owners], asked)
    best: dict[int, RequestOutput] = {}
    for number, of_one, template, output in zip(owners, pieces, tokens, outputs, strict=True):
        for completion in output.outputs:
            _set_texts(completion, of_one, template, tokenizer)
        if number not in best or _mean_logprob(output) > _mean_logprob(best[number]):
            best[number] = output
    return [best[number] for number in range(len(prompts))]


def _params(params: DiffusionParams, template: list[int | None], num_candidates: int) -> DiffusionParams:
    params = params.clone()
    params.response_template, params.return_given = template, False
    if num_candidates > 1 and params.logprobs is None:
        params.logprobs = 0
    return params


def _answers(llm: LLM, prompts: list[Any], params: list[DiffusionParams]) -> list[RequestOutput]:
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
