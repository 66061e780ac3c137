"""Runs of requests on an engine, with measured costs."""

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

if TYPE_CHECKING:
    from dllm_engine.llm import LLM
    from dllm_engine.model_executor.model_runner import DiffusionModelRunner
    from dllm_engine.params import DiffusionParams
    from dllm_engine.scheduler.diffusion_scheduler import DiffusionScheduler

Request = tuple[list[int], "DiffusionParams"]
"""Prompt tokens and decoding parameters."""
MIB = 1 << 20
NUM_WARMUP = 4
"""Requests that are answered before a run is measured."""


_PEAKS = ("page_bytes", "memory_bytes")
"""Fields of ``Cost`` that add up to their maximum. Others add up to their sum."""


def _ratio(amount: float | None, number: float) -> float | None:
    return amount / number if number and amount is not None else None


@dataclass
class Cost:
    """Cost of responses: sums over requests, and peaks of memory."""

    requests: int = 0
    tokens: int = 0
    """Number of response tokens before the first end token."""
    seconds: float = 0.0
    """Time until all requests were answered."""
    first_block_seconds: float = 0.0
    """Time from adding a request to its first finished block."""
    latency_seconds: float = 0.0
    """Time from adding a request to its end."""
    tokens_unmasked: int = 0
    """Number of tokens unmasked up to the end of the last block."""
    forward_passes: int = 0
    """Forward passes. A pass that several requests share counts for each."""
    tokens_computed: int = 0
    """Rows fed to the model."""
    page_bytes: int | None = None
    """Bytes of pages that requests held at once; None if the engine runs in other
    processes.
    """
    memory_bytes: int | None = None
    """Bytes of GPU memory, without pages that no request held; None on a CPU, and if
    the engine runs in other processes.
    """

    def add(self, other: "Cost") -> None:
        """Add another measurement."""
        for name, value in vars(other).items():
            known = [own for own in (getattr(self, name), value) if own is not None]
            setattr(
                self, name, max(known, default=None) if name in _PEAKS else sum(known)
            )

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0

    @property
    def figures(self) -> dict[str, float | None]:
        """Means per request, and peaks in MiB; None if unknown."""
        num_requests = self.requests
        return {
            "passes_per_answer": _ratio(self.forward_passes, num_requests),
            "tokens_per_pass": _ratio(self.tokens_unmasked, self.forward_passes),
            "rows_per_token": _ratio(self.tokens_computed, self.tokens_unmasked),
            "tokens_per_second": self.tokens_per_second if num_requests else None,
            "first_block_seconds": _ratio(self.first_block_seconds, num_requests),
            "latency_seconds": _ratio(self.latency_seconds, num_requests),
            "memory_mib": _ratio(self.memory_bytes, MIB),
            "pages_mib": _ratio(self.page_bytes, MIB),
        }


class MeasuredEngine:
    """An engine that answers requests, and the cost of its answers so far."""

    def __init__(self, llm: "LLM", label: str = "") -> None:
        self.llm, self.cost, self._label = llm, Cost(), label

    def complete(
        self, requests: Sequence[Request], before: Sequence[Request] = ()
    ) -> tuple[list[Any], Cost]:
        """Complete requests like ``complete_requests``, after the requests ``before``,
        which do not count. The very first requests are answered once before, to warm
        up.
        """
        if not self.cost.requests:
            complete_requests(self.llm, requests[:NUM_WARMUP])
        # Forget prefixes, so that each run does the same work, whatever ran before.
        self.llm.reset_prefix_cache()
        complete_requests(self.llm, before)
        completions, cost = complete_requests(self.llm, requests, self._label)
        self.cost.add(cost)
        return completions, cost


def complete_requests(
    llm: "LLM", requests: Sequence[Request], label: str = ""
) -> tuple[list[Any], Cost]:
    """Complete requests; returns the completions in order, and their cost. Raises
    ``ValueError`` if the engine fails a request. At most ``max_num_seqs`` requests are
    in the engine at once.
    """
    from vllm.sampling_params import RequestOutputKind

    from dllm_engine.lengths.requests import with_lengths
    from dllm_engine.request_options.ends import end_token_ids

    engine, config = llm.llm_engine, llm.model_config.hf_config
    at_once = engine.vllm_config.scheduler_config.max_num_seqs
    starts: list[float] = []
    first_blocks: dict[int, float] = {}
    completions: dict[int, Any] = {}
    cost = Cost()
    memory = _PeakMemory(llm)
    bar = tqdm(total=len(requests), desc=label, leave=False, disable=not label)
    begin = time.perf_counter()
    prompts = [{"prompt_token_ids": prompt} for prompt, _ in requests]
    params_with_lengths = with_lengths(llm, prompts, [params for _, params in requests])
    try:
        while len(completions) < len(requests):
            while len(starts) < min(len(requests), len(completions) + at_once):
                params = params_with_lengths[len(starts)].clone()
                # One output per block.
                params.output_kind = RequestOutputKind.CUMULATIVE
                engine.add_request(str(len(starts)), prompts[len(starts)], params)
                starts.append(time.perf_counter())
            outputs = engine.step()
            now = time.perf_counter()
            memory.count_pages()
            for output in outputs:
                index = int(output.request_id)
                first_blocks.setdefault(index, now)
                if output.finished:
                    completions[index] = completion = output.outputs[0]
                    ends = end_token_ids(requests[index][1], config)
                    cost.add(_cost_of(completion, ends))
                    cost.seconds = now - begin
                    cost.first_block_seconds += first_blocks[index] - starts[index]
                    cost.latency_seconds += now - starts[index]
                    bar.update()
    finally:
        bar.close()
        if len(completions) < len(starts):
            # The engine goes on with other requests.
            engine.abort_request([str(index) for index in range(len(starts))])
    memory.add_to(cost)
    return [completions[index] for index in range(len(requests))], cost


def _cost_of(completion: Any, ends: Collection[int]) -> Cost:
    """Cost of a response, without times and memory. Raises ``ValueError`` if the
    request failed.
    """
    figures, tokens = completion.diffusion, completion.token_ids
    if figures.error:
        raise ValueError(f"the engine ended a request: {figures.error}")
    num_tokens = next((i for i, x in enumerate(tokens) if x in ends), len(tokens))
    return Cost(
        requests=1,
        tokens=num_tokens,
        tokens_unmasked=figures.tokens_unmasked,
        forward_passes=figures.forward_passes + figures.length_passes,
        tokens_computed=figures.tokens_computed + figures.length_rows,
    )


class _PeakMemory:
    """Peak of an engine's memory. It is known if the engine and its only worker run in
    this process.
    """

    def __init__(self, llm: "LLM") -> None:
        import torch

        core = getattr(llm.llm_engine.engine_core, "engine_core", None)
        is_here = core is not None and hasattr(core.model_executor, "driver_worker")
        self._llm = llm if is_here else None
        self._num_pages = 0
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()

    def count_pages(self) -> None:
        if self._llm is not None:
            num_pages = scheduler_of(self._llm).pages.num_allocated
            self._num_pages = max(self._num_pages, num_pages)

    def add_to(self, cost: Cost) -> None:
        import torch

        if self._llm is None:
            return
        cost.page_bytes = reserved = 0
        pages = runner_of(self._llm).rank.pages
        if pages is not None:  # not every cache method has pages
            cost.page_bytes = self._num_pages * pages.memory[0].nbytes
            reserved = pages.memory.nbytes
        if torch.cuda.is_available():
            peak = torch.cuda.max_memory_allocated()
            cost.memory_bytes = peak - reserved + cost.page_bytes


def runner_of(llm: "LLM") -> "DiffusionModelRunner":
    """Model runner of an engine in this process, on a single device."""
    return llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner


def scheduler_of(llm: "LLM") -> "DiffusionScheduler":
    """Scheduler of an engine in this process."""
    return llm.llm_engine.engine_core.engine_core.scheduler
