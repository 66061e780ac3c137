"""How far a request has come."""

from dataclasses import dataclass, field

from dllm_engine.scheduler.request import FIRST_BLOCK, Blocks, DecodingSpec
from dllm_engine.scheduler.unmasking import SeenOfBlock, SpanState


@dataclass
class Progress:
    """How far a request has come. Owned by the scheduler, advanced by what the runner reports; the runner gets a copy
    where it goes on by itself.

    The *running* blocks are those that a step may fill; their canvas positions are the *window*. The next block joins
    them once enough of the last one is decided; blocks that are complete by then leave. With one block at a time that
    is the next block in place of the one before.
    """

    running: Blocks = FIRST_BLOCK
    step: int = 0
    """Denoising steps since the last block joined."""
    masked: list[int] = field(default_factory=list)
    """Masked tokens left in each running block."""
    before: Blocks = FIRST_BLOCK
    """The running blocks before the last one joined, if one has."""
    steps_before: int = 0
    """Denoising steps of these."""
    completed_at: list[int] = field(default_factory=list)
    """For each complete block with no mask before it: the forward passes after which that was so."""
    span: SpanState | None = None
    """Where SlowFast sampling stands in the running block, if the request decodes by it."""
    ended: bool = False
    """Whether the response ends with the running blocks, so that no more join."""
    num_forwards: int = 0
    """Forward passes so far, over the whole response."""
    num_prefills: int = 0
    """Those of them that fed a part of a long prompt alone."""
    num_unmasked: int = 0
    """Response tokens unmasked so far."""
    last_unmasked: int = 0
    """How many of them the last forward pass unmasked."""
    num_rows_computed: int = 0
    """Rows fed to the model so far, summed over forward passes."""
    pages_held: int = 0
    """The most pages held so far."""
    retained: int = 0
    """Tokens per layer that pages hold."""
    tokens_retained: int = 0
    """The most tokens per layer that pages held so far."""
    trace: dict[str, list] = field(default_factory=dict)
    """Per-forward records, kept only when the engine traces."""

    @classmethod
    def begin(cls, spec: DecodingSpec) -> "Progress":
        """That of a request that has not run."""
        progress = cls(masked=[spec.masks_per_block[0]], span=spec.first_span(0))
        progress._settle(spec)
        return progress

    @property
    def num_masked(self) -> int:
        """Masked tokens left in the window."""
        return sum(self.masked)

    @property
    def num_denoised(self) -> int:
        """Denoising steps so far, over the whole response."""
        return self.num_forwards - self.num_prefills

    def passed_multiple_of(self, interval: int) -> bool:
        """Whether the tokens that the last pass unmasked brought their number to a multiple of ``interval``, or past
        one."""
        return self.num_unmasked // interval > (self.num_unmasked - self.last_unmasked) // interval

    @property
    def leftmost(self) -> int:
        """The first running block with masks left."""
        return self.running.first + self._num_complete

    @property
    def _num_complete(self) -> int:
        """Complete blocks at the beginning of the window."""
        return next((number for number, left in enumerate(self.masked) if left), len(self.masked))

    def advance(
        self,
        spec: DecodingSpec,
        num_unmasked: int,
        masked: list[int] | None = None,
        *,
        ends: bool = False,
        seen: SeenOfBlock | None = None,
        retained: int | None = None,
        prefills: bool = False,
    ) -> None:
        """On to the next step. All that plans read is up to date then.

        Args:
            num_unmasked: tokens that the step unmasked.
            masked: masked tokens left in each running block; None: in a single one, so many fewer.
            ends: whether the response ends with the running blocks.
            seen: where the request decodes by SlowFast sampling.
            retained: tokens per layer that pages hold now; None: as before.
            prefills: whether it only fed a part of a long prompt.
        """
        if retained is not None:
            self.retained, self.tokens_retained = retained, max(self.tokens_retained, retained)
        if prefills:
            self.num_forwards, self.num_prefills = self.num_forwards + 1, self.num_prefills + 1
            return
        if self.span is not None and seen is not None:
            self.span = self.span.after(seen)
        self.num_forwards += 1
        self.num_unmasked += num_unmasked
        self.last_unmasked = num_unmasked
        self.masked = [self.num_masked - num_unmasked] if masked is None else masked
        self.step += 1
        self.ended |= ends
        self._settle(spec)

    def _settle(self, spec: DecodingSpec) -> None:
        """Let the next block join where it may. Blocks that have no mask to begin with take no step."""
        self._note_complete()
        while self._join(spec) and not self.num_masked:
            self._note_complete()

    def _note_complete(self) -> None:
        self.completed_at += [self.num_forwards] * (self.leftmost - len(self.completed_at))

    def _join(self, spec: DecodingSpec) -> bool:
        """Let the next block join if enough of the last one is decided; whether it does."""
        joining, left = self.running.stop, self.masked[-1]
        if joining == spec.num_blocks or self.ended:
            return False
        enough = spec.block_add_threshold
        if left and (enough is None or 1 - left / spec.block_span(joining - 1).size < enough):
            return False
        if self.step:
            self.before, self.steps_before, self.step = self.running, self.step, 0
        first = self.leftmost
        self.masked = [*self.masked[first - self.running.first :], spec.masks_per_block[joining]]
        self.running, self.span = Blocks(first, joining + 1), spec.first_span(joining)
        return True
