"""Changes of an engine's weights while it lives."""


class ModelWeights:
    """Tells whether the engine has all of its weights, and how often they changed."""

    def __init__(self) -> None:
        self.incomplete_since: str | None = None
        """The call that began to change the weights, until another one completes them.
        No request begins then.
        """
        self.num_changes = 0

    def begin_change(self, call: str, *, breaks: bool) -> None:
        """A call of the workers is about to change weights. ``breaks``: they are
        incomplete even if it fails.
        """
        self.num_changes += 1
        if breaks:
            self.incomplete_since = call

    def end_change(self, call: str, *, complete: bool) -> None:
        """The call has ended; ``complete``: it leaves no part of the weights out."""
        self.incomplete_since = None if complete else call

    def require(self) -> None:
        """Raise ``ValueError`` while weights are incomplete."""
        if self.incomplete_since is not None:
            raise ValueError(
                f"the engine's weights are incomplete since {self.incomplete_since}; "
                f"complete them with reload_weights or finish_weight_update. A paused "
                f"engine keeps requests waiting meanwhile"
            )
