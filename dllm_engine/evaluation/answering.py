"""Requests answered, and what that costs."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dllm_engine.bench.memory import MemoryMeter
    from dllm_engine.llm import LLM
    from dllm_engine.params import DiffusionParams

Request = tuple[list[int], "DiffusionParams"]
"""Prompt tokens and how to answer them."""
Answer = Callable[["LLM", Sequence[Request]], list[str]]
"""Answers requests, in their order."""


MIB = 1 << 20


@dataclass
class Cost:
    """What answers cost."""

    requests: int = 0
    tokens: int = 0
    """Before the first end token of each response; never the prompt's."""
    seconds: float = 0.0
    """Until all requests were answered."""
    tokens_unmasked: int = 0
    """To the end of each last block."""
    forward_passes: int = 0
    """Summed over the requests, whether or not they shared them."""
    tokens_computed: int = 0
    """Rows fed to the model."""

    def add(self, other: "Cost") -> None:
        """Count another measurement in."""
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0


@dataclass(frozen=True)
class Memory:
    """The most memory held while requests ran, in bytes."""

    weight_bytes: int
    """Of the model, and of a guide."""
    page_bytes: int
    """Pages held by requests at once. The pool they come from has whatever size it was given."""
    working_bytes: int
    """Beyond what was held before the requests came."""
    process_bytes: int
    """Of the whole process (on a GPU: of PyTorch's allocations), with everything else in it."""

    @property
    def peak_bytes(self) -> int:
        """What the engine needs: weights, pages and what a step works with."""
        return self.weight_bytes + self.page_bytes + self.working_bytes

    def max(self, other: "Memory") -> "Memory":
        """The peaks of both."""
        return Memory(*(max(pair) for pair in zip(vars(self).values(), vars(other).values(), strict=True)))


def visible_tokens(token_ids: Sequence[int], end_tokens: frozenset[int]) -> tuple[int, ...]:
    """What a reader sees of a response: what comes before its first end token."""
    return tuple(itertools.takewhile(lambda token: token not in end_tokens, token_ids))


def answers(
    llm: "LLM", requests: Sequence[Request], at_once: int, meter: "MemoryMeter | None" = None
) -> Iterator[tuple[int, Any, Cost]]:
    """Keep ``at_once`` requests in the engine until all are answered.

    Yields the index of each request as it is answered, vLLM's output, and the cost since the one before. The clock
    stands still meanwhile.

    Raises:
        ValueError: the engine ended a request.
    """
    from vllm.sampling_params import RequestOutputKind

    from dllm_engine.bench.machine import now
    from dllm_engine.scheduler.options.resolve import end_token_ids

    engine, config = llm.llm_engine, llm.model_config.hf_config
    asked = answered = 0
    cost = Cost()
    try:
        while answered < len(requests):
            start = now()
            while asked < len(requests) and asked - answered < at_once:
                prompt, params = requests[asked]
                params = params.clone()
                params.output_kind = RequestOutputKind.FINAL_ONLY
                engine.add_request(str(asked), {"prompt_token_ids": prompt}, params)
                asked += 1
            outputs = engine.step()
            cost.seconds += now() - start
            if meter is not None:
                meter.look()
            for output in outputs:
                if not output.finished:
                    continue
                index, completion = int(output.request_id), output.outputs[0]
                figures = completion.diffusion
                if figures.error:
                    raise ValueError(f"the engine ended a request: {figures.error}")
                answered += 1
                visible = visible_tokens(completion.token_ids, end_token_ids(requests[index][1], config))
                cost.add(
                    Cost(1, len(visible), 0.0, figures.tokens_unmasked, figures.forward_passes, figures.tokens_computed)
                )
                yield index, output, cost
                cost = Cost()
    finally:
        if answered < asked:
            engine.abort_request([str(index) for index in range(asked)])  # the engine goes on with other requests


def answer_all(llm: "LLM", requests: Sequence[Request], at_once: int) -> tuple[list[str], Cost]:
    """The responses in order, and what they cost together."""
    texts, total = [""] * len(requests), Cost()
    for index, output, cost in answers(llm, requests, at_once):
        texts[index] = output.outputs[0].text
        total.add(cost)
    return texts, total
