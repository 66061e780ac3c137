"""What settings are compared on: questions, and how right their answers are."""

import hashlib
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from dllm_engine.evaluation.own_tasks import MATCHES, OwnTask
from dllm_engine.tuning.trials import Timing

if TYPE_CHECKING:
    from dllm_engine.llm import LLM
    from dllm_engine.params import DiffusionParams

Request = tuple[list[int], "DiffusionParams"]
"""Prompt tokens and how to answer them."""
ORDER_SEED = 0
"""Questions are asked in a random order, the same in every run, so that the first ones are like all."""


@dataclass
class Answers:
    """The answers to some questions."""

    scores: list[float]
    """Between 0 and 1, in the order of the questions."""
    timing: Timing = field(default_factory=Timing)
    forward_passes: int = 0
    tokens_unmasked: int = 0

    def count(self, outputs: Sequence[Any]) -> None:
        """Add what vLLM's outputs cost."""
        figures = [output.outputs[0].diffusion for output in outputs]
        self.forward_passes += sum(figure.forward_passes for figure in figures)
        self.tokens_unmasked += sum(figure.tokens_unmasked for figure in figures)


class Questions(Protocol):
    """Questions in a fixed order. ``decoding`` holds arguments of ``DiffusionParams``."""

    size: int
    default_decoding: dict[str, Any]
    """What questions bring with them, where a setting leaves it open."""

    def answer(self, llm: "LLM", decoding: dict[str, Any], indices: range, at_once: int) -> Answers:
        """Ask these questions, ``at_once`` at a time; raises ``ValueError`` for what cannot be asked."""

    def requests(self, llm: "LLM", decoding: dict[str, Any], indices: range) -> list[Request]:
        """The same questions unasked."""

    def subject(self) -> dict[str, Any]:
        """What identifies them, in the result file."""


class OwnQuestions:
    """A file of prompts and answers, or the demo model's examples."""

    def __init__(self, name: str, tasks: Sequence[OwnTask], match: str) -> None:
        """``match`` is a key of ``MATCHES``. A task that is there twice is asked once."""
        unique = {task.request.model_dump_json() + task.answer: task for task in tasks}
        self.name, self.match = name, match
        self.tasks = list(unique.values())
        random.Random(ORDER_SEED).shuffle(self.tasks)
        self.size = len(self.tasks)
        self.default_decoding: dict[str, Any] = {}

    def answer(self, llm: "LLM", decoding: dict[str, Any], indices: range, at_once: int) -> Answers:
        outputs, timing = run_requests(llm, self.requests(llm, decoding, indices), at_once)
        is_right, asked = MATCHES[self.match], self.tasks[indices.start : indices.stop]
        texts = [output.outputs[0].text for output in outputs]
        answers = Answers([float(is_right(text, task.answer)) for text, task in zip(texts, asked, strict=True)], timing)
        answers.count(outputs)
        return answers

    def requests(self, llm: "LLM", decoding: dict[str, Any], indices: range) -> list[Request]:
        from dllm_engine.params import DiffusionParams

        params, tokenizer = DiffusionParams(**decoding), llm.get_tokenizer()
        asked = self.tasks[indices.start : indices.stop]
        if not llm.has_chat_template and any(task.request.messages for task in asked):
            raise ValueError(f"{self.name} has messages as prompts, but the model has no chat template; give text")
        return [(task.request.prompt_tokens(tokenizer), params) for task in asked]

    def subject(self) -> dict[str, Any]:
        text = "\n".join(task.request.model_dump_json() + task.answer for task in self.tasks)
        digest = hashlib.sha256(text.encode()).hexdigest()[:16]
        return {"tasks": self.name, "tasks_digest": digest, "match": self.match}


def run_requests(llm: "LLM", requests: Sequence[Request], at_once: int) -> tuple[list[Any], Timing]:
    """Keep ``at_once`` requests in the engine until all are answered; returns vLLM's outputs in order."""
    from vllm.sampling_params import RequestOutputKind

    from dllm_engine.bench.cells import visible_tokens
    from dllm_engine.bench.machine import now
    from dllm_engine.scheduler.resolve import end_token_ids

    engine, config = llm.llm_engine, llm.model_config.hf_config
    outputs: dict[str, Any] = {}
    asked = 0
    start = now()
    try:
        while len(outputs) < len(requests):
            while asked < len(requests) and asked - len(outputs) < at_once:
                prompt, params = requests[asked]
                params = params.clone()
                params.output_kind = RequestOutputKind.FINAL_ONLY
                engine.add_request(str(asked), {"prompt_token_ids": prompt}, params)
                asked += 1
            outputs |= {output.request_id: output for output in engine.step() if output.finished}
    except BaseException:
        engine.abort_request([str(index) for index in range(asked)])  # the engine goes on with another setting
        raise
    seconds = now() - start
    ordered = [outputs[str(index)] for index in range(len(requests))]
    tokens = 0
    for output, (_, params) in zip(ordered, requests, strict=True):
        if error := output.outputs[0].diffusion.error:
            raise ValueError(f"the engine ended a request: {error}")
        tokens += len(visible_tokens(output.outputs[0].token_ids, end_token_ids(params, config)))
    return ordered, Timing(len(requests), tokens, seconds)
