"""Engines driven a step at a time: requests that join later, and memory that is
poisoned.
"""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind

from dllm_engine import LLM
from dllm_engine.decoding.step_plan import StepPlan
from tests.support.engines import assert_nothing_left, runner_of, scheduler_of


@dataclass
class Run:
    outputs: list[RequestOutput] = field(default_factory=list)
    plans: list[list[StepPlan]] = field(default_factory=list)
    """Of each step, the plans of all requests in it."""

    @property
    def tokens(self) -> list[list[int]]:
        return [list(output.outputs[0].token_ids) for output in self.outputs]

    @property
    def figures(self) -> list[Any]:
        return [output.outputs[0].diffusion for output in self.outputs]


def run_in_steps(
    llm: LLM,
    prompts: Sequence[list[int]],
    params: Sequence[Any],
    *,
    joins: Sequence[int] | None = None,
    after_step: Callable[[], None] = lambda: None,
) -> Run:
    """Answer all requests; request i is added before step ``joins[i]`` (all before the
    first). No step feeds more rows than its plan has."""
    runner, run = runner_of(llm), Run()
    forward = runner.denoiser.forward

    def recording(batch, layer_pass):
        run.plans.append(list(batch.plans))
        assert all(
            batch.sizes[i] <= plan.max_rows for i, plan in enumerate(batch.plans)
        )
        return forward(batch, layer_pass)

    runner.denoiser.forward = recording
    outputs: dict[int, Any] = {}
    try:
        step = 0
        while len(outputs) < len(prompts):
            for i, join in enumerate(joins or [0] * len(prompts)):
                if join == step:
                    llm.llm_engine.add_request(
                        str(i), {"prompt_token_ids": prompts[i]}, params[i]
                    )
            for output in llm.llm_engine.step():
                if output.finished:
                    outputs[int(output.request_id)] = output
            after_step()
            step += 1
    finally:
        runner.denoiser.forward = forward
    run.outputs = [outputs[i] for i in range(len(prompts))]
    assert_nothing_left(llm)
    return run


def streamed(
    llm: LLM, prompts: Sequence[list[int]], params: Sequence[Any]
) -> list[RequestOutput]:
    """The outputs that a streaming caller of ``LLMEngine`` gets; the requests are
    called 0, 1 and so on.
    """
    for i, (prompt, asked) in enumerate(zip(prompts, params, strict=True)):
        asked = asked.clone()
        asked.output_kind = RequestOutputKind.DELTA
        llm.llm_engine.add_request(str(i), {"prompt_token_ids": list(prompt)}, asked)
    outputs = []
    while llm.llm_engine.has_unfinished_requests():
        outputs += copy.deepcopy(
            llm.llm_engine.step()
        )  # vLLM goes on to append to lists that it has handed out
    assert_nothing_left(llm)
    return outputs


def held_pages(llm: LLM) -> set[int]:
    """Ids of the pages that requests hold now."""
    tables = scheduler_of(llm).pages._tables.values()
    return {
        page.block_id for of_request in tables for table in of_request for page in table
    }


def copied_pages(llm: LLM) -> set[int]:
    """Ids of the pages that requests may begin with copies of, also if they were given
    to others in this step.
    """
    following = scheduler_of(llm).pages._next_pages.values()
    return {page.block_id for each in following for page in each.pages}


class Poison:
    """Fills page memory with NaN, all at first and then, after each step, what has been
    given back and no request can find or copy.
    """

    def __init__(self, llm: LLM) -> None:
        self.llm, self.held = llm, held_pages(llm)
        runner_of(llm).rank.pages.memory.fill_(torch.nan)

    def __call__(self) -> None:
        held = held_pages(self.llm)
        blocks = scheduler_of(self.llm).pages._blocks.blocks
        given_back = self.held - held - copied_pages(self.llm)
        lost = sorted(i for i in given_back if blocks[i].block_hash is None)
        runner_of(self.llm).rank.pages.memory[lost] = torch.nan
        self.held = held
