"""Per-request figures and their way from the scheduler to the caller.

vLLM's ``EngineCoreOutput`` is a fixed struct; of its fields only ``kv_transfer_params``, a free dictionary, passes
every executor and wire format. The scheduler puts a request's figures there, and ``vllm_hooks`` hands them on, as
``RequestOutput.outputs[i].diffusion`` and to HTTP clients.
"""

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class DiffusionFigures:
    """What a response cost, up to its last finished block."""

    denoising_steps: int
    forward_passes: int
    tokens_unmasked: int
    tokens_computed: int
    """Rows fed to the model, summed over forward passes."""
    pages_held: int = 0
    """The most pages held at once, over all layers and kinds of page."""
    tokens_retained: int = 0
    """The most tokens that the pages of a layer held at once (the mean, where layers or heads differ)."""
    trace: dict[str, list] = field(default_factory=dict)
    """With ``trace=True``, per forward pass: ``refresh_states`` (full, update, reuse), ``unmasked_per_step`` (canvas
    positions), ``windows`` (start and stop of the running blocks' canvas positions) and ``computed_positions`` (None:
    the whole canvas); per UPDATE step ``retained_positions``, a list per layer, and per step that skips
    ``selected_positions``, a list per layer that drops rows."""
    error: str | None = None
    """Why the request ended with ``finish_reason="error"``; None where it did not."""

    @property
    def tokens_per_forward(self) -> float:
        return self.tokens_unmasked / self.forward_passes if self.forward_passes else 0.0

    @property
    def refresh_states(self) -> list[str]:
        return self._traced("refresh_states")

    @property
    def unmasked_per_step(self) -> list[list[int]]:
        return self._traced("unmasked_per_step")

    @property
    def windows(self) -> list[tuple[int, int]]:
        return self._traced("windows")

    @property
    def computed_positions(self) -> list[list[int] | None]:
        return self._traced("computed_positions")

    @property
    def retained_positions(self) -> list[list[list[int]]]:
        return self._traced("retained_positions")

    @property
    def selected_positions(self) -> list[list[list[int]]]:
        return self._traced("selected_positions")

    def _traced(self, name: str) -> list:
        if not self.trace:
            raise ValueError(f"{name} is recorded only by an engine started with trace=True")
        return self.trace.get(name, [])

    def to_json(self) -> dict[str, Any]:
        """The HTTP form; trace and error only where there is one."""
        data = asdict(self) | {"tokens_per_forward": self.tokens_per_forward}
        if not self.trace:
            del data["trace"]
        if self.error is None:
            del data["error"]
        return data


class ErrorReason(str):
    """The ``finish_reason`` "error", which also says why."""

    explanation: str


def error_reason(explanation: str) -> ErrorReason:
    reason = ErrorReason("error")
    reason.explanation = explanation
    return reason
