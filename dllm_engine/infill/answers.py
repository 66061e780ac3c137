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
    choices = [sized(template) for template in templates]
    if params.n > 1 and any(len(one_size_each) > 1 for one_size_each in choices):
        raise ValueError(f"n={params.n}: of several sizes one answer is kept; leave n at 1, or give one size per hole")
    tokenizer = None if llm.model_config.skip_tokenizer_init else llm.get_tokenizer()
    asked = [(number, pieces) for number, one_size_each in enumerate(choices) for pieces in one_size_each]
    requests = []
    for number, pieces in asked:
        request = params.clone()
        request.response_template = response_template(pieces, tokenizer, llm.model_config.max_model_len)
        request.return_given = False
        if len(choices[number]) > 1 and request.logprobs is None:
            request.logprobs = 0
        requests.append(request)
    outputs = answered(llm, [prompts[number] for number, _ in asked], requests)
    best: dict[int, RequestOutput] = {}
    for (number, pieces), request, output in zip(asked, requests, outputs, strict=True):
        for completion in output.outputs:
            template = request.response_template or []
            completion.holes = filled_in(completion.token_ids, template, tokenizer, with_given=False)
            texts = iter(completion.holes)
            completion.joined = "".join(piece if isinstance(piece, str) else next(texts) for piece in pieces)
        if number not in best or _mean_logprob(output) > _mean_logprob(best[number]):
            best[number] = output
    return [best[number] for number in range(len(prompts))]


def answered(llm: LLM, prompts: list[Any], params: Any) -> list[RequestOutput]:
    """Responses to prompts, or to messages, by parameters of all or of each."""
    chats = [isinstance(prompt, list) for prompt in prompts]
    if any(chats) and not all(chats):
        raise ValueError("prompts are texts or messages, not some of each")
    return llm.chat(prompts, params, use_tqdm=False) if any(chats) else llm.generate(prompts, params, use_tqdm=False)


def _mean_logprob(output: RequestOutput) -> float:
    """Per token filled in."""
    completion = output.outputs[0]
    return (completion.cumulative_logprob or 0.0) / max(len(completion.token_ids), 1)
