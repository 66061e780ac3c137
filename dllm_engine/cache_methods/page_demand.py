"""Pages that requests hold and reserve."""

from dataclasses import dataclass, replace

from dllm_engine.cache_methods.base import CacheMethod
from dllm_engine.decoding.canvas_layout import Blocks, CanvasLayout
from dllm_engine.decoding.page_layout import PageCounts, PoolGeometry
from dllm_engine.decoding.spec import CacheOptions, DecodingSpec, Guidance, Schedule


@dataclass(frozen=True)
class PageDemand:
    """Numbers of pages that requests need with a cache method and a page geometry."""

    method: CacheMethod
    geometry: PoolGeometry
    share_prompts: bool = False

    def held(self, spec: DecodingSpec, running: Blocks) -> PageCounts:
        """Pages that a request holds while the blocks ``running`` run, including pages
        of the guide.
        """
        counts: PageCounts = {}
        if self.method.pages is not None and self.method.serves(spec):
            counts = self.method.pages(spec, running, self.geometry)
        elif spec.num_sharable:
            counts = self.geometry.uniform(spec.num_sharable)
        return counts | self.guide(spec)

    def guide(self, spec: DecodingSpec) -> PageCounts:
        """Pages of the guide for a request, reserved for its whole life. The guide
        never predicts beyond the last token.
        """
        if spec.guidance is None:
            return {}
        return self.geometry.guide_pages(spec.layout.canvas_length - 1)

    def num_held(self, spec: DecodingSpec, running: Blocks) -> int:
        return sum(map(sum, self.held(spec, running).values()))

    def peak(self, spec: DecodingSpec) -> int:
        """The most pages a request holds at any time of its life."""
        # A request that leaves out blocks behind the window holds fewer pages.
        spec = replace(spec, layout=replace(spec.layout, suffix_blocks=None))
        return max(self.num_held(spec, running) for running in spec.extreme_windows)

    def at_admission(self, spec: DecodingSpec, running: Blocks) -> int:
        """Pages reserved at admission with ``running`` blocks: the most that the
        request can need. A method that keeps tokens for good reserves only enough to
        keep the running blocks too, unless the request must never lose its pages."""
        if not self.method.keeps_for_good or spec.cache.keeps_running_block:
            return self.peak(spec)
        following = min(running.stop, spec.layout.num_blocks - 1)
        return self.num_held(spec, Blocks(following, following + 1))

    def upper_bound(self, options: CacheOptions, canvas_length: int) -> int:
        """The most pages that any request of at most ``canvas_length`` can need.

        Demand grows with the canvas, and changes evenly with the length of the prompt
        and with the window, so the extremes bound it. Raises ``ValueError`` if the page
        size, or a guide, does not suit the method.
        """
        has_guide = self.geometry.guide is not None
        if has_guide and (settings := options.unguided):
            raise ValueError(
                f"guide_model is not supported with {settings}: the guide needs a "
                f"draft of every position; choose another cache method, or leave "
                f"guide_model unset"
            )

        def demand(gen_length: int, block_length: int) -> int:
            layout = CanvasLayout(
                prompt_length=canvas_length - gen_length,
                gen_length=gen_length,
                block_length=block_length,
                shifts_logits=True,
            )
            sharable = layout.prompt_length if self.share_prompts else None
            spec = DecodingSpec(
                layout,
                Schedule(steps=gen_length, block_add_threshold=0.0),
                guidance=Guidance() if has_guide else None,
                cache=options.largest,
                num_sharable=sharable,
            )
            return self.peak(spec)

        longest = max(canvas_length - 1, 1)
        return max(demand(1, 1), demand(longest, 1), demand(longest, longest))
