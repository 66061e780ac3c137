"""Changes of an engine's weights while it runs."""


class ModelWeights:
    """State of the engine's weights: whether they are complete, and how often they have
    changed.
    """

    def __init__(self) -> None:
        self.incomplete_since: str | None = None
        """Name of the call after which weights are incomplete, until another call
        completes them; None: they are complete. No request begins while they are
        incomplete.
        """
        self.num_changes = 0

    def begin_change(self, call: str, *, breaks: bool) -> None:
        """Note that a call of the workers is about to change weights. ``breaks``:
        weights are incomplete afterwards even if the call fails.
        """
        self.num_changes += 1
        if breaks:
            self.incomplete_since = call

    def end_change(self, call: str, *, complete: bool) -> None:
        """Note that the call has ended. ``complete``: all weights are there now."""
        self.incomplete_since = None if complete else call

    def require(self) -> None:
        """Raise ``ValueError`` while weights are incomplete."""
        if self.incomplete_since is not None:
            raise ValueError(
                f"the engine's weights are incomplete since {self.incomplete_since}; "
                f"complete them with reload_weights or finish_weight_update. A paused "
                f"engine keeps requests waiting meanwhile"
            )
