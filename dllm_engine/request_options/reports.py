"""Options about what is returned beside the response."""

from typing import Annotated, Literal

from dllm_engine.decoding.spec import Reports
from dllm_engine.request_options.context import RequestContext, refused
from dllm_engine.request_options.facts import Facts, OptionGroup


class ReportOptions(OptionGroup):
    stream_granularity: Literal["block", "step"] | None = None
    """Content of a streamed response: finished blocks, or also the running block after
    each step (``outputs[i].provisional``)."""
    return_order: bool | None = None
    """Return for each token the forward pass that committed it and its log-probability
    then, as ``outputs[i].diffusion.committed_at`` and ``committed_logprobs``."""
    trace: Annotated[bool | None, Facts(in_decisions=True)] = None
    """Over HTTP: return the trace; the engine must record it (``trace=True``). In
    Python, ``outputs[i].diffusion`` always has it if the engine records it."""


def resolve_reports(
    request: RequestContext, options: ReportOptions, return_given: bool
) -> Reports:
    """The reports that a request asks for. ``return_given``: True if given tokens are
    returned.
    """
    if options.trace and not request.engine.trace:
        raise refused(
            "trace=True: the engine records no trace; start it with trace=True "
            "(--trace), or leave it unset"
        )
    streams_steps = options.stream_granularity == "step"
    if streams_steps and not return_given:
        raise refused(
            "return_given=False leaves out what stream_granularity='step' shows; leave "
            "one unset"
        )
    return Reports(
        num_logprobs=request.params.logprobs,
        return_order=bool(options.return_order),
        streams_steps=streams_steps,
    )
