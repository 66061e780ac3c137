"""``DiffusionParams``: vLLM's sampling parameters with the fields of diffusion decoding."""

from collections.abc import Iterable
from typing import Any, Literal

from vllm.sampling_params import SamplingParams

from dllm_engine.families import LLADA
from dllm_engine.options import EngineOptions
from dllm_engine.scheduler.request_options import InvalidRequestError, RequestOptions, parse_request_options
from dllm_engine.scheduler.resolve import resolve_unmasking

_OWN_OPTIONS: dict[str, Any] = dict.fromkeys(RequestOptions.model_fields) | {"top_p": 1.0, "top_k": 0}
"""Fields of ``DiffusionParams`` that travel in ``extra_args``, and what they hold where they are not given."""


class DiffusionParams(SamplingParams):
    """vLLM's sampling parameters with the fields of diffusion decoding.

    A value of None means the model family's default. Lengths and steps count tokens and denoising steps of the whole
    response. Greedy (``temperature=0``) unless asked otherwise.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    """Applied to greedy requests too: Dream's confidences are those of the filtered distribution."""
    top_k: int = 0
    """As ``top_p``; 0 keeps all tokens."""
    extra_args: dict[str, Any] | None = None
    """Filled from the fields below; what the caller puts there as well is kept."""
    max_tokens: int | None = None
    """The same as ``gen_length``, under vLLM's name."""
    gen_length: int | None = None
    """Response tokens; None: 256 (or the checkpoint's ``max_new_tokens``), or what fits where that is less."""
    block_length: int | None = None
    """Response tokens denoised together; default 32 for LLaDA, the whole response for Dream."""
    steps: int | None = None
    """Denoising steps over the whole response, 1 … ``gen_length``; default one per token. Blocks share them by their
    length."""
    unmasking: str | None = None
    """Unmasking policy; default ``low_confidence`` for LLaDA, ``entropy`` for Dream, and with parallel unmasking the
    one that measures what the rule goes by."""
    threshold: float | None = None
    """Parallel unmasking (Fast-dLLM): each step unmasks every position of the block whose probability reaches this,
    and at least the best one, until none is left; ``steps`` is ignored, as with the other rules below, of which a
    request may name one. For policies that measure a probability (``low_confidence``, ``maskgit_plus``); the others,
    where named, keep to their fixed count, as Fast-dLLM's own code does."""
    factor: float | None = None
    """Parallel unmasking (Fast-dLLM): the n most probable positions, n the largest with
    (n + 1) · (1 − n-th probability) < factor, at least one. Policies as for ``threshold``, others are refused."""
    entropy_bound: float | None = None
    """Parallel unmasking (EB-Sampler): positions in ascending order of entropy, as many as have a sum of entropies
    less the largest of at most this (in nats), so at least one. For the policy ``entropy``."""
    margin: float | None = None
    """Parallel unmasking: every position whose two likeliest tokens differ in probability by at least this, and at
    least the best one. For the policy ``topk_margin``."""
    retention_ratio: float | None = None
    """Retain less than the engine's ``retention_ratio`` for this request."""
    delay_eos: bool | None = None
    """Hold back an end token while the position before it is masked and the response has no end token yet (ES-dLLM),
    whatever the cache method. Without a cache it also asks for the rest of ES-dLLM's sampler, which ``es_dllm`` always
    uses: equally many tokens per step in both families, by default those of the highest plain probability."""
    guided: bool | None = None
    """Guided Diffusion: whether the engine's guide model decides what a step unmasks; default yes, where the engine has
    one. Schedules, unmasking policies and thresholds then have no say."""
    speculation_length: int | None = None
    """Masked positions drafted and checked by the guide in a step; default 32, within the running block."""
    guide_top_k: int | None = None
    """A draft passes if the guide has it among this many of its best tokens; default 1."""
    guide_threshold: float | None = None
    """Drafts more probable than this pass as well; default none."""
    guide_fallback: str | None = None
    """Whose token is taken where nothing passes: ``guide`` (default) or ``draft``."""
    guide_correction: bool | None = None
    """Replace what passes by the guide's tokens; default no."""
    stream_granularity: Literal["block", "step"] | None = None
    """What a streamed response shows: finished blocks (the default), or the running block after each step as well, in
    ``outputs[i].provisional``."""
    trace: bool | None = None
    """Over HTTP: whether the response carries the trace, which the engine must record (``trace=True``); default no. In
    Python ``outputs[i].diffusion`` has it whenever the engine records it."""

    def __post_init__(self) -> None:
        if self.gen_length is not None and self.max_tokens not in (None, self.gen_length):
            raise InvalidRequestError(
                f"gen_length={self.gen_length} and max_tokens={self.max_tokens} name the same length; give one"
            )
        gen_length = self.max_tokens if self.gen_length is None else self.gen_length
        own = {name: getattr(self, name) for name in _OWN_OPTIONS}
        extra_args = self.extra_args or {}
        super().__post_init__()  # which resets top_p and top_k of a greedy request
        # What the caller has put into `extra_args` himself is shown by the fields as well.
        for name, value in own.items():
            is_given = value != _OWN_OPTIONS[name]
            SamplingParams.__setattr__(self, name, value if is_given else extra_args.get(name, value))
        self.gen_length = gen_length
        self._settle()

    def __setattr__(self, name: str, value: Any) -> None:
        """Set a field as if the parameters had been made with it; raises ``InvalidRequestError`` for a bad value."""
        is_length = name in ("gen_length", "max_tokens")
        if is_length and value is not None and (type(value) is not int or value < 1):
            raise InvalidRequestError(f"{name}={value!r} is out of range: it must be a whole number, at least 1")
        before = getattr(self, name)
        for field in ("gen_length", "max_tokens") if is_length else (name,):
            super().__setattr__(field, value)
        if name in _OWN_OPTIONS:
            try:
                self._settle()
            except InvalidRequestError:
                super().__setattr__(name, before)
                raise

    def _settle(self) -> None:
        """Check the options that vLLM has no field for, and put them where they travel."""
        chosen = {name: value for name, default in _OWN_OPTIONS.items() if (value := getattr(self, name)) != default}
        if chosen.get("top_k", 1) <= 0:  # -1 means all as well
            del chosen["top_k"]
        resolve_unmasking(parse_request_options(chosen), LLADA)
        others = {name: value for name, value in (self.extra_args or {}).items() if name not in _OWN_OPTIONS}
        super().__setattr__("extra_args", others | chosen or None)

    def __repr__(self) -> str:
        """What differs from the defaults, as an expression that makes the same parameters."""
        blank = DiffusionParams()
        names = dict.fromkeys(("gen_length", *_OWN_OPTIONS, *SamplingParams.__struct_fields__))
        given = {name: value for name in names if (value := getattr(self, name)) != getattr(blank, name)}
        for name in ("max_tokens", "extra_args", "output_text_buffer_length", *(n for n in given if n[0] == "_")):
            given.pop(name, None)
        if others := {name: value for name, value in (self.extra_args or {}).items() if name not in _OWN_OPTIONS}:
            given["extra_args"] = others
        return f"DiffusionParams({', '.join(f'{name}={value!r}' for name, value in given.items())})"

    def to_sampling_params(self) -> SamplingParams:
        """The same request as vLLM's own class, the only one its wire format knows.

        The wire omits fields that hold their default, and the receiver would fill in the defaults of another class.
        """
        return SamplingParams(**{name: getattr(self, name) for name in SamplingParams.__struct_fields__})


def check_place(fields: Iterable[str]) -> None:
    """Raise ``InvalidRequestError`` if a request has options of ours among these fields, which nobody reads."""
    for name in fields:
        if name in RequestOptions.model_fields:
            raise InvalidRequestError(f'{name} belongs into vllm_xargs: {{"vllm_xargs": {{"{name}": …}}}}')
        if name == "gen_length":
            raise InvalidRequestError(
                "gen_length is for DiffusionParams; over HTTP set max_tokens (max_output_tokens for /v1/responses)"
            )
        if name in EngineOptions.model_fields:
            raise InvalidRequestError(f"{name} is an option of the engine, set when it starts; leave it out")
        if name == "cfg_scale":
            raise InvalidRequestError("cfg_scale: classifier-free guidance is not supported; leave it out")
