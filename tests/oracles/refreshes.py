"""Which refreshes compute the whole canvas and what the others compute, as slow, plain Python.

Readings, since no paper has this:

* An interval is ``prompt_refresh_interval`` blocks, counted from the response's first. What all refreshes of an
  interval compute, its *renewed* part, is the response, or the interval's blocks with ``near_tokens`` positions on each
  side.
* The window lies in an interval if all of its blocks do. The whole canvas is computed for a window unless it and the
  one before lie in the same interval and that one had got as far as to retain something.
* The last row of the prompt predicts Dream's first token, so it belongs to its response.
* With ``suffix_blocks``, positions too far behind a window do not exist for its passes. Where only what is near is
  renewed, nothing else becomes visible until the next interval.
"""

from dataclasses import dataclass

from tests.oracles.decoding import Decoding


@dataclass
class Refreshes:
    run: Decoding
    refresh: str = "all"
    prompt_refresh_interval: int = 4
    near_tokens: int = 32

    @property
    def interval(self) -> int:
        return self.run.running[-1] // self.prompt_refresh_interval

    def whole_is_due(self, update_delay: int) -> bool:
        run = self.run
        if self.refresh == "all" or not run.running_before or run.steps_before <= update_delay:
            return True
        return run.running_before[0] // self.prompt_refresh_interval != self.interval

    def near(self) -> tuple[int, int]:
        first = self.interval * self.prompt_refresh_interval
        blocks = self.run.blocks[first : first + self.prompt_refresh_interval]
        return blocks[0][0] - self.near_tokens, blocks[-1][1] + self.near_tokens

    def renewed(self) -> list[int]:
        """What every refresh computes, ascending."""
        run = self.run
        if self.refresh == "near":
            start, end = self.near()
        else:
            start = 0 if self.refresh == "all" else len(run.prompt) - run.model.is_dream
            end = run.length
        return [position for position in run.seen if start <= position < end]

    def never_renewed(self) -> list[int]:
        """What only passes over the whole canvas compute, as far as it is read, without the window."""
        run = self.run
        if self.refresh == "near":
            start, end = self.near()
            first = run.blocks[self.interval * self.prompt_refresh_interval]
            seen = run.seen_with(first[1])
        else:
            start, end, seen = self.renewed()[0], run.length, run.seen
        return [p for p in seen if not start <= p < end and not run.window[0] <= p < run.window[1]]
