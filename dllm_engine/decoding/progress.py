"""Progress of a request through its response."""

from dataclasses import dataclass, field

from dllm_engine.decoding.canvas_layout import FIRST_BLOCK, Blocks, Span
from dllm_engine.decoding.spec import DecodingSpec
from dllm_engine.decoding.unmasking_policies import SlowFastState


@dataclass
class Progress:
    """Progress of a request: its running blocks, its steps, and counts for its figures.
    The scheduler owns it and advances it with the runner's reports. A runner that runs
    ahead works on a copy.

    The *running* blocks are the blocks that a step may fill; their canvas positions are
    the *window*. The next block joins once enough of the last one is decided; complete
    blocks leave at that moment. With one block at a time, the next block replaces the
    one before. With self-speculation, the blocks of the next round replace all blocks.
    """

    running: Blocks = FIRST_BLOCK
    step: int = 0
    """Denoising steps since the last block joined."""
    masked: list[int] = field(default_factory=list)
    """Masked tokens left in each running block."""
    post_steps: int = 0
    """Denoising steps of the running block that began without a mask (token editing).
    """
    revises: bool = False
    """True if decided tokens of the running block may still change: token editing, and
    drafts that are not verified.
    """
    before: Blocks = FIRST_BLOCK
    """Running blocks before the last one joined, if one has joined."""
    steps_before: int = 0
    """Denoising steps of ``before``."""
    completed_at: list[int] = field(default_factory=list)
    """Per complete block at the beginning of the response: forward passes until no mask
    was left in it or before it.
    """
    slow_fast: SlowFastState | None = None
    """State of SlowFast sampling in the running block; None: another rule."""
    ended: bool = False
    """True if the response ends with the running blocks, so that no other block joins.
    """
    num_forwards: int = 0
    num_denoised: int = 0
    """Denoising steps so far: forward passes without those that only fed a part of a
    long prompt.
    """
    num_unmasked: int = 0
    num_edited: int = 0
    """Number of replacements of decided tokens so far."""
    last_unmasked: int = 0
    """Response tokens that the last denoising step unmasked."""
    num_rows_computed: int = 0
    pages_held: int = 0
    """The most pages held so far."""
    retained: int = 0
    """Tokens per layer that pages hold."""
    tokens_retained: int = 0
    """The largest ``retained`` so far."""
    num_shared: int = 0
    """Tokens at the beginning of the prompt that steps read from pages and do not
    compute (``share_prompts``).
    """
    num_anchored: int = 0
    """The first of these tokens, which the first step computes nevertheless
    (``anchor_tokens``).
    """
    trace: dict[str, list] = field(default_factory=dict)
    """Per-forward records, kept only when the engine traces."""

    @classmethod
    def begin(cls, spec: DecodingSpec) -> "Progress":
        running = (
            FIRST_BLOCK if spec.decision is None else Blocks(0, spec.layout.num_blocks)
        )
        progress = cls(
            running,
            masked=list(spec.layout.masks_per_block[slice(*running)]),
            slow_fast=spec.first_slow_fast(0),
        )
        progress._let_blocks_join(spec)
        return progress

    @property
    def num_read(self) -> int:
        """Number of prompt tokens that a request reads from pages and never computes."""
        return self.num_shared - self.num_anchored

    @property
    def num_masked(self) -> int:
        return sum(self.masked)

    def window(self, spec: DecodingSpec) -> Span:
        """Canvas positions of the running blocks."""
        return spec.layout.span_of(self.running)

    def passed_multiple_of(self, interval: int) -> bool:
        """Return True if the last step brought ``num_unmasked`` to a multiple of
        ``interval``, or past one.
        """
        return (
            self.num_unmasked // interval
            > (self.num_unmasked - self.last_unmasked) // interval
        )

    @property
    def leftmost(self) -> int:
        """The first running block with masks left."""
        return self.running.first + next(
            (n for n, left in enumerate(self.masked) if left), len(self.masked)
        )

    def advance(
        self,
        spec: DecodingSpec,
        num_unmasked: int,
        masked: list[int] | None = None,
        *,
        retained: int | None = None,
        prefills: bool = False,
    ) -> None:
        """Advance by one forward pass. Arguments are fields of ``StepReport`` and of
        its plan. ``masked`` may be left out for a single block, and ``retained`` if it
        has not changed."""
        if retained is not None:
            self.retained = retained
            self.tokens_retained = max(self.tokens_retained, retained)
            self.num_shared = spec.num_sharable or 0
            self.num_anchored = 0
        self.num_forwards += 1
        if prefills:
            return
        self.num_denoised += 1
        self.num_unmasked += num_unmasked
        self.last_unmasked = num_unmasked
        self.post_steps += not self.num_masked
        self.masked = [self.num_masked - num_unmasked] if masked is None else masked
        self.step += 1
        self._let_blocks_join(spec)

    def _let_blocks_join(self, spec: DecodingSpec) -> None:
        """Let the next blocks join. Blocks without a mask take no step."""
        if spec.layout.round_length is not None:
            self._begin_round(spec, spec.layout.round_length)
            return
        joins = True
        while joins:
            completed = self.leftmost - len(self.completed_at)
            self.completed_at = self.completed_at + [self.num_forwards] * completed
            joins = self._join(spec) and not self.num_masked

    def _begin_round(self, spec: DecodingSpec, length: int) -> None:
        """Begin the next round if the last one is verified: its blocks replace all
        running blocks.
        """
        first = self.leftmost
        if self.revises or not first:
            return
        stop = min(first + length, spec.layout.num_blocks)
        self.before, self.steps_before, self.step = self.running, self.step, 0
        self.running = Blocks(first, stop)
        self.masked = list(spec.layout.masks_per_block[first:stop])

    def _join(self, spec: DecodingSpec) -> bool:
        """Let the next block join if enough of the last one is decided; return True if
        it joins.
        """
        joining = self.running.stop
        left = self.masked[-1]
        if joining == spec.layout.num_blocks or self.ended or self.revises:
            return False
        enough = spec.schedule.block_add_threshold
        if left and (
            enough is None
            or 1 - left / spec.layout.block_span(joining - 1).size < enough
        ):
            return False
        if self.step:
            self.before = self.running
            self.steps_before = self.step
            self.step = self.post_steps = 0
        first = self.leftmost
        left_in_blocks = self.masked[first - self.running.first :]
        self.masked = [*left_in_blocks, spec.layout.masks_per_block[joining]]
        self.running = Blocks(first, joining + 1)
        self.slow_fast = spec.first_slow_fast(joining)
        return True
