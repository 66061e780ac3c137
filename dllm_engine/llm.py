"""``LLM``: vLLM's offline class with the options of diffusion engines as keywords."""

import atexit
import gc
import inspect
import json
import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from itertools import compress
from pathlib import Path
from typing import Any, Literal, overload

import vllm
from pydantic import ValidationError
from vllm.engine.arg_utils import EngineArgs

from dllm_engine.checkpoints import check_start
from dllm_engine.decisions.answering import (
    Questions,
    answer_all,
    as_messages,
    plain_text,
)
from dllm_engine.decisions.asking import Asking, Row, check_files
from dllm_engine.decisions.questions import Answer
from dllm_engine.decisions.requests import (
    TOP_K,
    DecisionOutput,
    decision_params,
    schema_of,
)
from dllm_engine.decoding.probe import Probe
from dllm_engine.demo import model_path
from dllm_engine.evaluation.likelihood import Canvas, no_likelihoods, probe_of
from dllm_engine.infill.edges import (
    Opened,
    chosen_openings,
    openings,
    stops_of,
)
from dllm_engine.infill.offline import attempts_of, best_lengths, returned
from dllm_engine.infill.template import (
    Piece,
    Template,
    nothing,
    tokenized,
)
from dllm_engine.lengths.forward_passes import answers_of, result_of
from dllm_engine.options import OPTIONS_KEY, EngineOptions
from dllm_engine.params import DiffusionParams
from dllm_engine.plugin import register_or_raise
from dllm_engine.quiet import progress_line, quiet_arguments
from dllm_engine.text import did_you_mean, explain, with_meanings
from dllm_engine.vllm_hooks import patch, table
from dllm_engine.vllm_hooks.release import check_device

patch.apply(table.SAMPLING)

_DEFAULTS = EngineOptions()


class LLM(vllm.LLM):
    """``vllm.LLM`` for diffusion language models; every argument of it still works.

    It logs only warnings and errors, unless ``VLLM_LOGGING_LEVEL`` or ``log_level`` is
    set. ``model`` may also be ``"demo"`` or ``"demo-blocks"``. The new keywords are
    engine options; docs/reference.md has their values. Raises ``ValueError`` for
    options that do not suit each other, the model or the machine.
    """

    def __init__(
        self,
        model: str | os.PathLike[str],
        *,
        cache_method: str = _DEFAULTS.cache_method,
        cache_options: dict[str, Any] | Literal["paper"] | None = None,
        page_size: int = _DEFAULTS.page_size,
        dense_attention: Literal["auto", "flash", "sdpa"] = _DEFAULTS.dense_attention,
        refresh_ratio: float | None = _DEFAULTS.refresh_ratio,
        share_prompts: bool = _DEFAULTS.share_prompts,
        anchor_tokens: int = _DEFAULTS.anchor_tokens,
        steps_per_dispatch: int = _DEFAULTS.steps_per_dispatch,
        guide_model: str | None = _DEFAULTS.guide_model,
        guide_tokens_per_token: float = _DEFAULTS.guide_tokens_per_token,
        lora_path: str | None = _DEFAULTS.lora_path,
        cuda_graphs: bool | None = _DEFAULTS.cuda_graphs,
        batch_invariant: bool = _DEFAULTS.batch_invariant,
        max_automaton_states: int = _DEFAULTS.max_automaton_states,
        max_automaton_seconds: float = _DEFAULTS.max_automaton_seconds,
        max_automaton_search: int = _DEFAULTS.max_automaton_search,
        decision_way: Literal["auto", "marks", "labels"] = _DEFAULTS.decision_way,
        decision_template: str | None = _DEFAULTS.decision_template,
        decision_joint: bool = _DEFAULTS.decision_joint,
        decision_calibration: str | None = _DEFAULTS.decision_calibration,
        request_defaults: dict[str, Any] | None = None,
        trace: bool = _DEFAULTS.trace,
        **kwargs: Any,
    ) -> None:
        options = {
            name: value
            for name, value in locals().items()
            if name in EngineOptions.model_fields
        }
        options |= {
            "cache_options": cache_options or {},
            "request_defaults": request_defaults or {},
        }
        vllm_parameters = {
            *inspect.signature(vllm.LLM.__init__).parameters,
            *(field.name for field in fields(EngineArgs)),
        }
        known_names = {*_ARGUMENTS, *vllm_parameters} - {"self", "kwargs"}
        for name in kwargs.keys() - known_names:
            raise ValueError(
                f"unknown argument {name!r}{did_you_mean(name, known_names)}"
            )
        model = os.fspath(model)
        engine_options = EngineOptions.parse(options)
        check_device()
        # vLLM loads plugins later, but the check below needs the model's config class.
        register_or_raise()
        check_start(model, kwargs)
        check_files(engine_options, model_path(model))
        additional = kwargs.pop("additional_config", None) or {}
        if OPTIONS_KEY in additional:
            raise ValueError(
                f"additional_config[{OPTIONS_KEY!r}]={additional[OPTIONS_KEY]!r}: LLM "
                f"takes engine options as keyword arguments; pass them as such"
            )
        arguments: dict[str, Any] = {
            "model": model_path(model),
            **quiet_arguments(kwargs),
            **kwargs,
        }
        shown = kwargs.get("use_tqdm_on_load", True)
        with progress_line(f"Starting {Path(model).name}", shown=shown):
            try:
                super().__init__(
                    **arguments, additional_config=additional | {OPTIONS_KEY: options}
                )
            # vLLM's config classes wrap errors that are raised inside them.
            except ValidationError as error:
                raise ValueError(explain(error, "argument")) from None
        atexit.register(_shut_down, weakref.ref(self.llm_engine.engine_core))
        defaults = self.model_config.hf_config.family.template_defaults
        settings = _template_settings(defaults)
        template = getattr(self._tokenizer, "chat_template", None)
        # Engines of a process share a tokenizer, which may have the settings already.
        if isinstance(template, str) and not template.startswith(settings):
            self._tokenizer.chat_template = settings + template

    def infill(
        self,
        prefix: str | Sequence[str],
        suffix: str | Sequence[str],
        params: DiffusionParams | None = None,
        *,
        sizes: Sequence[int] = (),
    ) -> list[vllm.RequestOutput]:
        """Fill in the text between a prefix and a suffix, or between several pairs of
        them. Returns the same as ``fill_in``.

        Args:
            params: ``gen_length`` is the number of tokens in between. Unset: it is
                chosen, at most 64. With ``n`` (and a temperature above 0), the best
                ``n`` numbers are tried, one response each.
            sizes: numbers of tokens to choose from.
        """
        params = _diffusion_params(params)
        if sizes and params.max_tokens is not None:
            raise ValueError(
                f"gen_length={params.max_tokens}, sizes={sizes}: give one of them"
            )
        hole: Piece = tuple(sizes) if sizes else params.max_tokens
        prefixes, suffixes = (
            [texts] if isinstance(texts, str) else texts for texts in (prefix, suffix)
        )
        if len(prefixes) != len(suffixes):
            raise ValueError(
                f"{len(prefixes)} prefixes and {len(suffixes)} suffixes: give equally "
                f"many"
            )
        params = params.clone()
        params.gen_length = params.max_tokens = None
        return self.fill_in(prefixes, [[hole, text] for text in suffixes], params)

    def fill_in(
        self,
        prompts: Sequence[Any],
        templates: Sequence[Sequence[Piece]],
        params: DiffusionParams | None = None,
    ) -> list[vllm.RequestOutput]:
        """Fill in the holes of templates. A template follows its prompt.

        Args:
            prompts: each as for ``generate``, or messages as for ``chat``.
            templates: one per prompt: a list of texts and holes. A hole is its number
                of tokens, several numbers to choose from, or None to choose any number.
            params: parameters for all prompts, without ``gen_length``.

        Returns:
            One output per prompt. ``outputs[i].text`` and ``token_ids`` contain what
            was filled in, ``outputs[i].holes`` the text of each hole, and
            ``outputs[i].joined`` the whole template.

        Raises:
            ValueError: a template without a hole, a special token in a text, and what
            ``generate`` refuses.
        """
        if len(prompts) != len(templates):
            raise ValueError(
                f"{len(prompts)} prompts and {len(templates)} templates: give one "
                f"template per prompt"
            )
        params = _diffusion_params(params)
        tokenizer = self._tokenizer
        max_model_len = self.model_config.max_model_len
        read = [tokenized(template, tokenizer, max_model_len) for template in templates]
        opened = self._opened(prompts, read, params)
        ranked = result_of(self, best_lengths(opened, params, self.model_config))
        attempts = attempts_of(opened, ranked, params)
        filled_prompts = [
            _with_tokens(prompts[attempt.number], attempt.opened.prompt)
            for attempt in attempts
        ]
        requests = [attempt.request for attempt in attempts]
        outputs = self._filled(filled_prompts, requests)
        return result_of(self, returned(attempts, outputs, templates, tokenizer))

    def _opened(
        self, prompts: Sequence[Any], templates: Sequence[Template], params: Any
    ) -> list[Opened]:
        """Templates with the tokens of their prompts. If a length is open, the hole
        takes in parts of words beside it. The prompt of a chat never ends with a part
        of a word.
        """
        if not any(template.open_holes for template in templates):
            return [Opened([], template) for template in templates]
        are_chats = _are_chats(prompts)
        render = self._preprocess_chat if are_chats else self._preprocess_cmpl
        stops = stops_of(lambda name: getattr(params, name, None))
        openables = []
        for rendered, template in zip(render(prompts), templates, strict=True):
            tokens = list(rendered["prompt_token_ids"])
            openables.append(
                openings(tokens, template, self._tokenizer, stops, in_chat=are_chats)
            )
        return result_of(self, chosen_openings(openables))

    def _filled(
        self, prompts: list[Any], requests: list[DiffusionParams]
    ) -> list[vllm.RequestOutput]:
        """Responses to prompts with templates; empty if a template has no hole left."""
        has_hole = [None in (each.response_template or ()) for each in requests]
        answered = iter(
            self._answered(
                list(compress(prompts, has_hole)), list(compress(requests, has_hole))
            )
            if any(has_hole)
            else ()
        )
        return [
            next(answered) if has_hole[i] else nothing("", {}, request)
            for i, request in enumerate(requests)
        ]

    @overload
    def decide(
        self, prompts: str | Sequence[Any], fields: Questions
    ) -> list[list[Answer]]: ...

    @overload
    def decide(
        self,
        prompts: str | Sequence[Any],
        fields: Mapping[str, Any],
        *,
        template: str | None = None,
        passes: int = 1,
        top_k: int = TOP_K,
    ) -> list[DecisionOutput]: ...

    def decide(
        self,
        prompts: str | Sequence[Any],
        fields: Mapping[str, Any] | Questions,
        *,
        template: str | None = None,
        passes: int = 1,
        top_k: int = TOP_K,
    ) -> list[DecisionOutput] | list[list[Answer]]:
        """Decide typed fields of each prompt, or answer questions about it, with the
        model's probabilities of the values.

        Args:
            prompts: one text, or several prompts as for ``generate``, or messages as
                for ``chat``.
            fields: by name ``bool``, a ``range``, a list of choices, a compiled regular
                expression that the whole value matches, or a JSON schema of one; or a
                JSON schema of an object with all of them. Or ``Questions``, which
                need none of the arguments below; their answers are a list per prompt.
            template: the response, with ``{name}`` for each field; unset: a JSON object
                with all of them.
            passes: the most forward passes. Each pass but the last commits the surest
                fields, and the others are predicted again.
            top_k: number of values that are reported for a field with a pattern.

        Raises:
            ValueError: a field that a decision cannot have, by name, and what
            ``generate`` refuses.
        """
        prompts = [prompts] if isinstance(prompts, str) else list(prompts)
        if isinstance(fields, Questions):
            inputs = [as_messages(prompt) for prompt in prompts]
            asked = [(messages, fields) for messages in inputs]
            return answer_all(self.asking, self.ask_rows, asked)
        vllm_config = self.llm_engine.vllm_config
        params = decision_params(
            schema_of(fields),
            self._tokenizer,
            vllm_config,
            template=template,
            passes=passes,
            top_k=top_k,
        )
        return [DecisionOutput.of(output) for output in self._answered(prompts, params)]

    @property
    def asking(self) -> Asking:
        """The way in which questions are asked."""
        config = self.llm_engine.vllm_config
        options = EngineOptions.from_vllm_config(config)
        return Asking(options, config.model_config.model, self.get_tokenizer())

    def ask_rows(self, rows: list[Row]) -> list[vllm.RequestOutput]:
        """Answer the rows of questions."""
        if not rows:
            return []
        prompts: list[Any] = [row.messages for row in rows]
        if not self.has_chat_template:
            prompts = [plain_text(messages) for messages in prompts]
        return self._answered(prompts, [row.params for row in rows])

    def _answered(self, prompts: list[Any], params: Any) -> list[vllm.RequestOutput]:
        """Responses to prompts or messages. ``params``: for all of them, or one for
        each.
        """
        return (self.chat if _are_chats(prompts) else self.generate)(
            prompts, params, use_tqdm=False
        )

    @property
    def _tokenizer(self) -> Any:
        return None if self.model_config.skip_tokenizer_init else self.get_tokenizer()

    @property
    def has_chat_template(self) -> bool:
        return bool(getattr(self.get_tokenizer(), "chat_template", None))

    def masked_logprobs(self, canvases: Iterable[Canvas]) -> Iterator[list[float]]:
        """Log-probabilities of the masked tokens of each canvas, given all of its other
        tokens, without a cache.

        Args:
            canvases: tokens of each canvas, and the positions to mask. They are read
                lazily, as many as fit into one forward pass
                (``max_num_batched_tokens``).

        Raises:
            ValueError: a canvas that is empty or too long, a position or token that it
                cannot have, an engine that is paused, or a model whose attention
                depends on where the prompt ends.
        """
        if reason := no_likelihoods(self.model_config.hf_config.family):
            raise ValueError(reason)
        for answer in answers_of(self, self._checked_probes(canvases)):
            yield answer.tokens

    def _checked_probes(self, canvases: Iterable[Canvas]) -> Iterator[Probe]:
        limit = self.model_config.max_model_len
        size = self.model_config.hf_config.vocab_size
        for tokens, masked in canvases:
            if not 1 <= len(tokens) <= limit:
                raise ValueError(
                    f"a canvas of {len(tokens)} tokens: it must be 1 … max_model_len, "
                    f"here {limit}"
                )
            if not all(0 <= position < len(tokens) for position in masked):
                raise ValueError(
                    f"masked positions {masked} are not all in a canvas of "
                    f"{len(tokens)} tokens"
                )
            if not 0 <= min(tokens) <= max(tokens) < size:
                raise ValueError(
                    f"a canvas has a token that is not in the vocabulary of {size}"
                )
            yield probe_of((tokens, masked))

    def _run_completion(
        self, prompts: Any, params: Any, *args: Any, use_tqdm: Any = True, **kwargs: Any
    ) -> Any:
        """Run without a progress bar for a single prompt."""
        several = not isinstance(prompts, str | Mapping) and len(prompts) > 1
        return super()._run_completion(
            prompts, params, *args, use_tqdm=several and use_tqdm, **kwargs
        )

    def _run_chat(
        self,
        messages: Any,
        params: Any,
        *args: Any,
        use_tqdm: Any = True,
        **kwargs: Any,
    ) -> Any:
        """Run without a progress bar for a single conversation."""
        several = len(messages) > 1 and isinstance(messages[0], list)
        return super()._run_chat(
            messages, params, *args, use_tqdm=several and use_tqdm, **kwargs
        )

    def get_default_sampling_params(self) -> vllm.SamplingParams:
        """The model's default parameters, without a default length, so that admission
        chooses it or what fits.
        """
        params = super().get_default_sampling_params().clone()
        if self.model_config.dllm_response_limit is None:
            params.max_tokens = None
        return params


def _shut_down(client: Callable[[], Any]) -> None:
    """Shut an engine down before the program ends. Otherwise Python ends the engine's
    process first, and vLLM warns that it exited unexpectedly. Afterwards the program
    skips Python's garbage collection of everything that vLLM has imported, which takes
    seconds.
    """
    if core := client():
        core.shutdown()
    gc.freeze()


def _diffusion_params(params: Any) -> DiffusionParams:
    if isinstance(params, DiffusionParams | None):
        return params or DiffusionParams()
    raise ValueError(
        f"params: filling in takes DiffusionParams for all prompts, not "
        f"{type(params).__name__}"
    )


def _are_chats(prompts: Sequence[Any]) -> bool:
    """Return True for messages, False for texts."""
    chats = [isinstance(prompt, list) for prompt in prompts]
    if any(chats) and not all(chats):
        raise ValueError("prompts are texts or messages, not some of each")
    return any(chats)


def _with_tokens(prompt: Any, tokens: list[int]) -> Any:
    """A prompt with its tokens, so that it is not tokenized again. The tokens of a chat
    are not known.
    """
    if isinstance(prompt, list) or not tokens:
        return prompt
    parts = {"prompt": prompt} if isinstance(prompt, str) else prompt
    return {**parts, "prompt_token_ids": tokens}


_ARGUMENTS = inspect.signature(LLM.__init__).parameters
_OPTIONS = [name for name in _ARGUMENTS if name in EngineOptions.model_fields]
LLM.__doc__ = with_meanings(LLM.__doc__, "Engine options", EngineOptions, _OPTIONS)


def _template_settings(defaults: Mapping[str, Any]) -> str:
    """Beginning of a chat template that sets arguments that the caller leaves out."""
    return "".join(
        f"{{%- if {name} is not defined %}}{{%- set {name} = {json.dumps(value)} %}}"
        "{%- endif %}"
        for name, value in defaults.items()
    )
