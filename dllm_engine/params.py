"""``DiffusionParams``: vLLM's sampling parameters with the fields of diffusion
decoding.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Literal

import msgspec
from vllm.sampling_params import SamplingParams

from dllm_engine.decoding.unmasking_policies import PARALLEL_RULES
from dllm_engine.families import FAMILIES
from dllm_engine.options import EngineOptions
from dllm_engine.request_options.errors import InvalidRequestError
from dllm_engine.request_options.fields import RequestOptions, check_exclusions
from dllm_engine.request_options.sampling import check_num_responses
from dllm_engine.request_options.sampling_params import parse_request_options
from dllm_engine.request_options.unmasking import PARALLEL_OPTIONS, policy_and_rule
from dllm_engine.text import with_meanings

AUTO = "auto"
"""Value of ``gen_length``: choose the length."""
_OWN_OPTIONS: dict[str, Any] = dict.fromkeys(RequestOptions.model_fields) | {
    "top_p": 1.0,
    "top_k": 0,
}
"""Fields of ``DiffusionParams`` that travel in ``extra_args``, and their default
values.
"""
_ANY_FAMILY = next(iter(FAMILIES.values()))
"""Parameters are made before their model is known, so any family serves for checks."""

for _name in PARALLEL_OPTIONS:
    if _name in (*SamplingParams.__struct_fields__, "gen_length"):
        raise PARALLEL_RULES.error(
            _name, "a field of SamplingParams has this name; give the rule another name"
        )

if TYPE_CHECKING:

    class _Fields(RequestOptions, SamplingParams):
        """``SamplingParams`` with a field for each request option."""
else:
    _Fields = msgspec.defstruct(
        "_Fields",
        [
            (name, field.annotation, None)
            for name, field in RequestOptions.model_fields.items()
        ],
        bases=(SamplingParams,),
    )


class DiffusionParams(_Fields):
    """vLLM's sampling parameters with the fields of diffusion decoding.

    A value of None means the model family's default. Lengths and steps count tokens and
    denoising steps of the whole response. The default is greedy (``temperature=0``).
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    extra_args: dict[str, Any] | None = None
    """Filled from the fields below. Other entries of the caller are kept."""
    max_tokens: int | None = None
    """The same as ``gen_length``, under vLLM's name. If the length is chosen, the most
    that it may be."""
    gen_length: int | Literal["auto"] | None = None
    """Response tokens. ``"auto"``: as many as ``auto_length`` chooses. Unset: the
    checkpoint's ``max_new_tokens``, else the default, or what fits the context if that
    is less."""

    def __post_init__(self) -> None:
        gen_length = self.gen_length
        if isinstance(gen_length, int) and self.max_tokens not in (None, gen_length):
            raise InvalidRequestError(
                f"gen_length={self.gen_length} and max_tokens={self.max_tokens} name "
                f"the same length; give one"
            )
        check_num_responses(self.n, self.temperature)
        own = {name: getattr(self, name) for name in _OWN_OPTIONS}
        extra_args = self.extra_args or {}
        super().__post_init__()  # it resets top_p and top_k of a greedy request
        # Fields also show options that the caller has put into `extra_args`.
        for name, value in own.items():
            is_given = value != _OWN_OPTIONS[name]
            SamplingParams.__setattr__(
                self, name, value if is_given else extra_args.get(name, value)
            )
        self._check_lengths()
        if gen_length is None:
            self.max_tokens = self.max_tokens
        else:
            self.gen_length = gen_length
        self._store_options()

    def __setattr__(self, name: str, value: Any) -> None:
        """Set a field as if the parameters had been made with it. Raises
        ``InvalidRequestError`` for a bad value.
        """
        if name in ("gen_length", "max_tokens"):
            self._set_length(name, value)
            return
        before = getattr(self, name)
        super().__setattr__(name, value)
        if name in _OWN_OPTIONS:
            try:
                self._store_options()
            except InvalidRequestError:
                super().__setattr__(name, before)
                raise

    def _check_lengths(self) -> None:
        length = self.gen_length
        is_auto = self.auto_length
        if None not in (length, is_auto) and is_auto != (length == AUTO):
            raise InvalidRequestError(
                f"gen_length={length!r} and auto_length={is_auto} say different things "
                f"about the length; give one"
            )

    def _set_length(self, name: str, value: Any) -> None:
        is_auto = name == "gen_length" and value == AUTO
        if not is_auto and value is not None and (type(value) is not int or value < 1):
            also = f', or "{AUTO}"' if name == "gen_length" else ""
            raise InvalidRequestError(
                f"{name}={value!r} is out of range: it must be a whole number, at "
                f"least 1{also}"
            )
        if name == "gen_length":
            super().__setattr__("auto_length", None if value is None else is_auto)
            super().__setattr__(name, value)
            self._store_options()
        elif isinstance(self.gen_length, int):
            super().__setattr__("gen_length", value)
        if not is_auto:
            super().__setattr__("max_tokens", value)

    def _store_options(self) -> None:
        """Check the options that vLLM has no field for, and put them into
        ``extra_args``.
        """
        self._check_lengths()
        chosen = {
            name: value
            for name, default in _OWN_OPTIONS.items()
            if (value := getattr(self, name)) != default
        }
        if chosen.get("top_k", 1) <= 0:  # -1 means all as well
            del chosen["top_k"]
        options = parse_request_options(chosen)
        check_exclusions(options)
        policy_and_rule(options, _ANY_FAMILY)
        super().__setattr__("extra_args", self._others() | chosen or None)

    def _others(self) -> dict[str, Any]:
        """Entries of ``extra_args`` that are not options of this package."""
        return {
            name: value
            for name, value in (self.extra_args or {}).items()
            if name not in _OWN_OPTIONS
        }

    def __repr__(self) -> str:
        """Expression that makes equal parameters, with the fields that differ from
        their defaults.
        """
        blank = DiffusionParams()
        left_out = {"extra_args", "output_text_buffer_length"}
        if self.gen_length is not None:
            left_out.add("auto_length")
        if isinstance(self.gen_length, int):
            left_out.add("max_tokens")
        lengths = ("gen_length", "max_tokens")
        fields = [
            f"{name}={value!r}"
            for name in dict.fromkeys(
                (*lengths, *_OWN_OPTIONS, *SamplingParams.__struct_fields__)
            )
            if name not in left_out
            and not name.startswith("_")
            and (value := getattr(self, name)) != getattr(blank, name)
        ]
        if others := self._others():
            fields.append(f"extra_args={others!r}")
        return f"DiffusionParams({', '.join(fields)})"

    def to_sampling_params(self) -> SamplingParams:
        """The parameters as vLLM's class. Its wire format omits default values, so the
        receiver would fill in the defaults of another class."""
        return SamplingParams(
            **{name: getattr(self, name) for name in SamplingParams.__struct_fields__}
        )


DiffusionParams.__doc__ = with_meanings(
    DiffusionParams.__doc__,
    "Beside vLLM's fields",
    RequestOptions,
    RequestOptions.model_fields,
)


VLLM_OPTIONS = frozenset({"min_tokens", "logit_bias"})
"""Fields of vLLM that some routes lack, and that ``vllm_xargs`` does not take."""
ELSEWHERE = {
    **dict.fromkeys(
        EngineOptions.model_fields,
        "is an option of the engine, set when it starts; leave it out",
    ),
    **dict.fromkeys(
        sorted(VLLM_OPTIONS),
        "is a field of SamplingParams, /v1/completions and /v1/chat/completions; put "
        "it there",
    ),
    "gen_length": (
        "is for DiffusionParams; over HTTP set max_tokens (max_output_tokens for "
        "/v1/responses), and for a length that is chosen auto_length in vllm_xargs"
    ),
    "template": "belongs into vllm_xargs of a request over HTTP; in Python call LLM.fill_in, and for token ids set "
    "response_template",
    "cfg_scale": (
        "asks for classifier-free guidance, which is not supported; leave it out"
    ),
}
"""Other names with a meaning in this package or in similar ones, which do not belong
into the body of a request, and what to do instead.
"""


def check_place(fields: Iterable[str], *places: str) -> None:
    """Raise ``InvalidRequestError`` if these fields of a request contain our options,
    which would be ignored there. ``places``: path of the field that takes request
    options."""
    for name in fields:
        if name in RequestOptions.model_fields:
            places = places or ("vllm_xargs",)
            example = (
                "".join(f'{{"{place}": ' for place in (*places, name))
                + "…"
                + "}" * (len(places) + 1)
            )
            raise InvalidRequestError(
                f"{name} belongs into {'.'.join(places)}: {example}"
            )
        if name in ELSEWHERE:
            raise InvalidRequestError(f"{name} {ELSEWHERE[name]}")
