"""In-process engines for tests, and ways to look inside them."""

import atexit
import gc
import time
from collections.abc import Sequence
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
from vllm.distributed.device_communicators import shm_broadcast
from vllm.outputs import RequestOutput
from vllm.platforms import current_platform
from vllm.sampling_params import StructuredOutputsParams

from dllm_engine import LLM, DiffusionParams
from dllm_engine.evaluation.runner import runner_of, scheduler_of
from dllm_engine.options import EngineOptions
from dllm_engine.vllm_hooks.engine_config import _resolve_engine_options
from tests.support.plans import FULL_METHODS

EACH_METHOD_WITH_A_MODEL = list(zip(FULL_METHODS, cycle(("tiny_llada", "tiny_dream"))))
"""Fixtures of checkpoints. Both families with each method are in
``tests/methods/test_random_requests.py``.
"""


class EngineFactory:
    """Starts engines, one per model and settings. They live until the end of the
    session.
    """

    def __init__(self) -> None:
        self._engines: dict[tuple, LLM] = {}
        self._shared: set[tuple] = set()

    def __call__(self, model: Path | str, **settings: Any) -> LLM:
        key = (
            str(model),
            *sorted((name, repr(value)) for name, value in settings.items()),
        )
        if key not in self._engines:
            self._engines[key] = start_engine(model, **settings)
        elif key in self._shared:
            set_cache_options(self._engines[key], {})
            self._shared.remove(key)
        return self._engines[key]

    def shared(
        self,
        model: Path | str,
        *,
        cache_options: dict[str, Any] | None = None,
        **settings: Any,
    ) -> LLM:
        """The one engine of a model and settings, with the cache options of the last
        call. Requests carry these from their admission on, so that an engine of its own
        would differ in nothing."""
        llm = self(model, **settings)
        set_cache_options(llm, cache_options or {})
        self._shared |= {key for key, engine in self._engines.items() if engine is llm}
        return llm


def start_engine(model: Path | str, **settings: Any) -> LLM:
    """A small engine; raises what a user would see. Only for engines that are not
    expected to start.
    """
    # `gpu_memory_utilization` is what vLLM wants free on a GPU, beside the engines that
    # run already.
    defaults: dict[str, Any] = {
        "dtype": "float32",
        "skip_tokenizer_init": True,
        "trace": True,
        "max_model_len": 256,
        "max_num_seqs": 64,
        "steps_per_dispatch": 1,
        "kv_cache_memory_bytes": 16 << 20,
        "gpu_memory_utilization": 0.02,
    }
    return keep(LLM(model, **(defaults | settings)))


def refuse_start(model: Path | str, *fragments: str, **settings: Any) -> None:
    """An engine does not start, and says why in one short sentence that holds all
    ``fragments``.
    """
    with pytest.raises(ValueError) as error:
        start_engine(model, **settings)
    message = str(error.value)
    for fragment in fragments:
        assert fragment in message, message
    assert "\n" not in message
    assert len(message) < 1000


def keep(llm: Any) -> Any:
    """Return an engine that lives as long as the process: one that ends, or whose
    memory is collected, takes vLLM's process groups from all others."""
    llm.llm_engine.engine_core._finalizer.detach()
    return llm


def set_cache_options(llm: LLM, cache_options: dict[str, Any]) -> None:
    """Validate and settle other cache options for the requests that a running engine
    admits from now on.
    """
    config = llm.llm_engine.vllm_config
    options = config.additional_config["dllm"] | {"cache_options": cache_options}
    config.additional_config = {**config.additional_config, "dllm": options}
    _resolve_engine_options(config)
    scheduler = scheduler_of(llm)
    scheduler.options = EngineOptions.from_vllm_config(config)
    scheduler.resolver.options = scheduler.options


def set_steps_per_dispatch(
    llm: LLM, num_steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Give an engine another ``steps_per_dispatch`` until the test ends."""
    scheduler = scheduler_of(llm)
    monkeypatch.setattr(
        scheduler,
        "options",
        scheduler.options.model_copy(update={"steps_per_dispatch": num_steps}),
    )


def freeze_imports() -> None:
    """Make engines start and the process end faster: keep vLLM's modules out of each
    garbage collection, and have vLLM look once for the Triton kernels that it replaces
    on a CPU. For that it walks over all modules, in every start of an engine. And let
    vLLM's processes sleep while they look for a message; each would keep a core busy.
    """
    current_platform.register_triton_kernel_overrides()
    type(current_platform).register_triton_kernel_overrides = classmethod(
        lambda cls: None
    )
    shm_broadcast.sched_yield = partial(time.sleep, 1e-4)
    gc.collect()
    gc.freeze()
    atexit.register(gc.freeze)  # an engine that ends gives all to the last collection


def generate(
    llm: LLM, prompts: Sequence[list[int]], params: Any
) -> list[RequestOutput]:
    return llm.generate(
        [{"prompt_token_ids": list(prompt)} for prompt in prompts],
        params,
        use_tqdm=False,
    )


def responses(llm: LLM, prompts: Sequence[list[int]], params: Any) -> list[list[int]]:
    """The tokens of the response to each prompt."""
    outputs = generate(llm, prompts, params)
    return [list(output.outputs[0].token_ids) for output in outputs]


def matching(llm: LLM, prompt: str, regex: str | None, **fields: Any) -> list[Any]:
    """The responses to a text, which have to match a regex."""
    structured = None if regex is None else StructuredOutputsParams(regex=regex)
    params = DiffusionParams(structured_outputs=structured, **fields)
    return llm.generate([prompt], params, use_tqdm=False)[0].outputs


def demo_answers(
    engines: EngineFactory,
    examples: Sequence[Any],
    model: str = "demo",
    threshold: Any = None,
    **settings: Any,
) -> list[Any]:
    """The answers of one engine in this process to the questions of examples, in blocks
    of 8.
    """
    defaults = {
        "skip_tokenizer_init": False,
        "dtype": "auto",
        "max_model_len": 512,
        "trace": False,
    }
    chats = [[{"role": "user", "content": example.prompt}] for example in examples]
    params = DiffusionParams(gen_length=32, block_length=8, threshold=threshold)
    outputs = engines(model, **(defaults | settings)).chat(
        chats, params, use_tqdm=False
    )
    return [output.outputs[0] for output in outputs]


def completion_of(llm: LLM, prompt: list[int], **params: Any) -> Any:
    return generate(llm, [prompt], DiffusionParams(**params))[0].outputs[0]


def tokens_of(llm: LLM, prompt: list[int], **params: Any) -> list[int]:
    return responses(llm, [prompt], DiffusionParams(**params))[0]


def assert_nothing_left(llm: LLM) -> None:
    """No request, page or canvas outlives its request."""
    scheduler, runner = scheduler_of(llm), runner_of(llm)
    # Tells the runner of requests that finished last.
    llm.llm_engine.engine_core.engine_core.step()
    assert not scheduler.states
    assert not scheduler.running
    assert not scheduler.waiting
    assert scheduler.pages.num_reserved == 0
    assert scheduler.pages.num_allocated == 0
    assert not runner.canvases
    assert runner.last_layout is None
