"""The runner: one engine at a time answers requests, and the cost of the answers is measured.

``dllm eval`` scores the answers, ``dllm tune`` searches with them, and ``dllm bench`` looks at the cost alone.
"""

import gc
import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from tqdm import tqdm

from dllm_engine.text import one_line

if TYPE_CHECKING:
    from dllm_engine.llm import LLM
    from dllm_engine.params import DiffusionParams

T = TypeVar("T")
Request = tuple[list[int], "DiffusionParams"]
"""Prompt tokens and how to answer them."""
Answer = Callable[["LLM", Sequence[Request]], list[str]]
"""Answers requests, in their order."""
LoadEngine = Callable[[dict[str, Any]], "LLM"]
"""Starts an engine with arguments of ``LLM``."""
Tell = Callable[[float], object]
"""Takes the share of the work that is done."""
BAR = "{percentage:3.0f}% |{bar:20}| {desc} [{elapsed}<{remaining}]"
MIB = 1 << 20
NUM_WARMUP = 4
"""Requests that an engine answers before it is measured."""


@dataclass
class Cost:
    """Cost of responses: sums over requests, then peaks of memory."""

    requests: int = 0
    tokens: int = 0
    """Before the first end token of each response; never the prompt's."""
    seconds: float = 0.0
    """Until all requests were answered."""
    first_block_seconds: float = 0.0
    """From handing a request in to its first finished block."""
    latency_seconds: float = 0.0
    """From handing a request in to its end."""
    tokens_unmasked: int = 0
    """To the end of each last block."""
    forward_passes: int = 0
    """Passes that requests share count for each."""
    tokens_computed: int = 0
    """Rows fed to the model."""
    weight_bytes: int = 0
    """Weights of the model, and of a guide; 0 if the engine runs in other processes, where memory is not measured."""
    page_bytes: int = 0
    """Pages held by requests at once. The pool they come from has whatever size it was given."""
    working_bytes: int = 0
    """Beyond the memory held before the requests came."""

    def add(self, other: "Cost") -> None:
        """Count another measurement in."""
        for name, value in vars(other).items():
            own = getattr(self, name)
            setattr(self, name, max(own, value) if name.endswith("_bytes") else own + value)

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0

    @property
    def figures(self) -> dict[str, float | None]:
        """Means per request and peaks in MiB; None if unknown."""
        asked, is_measured = self.requests, self.weight_bytes > 0
        memory = self.weight_bytes + self.page_bytes + self.working_bytes
        return {
            "passes_per_answer": self.forward_passes / asked if asked else None,
            "tokens_per_pass": self.tokens_unmasked / self.forward_passes if asked else None,
            "rows_per_token": self.tokens_computed / self.tokens_unmasked if asked else None,
            "tokens_per_second": self.tokens_per_second if asked else None,
            "first_block_seconds": self.first_block_seconds / asked if asked else None,
            "latency_seconds": self.latency_seconds / asked if asked else None,
            "memory_mib": memory / MIB if is_measured else None,
            "pages_mib": self.page_bytes / MIB if is_measured else None,
        }


@dataclass
class Answers:
    """Responses so far, and what they cost."""

    texts: dict[str, str] = field(default_factory=dict)
    """By the number of the request; JSON has no other keys."""
    cost: Cost = field(default_factory=Cost)


class Runner:
    """Answers requests on one engine at a time: a device holds no more. ``load`` starts an engine."""

    def __init__(self, load: LoadEngine) -> None:
        self._load = load
        self._llm: LLM | None = None
        self._arguments: dict[str, Any] | None = None
        self._refusal: ValueError | None = None
        self._is_warm = False

    def start(self, arguments: dict[str, Any]) -> "LLM":
        """The engine with these arguments of ``LLM``; another one is stopped first. One that did not start is not tried
        again."""
        if self._arguments != arguments:
            self.stop()
            self._arguments, self._refusal, self._is_warm = arguments, None, False
            try:
                self._llm = self._load(arguments)
            except ValueError as error:
                self._refusal = error
        if self._llm is None:
            raise self._refusal or ValueError("the engine has been stopped")
        return self._llm

    def stop(self) -> None:
        """End the running engine, if there is one."""
        if self._llm is not None:
            stop_engine(self._llm)
        self._llm = self._arguments = None
        gc.collect()

    def run(
        self,
        arguments: dict[str, Any],
        ask: Callable[["LLM", Answer], T],
        answers: Answers,
        at_once: int | None = None,
        tell: Tell = lambda share: None,
    ) -> T:
        """Call ``ask`` with an engine and a function that answers requests, and return its result.

        Args:
            arguments: of ``LLM``.
            answers: filled as requests are answered. Requests that have a response there are not asked again.
            at_once: requests in the engine; by default its ``max_num_seqs``.
            tell: called with the share of the requests that each response is.

        Raises:
            RuntimeError: the engine failed; it is stopped, as it may be in any state.
        """
        numbers = itertools.count()

        def answer(llm: "LLM", requests: Sequence[Request]) -> list[str]:
            numbered = {str(next(numbers)): request for request in requests}
            asked = [number for number in numbered if number not in answers.texts]
            missing = [numbered[number] for number in asked]
            if missing and not self._is_warm:
                self._warm_up(llm, missing[:NUM_WARMUP])
            llm.reset_prefix_cache()  # each run does the same work, whatever ran before
            for index, output, cost in answered(llm, missing, at_once):
                answers.texts[asked[index]] = output.text
                answers.cost.add(cost)
                tell(1 / len(asked))
            return [answers.texts[number] for number in numbered]

        try:
            return ask(self.start(arguments), answer)
        except RuntimeError:
            self.stop()
            raise

    def _warm_up(self, llm: "LLM", requests: Sequence[Request]) -> None:
        if is_in_process(llm) and (pages := runner_of(llm).pages) is not None:
            pages.memory.zero_()  # taken when first written to, it would count as that of the requests measured
        for _ in answered(llm, requests):
            pass
        self._is_warm = True

    def each(
        self, rows: Mapping[str, dict[str, Any]], measure: Callable[[str, Tell], object], errors: dict[str, str]
    ) -> None:
        """Call ``measure`` with the key of each row and a function that is told of its progress. ``errors`` gets the
        reasons why rows could not be measured.

        An engine starts once: rows that share its arguments, the values of ``rows``, follow each other.
        """
        engines = list(rows.values())
        try:
            with tqdm(total=len(rows), bar_format=BAR, leave=False) as bar:
                for number, key in enumerate(sorted(rows, key=lambda key: engines.index(rows[key])), start=1):
                    bar.set_description_str(key)
                    try:
                        measure(key, bar.update)
                    except (ValueError, RuntimeError) as error:
                        # A method and a rule may exclude each other, or memory may not suffice; the others go on.
                        errors[key] = one_line(error)
                    bar.update(number - bar.n)
        finally:
            self.stop()


def answered(llm: "LLM", requests: Sequence[Request], at_once: int | None = None) -> Iterator[tuple[int, Any, Cost]]:
    """Keep ``at_once`` requests in the engine, by default ``max_num_seqs``, until all are answered.

    Yields the index of each request as it is answered, its ``CompletionOutput``, and the cost since the one before. The
    clock stands still meanwhile.

    Raises:
        ValueError: the engine ended a request.
    """
    from vllm.sampling_params import RequestOutputKind

    from dllm_engine.evaluation.hardware import MemoryMeter
    from dllm_engine.scheduler.options.resolve import end_token_ids

    engine, config = llm.llm_engine, llm.model_config.hf_config
    at_once = at_once or engine.vllm_config.scheduler_config.max_num_seqs
    starts: list[float] = []
    first_blocks: dict[int, float] = {}
    clock, counted, num_answered = 0.0, 0.0, 0
    meter = MemoryMeter(runner_of(llm), scheduler_of(llm).pages) if is_in_process(llm) else None
    try:
        while num_answered < len(requests):
            begin = time.perf_counter()
            while len(starts) < min(len(requests), num_answered + at_once):
                prompt, params = requests[len(starts)]
                params = params.clone()
                params.output_kind = RequestOutputKind.CUMULATIVE  # an output per block
                engine.add_request(str(len(starts)), {"prompt_token_ids": prompt}, params)
                starts.append(clock)
            outputs = engine.step()
            clock += time.perf_counter() - begin
            if meter is not None:
                meter.look()
            for output in outputs:
                index, completion = int(output.request_id), output.outputs[0]
                first_blocks.setdefault(index, clock)
                if not output.finished:
                    continue
                figures, tokens = completion.diffusion, completion.token_ids
                if figures.error:
                    raise ValueError(f"the engine ended a request: {figures.error}")
                num_answered += 1
                ends = end_token_ids(requests[index][1], config)
                cost = Cost(
                    requests=1,
                    tokens=next((i for i, token in enumerate(tokens) if token in ends), len(tokens)),
                    seconds=clock - counted,
                    first_block_seconds=first_blocks[index] - starts[index],
                    latency_seconds=clock - starts[index],
                    tokens_unmasked=figures.tokens_unmasked,
                    forward_passes=figures.forward_passes,
                    tokens_computed=figures.tokens_computed,
                    **({} if meter is None else meter.read()),
                )
                counted = clock
                yield index, completion, cost
    finally:
        if num_answered < len(starts):
            engine.abort_request([str(index) for index in range(len(starts))])  # it goes on with other requests


def is_in_process(llm: "LLM") -> bool:
    """True if an engine and its only worker run in this process, and so can be looked into."""
    core = getattr(llm.llm_engine.engine_core, "engine_core", None)
    return core is not None and hasattr(core.model_executor, "driver_worker")


def runner_of(llm: "LLM") -> Any:
    """The ``DiffusionModelRunner`` of an engine in this process, on a single device."""
    return llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner


def scheduler_of(llm: "LLM") -> Any:
    """The ``DiffusionScheduler`` of an engine in this process."""
    return llm.llm_engine.engine_core.engine_core.scheduler


def stop_engine(llm: "LLM") -> None:
    """End an engine; one that ends takes vLLM's process groups along."""
    llm.llm_engine.engine_core.shutdown()
