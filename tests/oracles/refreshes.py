"""Which refreshes compute the whole canvas and what the others compute, as slow, plain Python.

No paper has this. An interval is ``prompt_refresh_interval`` blocks, counted from the response's first. The whole
canvas is computed for a window unless it and the one before lie in the same interval and that one had got as far as to
retain something. The last row of the prompt predicts Dream's first token, so it belongs to its response.
"""

from dataclasses import dataclass

from tests.oracles.decoding import Decoding


@dataclass
class Refreshes:
    run: Decoding
    refresh: str = "all"
    prompt_refresh_interval: int = 4
    near_tokens: int = 32

    def whole_is_due(self, update_delay: int) -> bool:
        run = self.run
        if self.refresh == "all" or not run.running_before or run.steps_before <= update_delay:
            return True
        interval = run.running[-1] // self.prompt_refresh_interval
        return run.running_before[0] // self.prompt_refresh_interval != interval

    def renewed(self) -> list[int]:
        """What every refresh computes, ascending."""
        run, end = self.run, self.run.length
        if self.refresh == "near":
            start = run.window[0] - self.near_tokens
            end = run.window[1] + self.near_tokens if run.suffix_blocks is None else end
        else:
            start = 0 if self.refresh == "all" else len(run.prompt) - run.model.is_dream
        return [position for position in run.seen if start <= position < end]

    def never_renewed(self) -> list[int]:
        """What only passes over the whole canvas compute, without the window."""
        return [p for p in range(self.renewed()[0]) if not self.run.window[0] <= p < self.run.window[1]]
