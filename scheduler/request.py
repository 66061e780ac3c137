"""A request as every plan sees it: its settings, and how far it has come."""

from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, NamedTuple

from pydantic import BaseModel, ConfigDict

from dllm_engine.families import ScheduleKind
from dllm_engine.scheduler.unmasking import split_steps


class Span(NamedTuple):
    """Canvas positions ``start`` … ``stop - 1``."""

    start: int
    stop: int

    @property
    def size(self) -> int:
        return self.stop - self.start


class ParallelRule(NamedTuple):
    """How many positions a step unmasks, read off the model's confidences."""

    kind: str
    """A name in ``PARALLEL_RULES``."""
    value: float


class CacheOptions(BaseModel):
    """Options of a cache method; the methods without any use this class itself."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


@dataclass(frozen=True)
class Guidance:
    """How a guide model decides what a step unmasks (Guided Diffusion, arXiv 2505.21467)."""

    speculation_length: int = 32
    """Masked positions, from the leftmost on, that are drafted and checked in a step."""
    top_k: int = 1
    """A draft passes if it is among this many of the guide's best tokens."""
    threshold: float | None = None
    """Drafts of a probability above this pass as well."""
    fallback: Literal["guide", "draft"] = "guide"
    """Whose token fills the first position where nothing passes."""
    correction: bool = False
    """Whether the guide's tokens replace the drafts that pass."""


@dataclass(frozen=True)
class DecodingSpec:
    """A request's settings with every default filled in; lengths in tokens."""

    prompt_length: int
    gen_length: int
    block_length: int
    steps: int
    """Denoising steps over the whole response, at least one per block and at most one per token."""
    schedule: ScheduleKind
    unmasking: str
    temperature: float
    top_p: float
    top_k: int
    """0: all tokens."""
    shifts_logits: bool = False
    """Whether position ``p`` is predicted by row ``p - 1`` (Dream) rather than by its own."""
    parallel: ParallelRule | None = None
    """Rule of parallel unmasking, which the request's policy suits; None: a fixed count per step."""
    guidance: Guidance | None = None
    """None: the diffusion model decides alone, by ``unmasking``."""
    delay_eos: bool = False
    """Hold back an end token while the position before it is masked and the response has none."""
    cache: CacheOptions = field(default_factory=CacheOptions)
    """Options of the engine's cache method, as this request uses them."""
    num_logprobs: int | None = None
    """Report log-probabilities of the committed token and of so many of the likeliest; None: report none."""
    streams_steps: bool = False
    """Whether every step reports the running block."""

    @property
    def needs_per_step_output(self) -> bool:
        """Whether more is wanted of the predictions of a step than to unmask the best of them."""
        return self.streams_steps or self.num_logprobs is not None or self.guidance is not None

    @property
    def canvas_length(self) -> int:
        return self.prompt_length + self.gen_length

    @property
    def canvas_span(self) -> Span:
        return Span(0, self.canvas_length)

    @property
    def num_blocks(self) -> int:
        return -(-self.gen_length // self.block_length)

    def block_span(self, block: int) -> Span:
        """Canvas positions of a block; the last one may be shorter."""
        start = self.prompt_length + block * self.block_length
        return Span(start, min(start + self.block_length, self.canvas_length))

    def predicting_span(self, block: int) -> Span:
        """The rows that predict a block: its own, or with shifted logits those one before."""
        start, stop = self.block_span(block)
        return Span(max(start - self.shifts_logits, 0), stop - self.shifts_logits)

    @cached_property
    def steps_per_block(self) -> tuple[int, ...]:
        return split_steps(self.steps, [self.block_span(block).size for block in range(self.num_blocks)])

    def most_steps_in_block(self, block: int) -> int:
        """Forward passes within which a block is finished whatever the model predicts.

        Before the schedule's last step a pass may fill no position: a time grid asks for none, chance gives none. From
        there on every second pass fills one at least. ES-dLLM may drop the row of the only candidate in one pass, not
        in two.
        """
        return self.steps_per_block[block] + 2 * self.block_span(block).size


@dataclass
class Progress:
    """How far a request has come. Owned by the scheduler, advanced by what the runner reports; the runner gets a copy
    where it goes on by itself."""

    block: int = 0
    step: int = 0
    """Denoising step within the block."""
    num_masked: int = 0
    """Masked tokens left in the block."""
    num_forwards: int = 0
    """Forward passes so far, over the whole response."""
    num_unmasked: int = 0
    """Response tokens unmasked so far."""
    last_unmasked: int = 0
    """How many of them the last forward pass unmasked."""
    num_rows_computed: int = 0
    """Rows fed to the model so far, summed over forward passes."""
    pages_held: int = 0
    """The most pages held so far."""
    tokens_retained: int = 0
    """The most tokens per layer that pages held so far."""
    trace: dict[str, list] = field(default_factory=dict)
    """Per-forward records, kept only when the engine traces."""

    def advance(self, spec: DecodingSpec, num_unmasked: int, block_done: bool) -> None:
        """On to the next step, after one that unmasked so many tokens. All that plans read is up to date then."""
        self.num_forwards += 1
        self.num_unmasked += num_unmasked
        self.last_unmasked = num_unmasked
        if not block_done:
            self.step += 1
            self.num_masked -= num_unmasked
        elif self.block + 1 < spec.num_blocks:
            self.block += 1
            self.step = 0
            self.num_masked = spec.block_span(self.block).size
