"""Figures of a request. The scheduler sends them
(``dllm_engine/decoding/messages.py``), and ``vllm_hooks`` passes them on as
``RequestOutput.outputs[i].diffusion`` and to HTTP clients.
"""

from dataclasses import asdict, dataclass, field
from typing import Any

PER_TOKEN = ("committed_at", "committed_logprobs")
OPTIONAL = (
    "tokens_edited",
    "length_passes",
    "length_rows",
    "trace",
    "decision",
    "error",
    *PER_TOKEN,
)
"""Fields of ``DiffusionFigures`` that most responses do not have."""


def _traced(name: str) -> property:
    """Property for a part of the trace. It raises ``ValueError`` if nothing was traced."""

    def read(figures: "DiffusionFigures") -> list:
        if not figures.trace:
            raise ValueError(
                f"{name} is recorded only by an engine started with trace=True"
            )
        return figures.trace.get(name, [])

    return property(read)


@dataclass(frozen=True)
class DiffusionFigures:
    """Cost of a response, up to its last finished block."""

    denoising_steps: int
    forward_passes: int
    tokens_unmasked: int
    tokens_computed: int
    """Rows fed to the model, summed over forward passes."""
    tokens_edited: int = 0
    """Number of replacements of decided tokens (``edit_threshold``)."""
    length_passes: int = 0
    """Forward passes that chose the length, before the others (``auto_length``)."""
    length_rows: int = 0
    """Rows fed to the model in the passes that chose the length."""
    pages_held: int = 0
    """The most pages held at once, over all layers and kinds of page."""
    tokens_retained: int = 0
    """The most tokens that the pages of a layer held at once (the mean, where layers or
    heads differ).
    """
    committed_at: list[int] = field(default_factory=list)
    """With ``return_order=True``, per returned token: the forward pass that committed
    it, counted from 1; 0: it was given. Tokens of one pass were committed at once."""
    committed_logprobs: list[float] = field(default_factory=list)
    """With ``return_order=True``, per returned token: its log-probability in that pass,
    under the model's softmax over the whole vocabulary at temperature 1; 0 where it was
    given."""
    trace: dict[str, list] = field(default_factory=dict)
    """With ``trace=True``, per forward pass: ``refresh_states`` (full, update, reuse),
    ``unmasked_per_step`` (canvas positions), with ``edit_threshold``
    ``edited_per_step`` (canvas position, token before, token after), with ``p2``
    ``remasked_per_step`` (canvas position, token taken back), with self-speculation
    both, ``windows`` (start and stop of the running blocks' canvas positions) and
    ``computed_positions`` (None: the whole canvas); per UPDATE step
    ``retained_positions``, a list per layer, or with MaskKV ``retained_per_head``, a
    list of them per head; and per step that skips ``selected_positions``, a list per
    layer that drops rows.
    """
    decision: dict[str, Any] = field(default_factory=dict)
    """Result of a decision: per field its ``value``, ``probability`` and
    ``distribution``.
    """
    error: str | None = None
    """Why the request ended with ``finish_reason="error"``; None without an error."""

    @property
    def tokens_per_forward(self) -> float:
        return (
            self.tokens_unmasked / self.forward_passes if self.forward_passes else 0.0
        )

    @property
    def order(self) -> list[list[int]]:
        """Per forward pass, the indices of the returned tokens that it committed."""
        numbers = range(1, max(self.committed_at, default=0) + 1)
        return [
            [i for i, number in enumerate(self.committed_at) if number == step]
            for step in numbers
        ]

    refresh_states = _traced("refresh_states")
    unmasked_per_step = _traced("unmasked_per_step")
    edited_per_step = _traced("edited_per_step")
    windows = _traced("windows")
    computed_positions = _traced("computed_positions")
    retained_positions = _traced("retained_positions")
    selected_positions = _traced("selected_positions")

    def to_json(self) -> dict[str, Any]:
        """The HTTP form. Fields of ``OPTIONAL`` are left out if they are empty."""
        data = asdict(self) | {"tokens_per_forward": self.tokens_per_forward}
        return {
            name: value for name, value in data.items() if name not in OPTIONAL or value
        }


class ErrorReason(str):
    """The ``finish_reason`` "error", with an explanation."""

    explanation: str

    def __new__(cls, explanation: str) -> "ErrorReason":
        reason = super().__new__(cls, "error")
        reason.explanation = explanation
        return reason
