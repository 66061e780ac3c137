"""The model ``dllm`` of lm-evaluation-harness, which is found by its entry point or by
``dllm lm-eval``.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

import lm_eval.models  # noqa: F401 - registers models only if none is there yet
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import normalize_gen_kwargs

from dllm_engine.evaluation.likelihood import NUM_SAMPLES, log_likelihoods
from dllm_engine.evaluation.runner import Cost, Request, complete_requests
from dllm_engine.llm import LLM
from dllm_engine.params import DiffusionParams
from dllm_engine.request_options.fields import RequestOptions
from dllm_engine.text import choices

DECODING_OPTIONS = (
    "gen_length",
    *RequestOptions.model_fields,
    "temperature",
    "seed",
    "ignore_eos",
)
_TASK_OPTIONS = {"temperature", "top_p", "top_k", "seed"}
"""Options with the same names in the ``generation_kwargs`` of lm_eval's tasks."""


@dataclass(frozen=True)
class HarnessSettings:
    """Settings for making requests from lm_eval's tasks."""

    mc_num: int = NUM_SAMPLES
    mc_seed: int = 0
    """``mc_num`` and ``mc_seed``: ``num_samples`` and ``seed`` of ``log_likelihoods``.
    """
    check_greedy: bool = True
    """Report if a continuation equals the model's own answer, which takes a response of
    its length. False: report that it does not. Multiple choice does not need it.
    """
    max_prompt_tokens: int | None = None
    """Longer prompts lose their middle, as in LongBench; None: prompts that are too
    long are refused.
    """
    add_bos_token: bool | None = None
    """Begin every prompt with the tokenizer's BOS token, or with no special token;
    None: as the tokenizer does. A prompt that begins with it already, as from a chat
    template, gets no second one.
    """
    escape_until: bool = False
    """True to ignore a task's stop strings, as some authors do."""


@register_model("dllm")
class DiffusionLM(TemplateLM):
    """A diffusion engine as lm_eval's model.

    Args:
        pretrained: a model to start, or an engine.
        answer: function like ``complete_requests``, which is the default.
        options: fields of ``HarnessSettings``, what ``dllm_engine.LLM`` takes
            (``cache_method``, …), and decoding options (``gen_length``, ``threshold``,
            …). These replace a task's own; diffusion options in lm_eval's
            ``--gen_kwargs`` replace both.
    """

    def __init__(
        self,
        pretrained: str | LLM = "",
        *,
        answer: Callable[[Sequence[Request]], tuple[list[Any], Cost]] | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        names = [field.name for field in fields(HarnessSettings)]
        setting_values = {name: options.pop(name) for name in names if name in options}
        self.settings = settings = HarnessSettings(**setting_values)
        if pretrained == "":
            raise ValueError(
                "model_args names no model; add pretrained=… (a folder, a name, or "
                "demo)"
            )
        longest = settings.max_prompt_tokens
        if longest is not None and longest < 2:
            raise ValueError(
                f"max_prompt_tokens={longest} is out of range: it must be at least 2"
            )
        # Arguments of lm_eval: the engine batches what fits, on the device that vLLM
        # finds.
        for name in ("batch_size", "max_batch_size", "device"):
            options.pop(name, None)
        # A retention_ratio lowers the engine's ratio for every request. cache_options
        # sets the engine's ratio.
        self.decoding = {
            name: options.pop(name) for name in DECODING_OPTIONS if name in options
        }
        if options and not isinstance(pretrained, str):
            raise ValueError(
                f"unknown decoding option "
                f"{min(options)!r}{choices(min(options), DECODING_OPTIONS)}"
            )
        self.llm = (
            LLM(pretrained, **options) if isinstance(pretrained, str) else pretrained
        )
        self.answer = answer or partial(complete_requests, self.llm, label="Requests")
        self.tokenizer = self.llm.get_tokenizer()
        if settings.add_bos_token and self.tokenizer.bos_token_id is None:
            raise ValueError(
                "add_bos_token=True needs a BOS token, which the tokenizer lacks; "
                "leave it out"
            )

    @property
    def eot_token_id(self) -> int:
        return self.tokenizer.eos_token_id

    @property
    def prefix_token_id(self) -> int:
        bos = self.tokenizer.bos_token_id
        return bos if bos is not None else self.eot_token_id

    @property
    def tokenizer_name(self) -> str:
        return self.llm.model_config.model.replace("/", "__")

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **kwargs: Any
    ) -> list[int]:
        bos = self.tokenizer.bos_token
        if add_special_tokens is None:
            add_special_tokens = self.settings.add_bos_token is not False
            if bos and string.startswith(bos):
                add_special_tokens = False  # the chat template has added it
        tokens = self.tokenizer.encode(string, add_special_tokens=add_special_tokens)
        # Not every tokenizer with a BOS token puts it before texts.
        if (
            add_special_tokens
            and self.settings.add_bos_token
            and tokens[:1] != [self.tokenizer.bos_token_id]
        ):
            tokens.insert(0, self.tokenizer.bos_token_id)
        return tokens

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        return self.tokenizer.apply_chat_template(
            chat_history,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
        )

    def generate_until(
        self, requests: list[Any], disable_tqdm: bool = False
    ) -> list[str]:
        """Generate responses, without the stop string that ended them."""
        times: Counter[int] = Counter()
        prompts_and_params = []
        for request in requests:
            context, options = request.args
            params = self._params(options)
            if params.seed is not None:
                # A task that repeats requests wants different responses.
                params.seed += times[id(request)]
                times[id(request)] += 1
            prompts_and_params.append(
                (self._fit(self.tok_encode(context), params.max_tokens or 1), params)
            )
        completions, _ = self.answer(prompts_and_params)
        for request, completion in zip(requests, completions, strict=True):
            self.cache_hook.add_partial("generate_until", request.args, completion.text)
        return [completion.text for completion in completions]

    def _params(self, task_options: dict[str, Any]) -> DiffusionParams:
        """Decoding parameters of a request. ``task_options``: ``generation_kwargs`` of
        its task.
        """
        named = {
            "max_gen_toks",
            "max_new_tokens",
            "max_tokens",
            "max_completion_tokens",
        } & task_options.keys()
        options = dict(normalize_gen_kwargs(task_options))
        until = options.pop("until")
        stop = [] if self.settings.escape_until else [text for text in until if text]
        options.pop("do_sample")
        gen_length = options.pop("max_gen_toks")
        stated = {
            name: options.pop(name) for name in DECODING_OPTIONS if name in options
        }
        diffusion = {
            name: value for name, value in stated.items() if name not in _TASK_OPTIONS
        }
        params = (
            ({"gen_length": gen_length} if named else {})
            | stated
            | self.decoding
            | diffusion
        )
        if options:
            name, value = next(iter(options.items()))
            raise ValueError(
                f"generation_kwargs {name}={value!r} is not supported, only "
                f"{', '.join(DECODING_OPTIONS)}"
            )
        return DiffusionParams(stop=stop, **params)

    def _fit(self, prompt: list[int], response_length: int) -> list[int]:
        """The prompt, shortened to ``max_prompt_tokens``. Raises ``ValueError`` if it
        does not fit.
        """
        kept = self.settings.max_prompt_tokens
        limit = self.llm.model_config.max_model_len
        if kept is not None and len(prompt) > kept:
            prompt = prompt[: kept // 2] + prompt[kept // 2 - kept :]
        if len(prompt) + response_length > limit:
            raise ValueError(
                f"a prompt of {len(prompt)} tokens and a response of {response_length} "
                f"exceed max_model_len {limit}; raise it, or set max_prompt_tokens to "
                f"cut long prompts in their middle"
            )
        return prompt

    def _loglikelihood_tokens(
        self, requests: list[Any], disable_tqdm: bool = False, **kwargs: Any
    ) -> list[tuple[float, bool]]:
        pairs = [
            (self._fit(prompt, len(continuation)), continuation)
            for _, prompt, continuation in requests
        ]
        bounds = log_likelihoods(
            self.llm, pairs, self.settings.mc_num, self.settings.mc_seed
        )
        greedy = (
            self._greedy(pairs, use_tqdm=not disable_tqdm)
            if self.settings.check_greedy
            else [False] * len(pairs)
        )
        answers = list(zip(bounds, greedy, strict=True))
        for (text, _, _), answer in zip(requests, answers, strict=True):
            if text is not None:
                self.cache_hook.add_partial("loglikelihood", text, answer)
        return answers

    def _greedy(
        self, pairs: Sequence[tuple[list[int], list[int]]], *, use_tqdm: bool
    ) -> list[bool]:
        """True for each continuation that the model itself generates, one token per
        step in one block.
        """
        generated_lengths = [
            (prompt, len(continuation))
            for prompt, continuation in pairs
            if continuation
        ]
        prompts = [{"prompt_token_ids": prompt} for prompt, _ in generated_lengths]
        params = [
            DiffusionParams(gen_length=n, block_length=n, steps=n, ignore_eos=True)
            for _, n in generated_lengths
        ]
        responses = iter(self.llm.generate(prompts, params, use_tqdm=use_tqdm))
        return [
            not continuation
            or list(next(responses).outputs[0].token_ids) == continuation
            for _, continuation in pairs
        ]

    def loglikelihood_rolling(
        self, requests: list[Any], disable_tqdm: bool = False
    ) -> list[float]:
        raise ValueError(
            "likelihoods of whole texts are not supported; take a task that asks for "
            "continuations"
        )
