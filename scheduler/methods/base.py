"""What a cache method is to the scheduler: options, a plan for each step, and the pages that it holds."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from dllm_engine.families import ModelFamily
from dllm_engine.scheduler.page_layout import PageCounts, PoolGeometry
from dllm_engine.scheduler.request import CacheOptions, DecodingSpec, Guidance, Progress
from dllm_engine.scheduler.step_plan import RefreshState, Scope, StepPlan, step_plan

Plan = Callable[[DecodingSpec, Progress], StepPlan]
HeldPages = Callable[[DecodingSpec, int, PoolGeometry], PageCounts]
ScorerName = Literal["mask_voting", "mean_query", "snapkv", "random"]
"""Names in ``model_executor/retention/scorers.py``."""


def _odd(value: int) -> int:
    if value % 2 == 0:
        raise ValueError("must be odd, so that the window has a middle")
    return value


WindowWidth = Annotated[int, Field(ge=1), AfterValidator(_odd)]


def hold_nothing(spec: DecodingSpec, block: int, geometry: PoolGeometry) -> PageCounts:
    """No pages."""
    return {}


@dataclass(frozen=True)
class CacheMethod:
    """A cache method without its tensors, which are in the file of its name in ``model_executor/passes/``."""

    plan: Plan
    """The next step of a request."""
    pages: HeldPages = hold_nothing
    """Pages that a request holds once a step of the given block has written them. Known before anything runs, so that
    they can be reserved."""
    options: type[CacheOptions] = CacheOptions
    """What ``cache_options`` are validated with."""
    recordable: bool = False
    """Whether its REUSE steps do the same work on different numbers, so that ``cuda_graphs`` can record them."""
    launches: Mapping[RefreshState, int] | None = None
    """Kernels that a layer launches for the method beside its own parts and attention, by refresh state, in a batch of
    like requests. None: its layers choose rows by what they compute, and nobody has counted them."""
    uniform_sampler: Literal["never", "with_delay_eos", "always"] = "never"
    """When requests decode by ES-dLLM's sampler: equally many tokens per step in every model family, by the plain
    probability where a request is greedy."""
    paper_settings: Callable[[str, ModelFamily], dict[str, Any]] = lambda model, family: {}
    """Cache options that the paper has for a model, by its name and family, where one default does not serve all."""
    check: Callable[[Any, int, bool], None] = lambda options, num_layers, guided: None
    """Raise ``ValueError`` where the options do not suit a model of so many layers, or an engine with a guide."""
    largest: Callable[[Any], CacheOptions] = lambda options: options
    """The options under which a request whose prompt length is open holds the most pages."""

    @property
    def uses_pages(self) -> bool:
        return self.pages is not hold_nothing

    def held(self, spec: DecodingSpec, block: int, geometry: PoolGeometry) -> PageCounts:
        """Pages that a request holds in a block, with those of the guide."""
        return self.pages(spec, block, geometry) | guide_pages(spec, geometry)

    def page_demand(self, spec: DecodingSpec, geometry: PoolGeometry) -> int:
        """The most pages a request holds at any time of its life."""
        return max(_total(self.held(spec, block, geometry)) for block in range(spec.num_blocks))

    def longest_demand(self, options: CacheOptions, geometry: PoolGeometry, max_model_len: int) -> int:
        """The most pages that a request of ``max_model_len`` can need, whatever its prompt, response and block length.

        Demand grows with the canvas, and evenly from prompt to response and with the block, so the extremes bound it.
        Raises ``ValueError`` where the pool's pages do not suit the method.
        """

        def demand(gen_length: int, block_length: int) -> int:
            spec = DecodingSpec(
                prompt_length=max_model_len - gen_length,
                gen_length=gen_length,
                block_length=block_length,
                steps=gen_length,
                schedule="uniform",
                unmasking="low_confidence",
                temperature=0.0,
                top_p=1.0,
                top_k=0,
                shifts_logits=True,
                guidance=Guidance() if geometry.guide is not None else None,
                cache=self.largest(options),
            )
            return max(_total(self.held(spec, block, geometry)) for block in {0, spec.num_blocks - 1})

        longest = max(max_model_len - 1, 1)
        return max(demand(1, 1), demand(longest, 1), demand(longest, longest))


def guide_pages(spec: DecodingSpec, geometry: PoolGeometry) -> PageCounts:
    """Pages that the guide takes for a request, all its life. It is never asked what follows the last token."""
    return geometry.guide_pages(spec.canvas_length - 1) if spec.guidance is not None else {}


def _total(counts: PageCounts) -> int:
    return sum(map(sum, counts.values()))


# What several methods plan and hold

LAUNCHES_TO_RETAIN = {RefreshState.UPDATE: 6}
"""Gather keys and values, compute slots from places (2), and write both: ``RetentionPass.attend``."""


def evict_then_reuse(spec: DecodingSpec, progress: Progress, update_step: int, retained: int) -> StepPlan:
    """FULL steps before ``update_step`` of the block, one UPDATE that retains ``retained`` tokens, then the block
    alone."""
    if progress.step < update_step:
        return step_plan(spec, progress, RefreshState.FULL, Scope.ALL, spec.canvas_span)
    if progress.step == update_step:
        return step_plan(spec, progress, RefreshState.UPDATE, Scope.ALL, spec.canvas_span, retained=retained)
    span = spec.block_span(progress.block)
    return step_plan(spec, progress, RefreshState.REUSE, Scope.ACTIVE, span, read=retained, retained=retained)


def tokens_before(spec: DecodingSpec, block: int) -> int:
    """Tokens before the block."""
    return spec.block_span(block).start


def tokens_outside(spec: DecodingSpec, block: int) -> int:
    """Tokens outside the block."""
    return spec.canvas_length - spec.block_span(block).size


def hold_tokens(retained: Callable[[DecodingSpec, int], int]) -> HeldPages:
    """Keys and values of ``retained(spec, block)`` tokens in every layer."""
    return lambda spec, block, geometry: geometry.uniform(retained(spec, block))


def hold_canvas(spec: DecodingSpec, block: int, geometry: PoolGeometry) -> PageCounts:
    """Keys and values of the whole canvas in every layer."""
    return geometry.uniform(spec.canvas_length)
