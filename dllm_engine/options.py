"""Engine options: arguments of ``LLM(cache_method=…, cache_options=…, trace=…)``, and
keys in ``--additional-config``.
"""

from dataclasses import replace
from functools import cached_property
from typing import Any, Literal

from pydantic import BaseModel, Field, ValidationError, field_validator

from dllm_engine.cache_methods import CACHE_METHODS, DEFAULT_METHODS, methods_for
from dllm_engine.cache_methods.base import CacheMethod
from dllm_engine.decoding.canvas_layout import CanvasLayout
from dllm_engine.decoding.option_types import NotNegative, Options, Positive
from dllm_engine.decoding.page_layout import (
    GuideShape,
    PoolGeometry,
    head_dim_of,
    pages_for,
)
from dllm_engine.decoding.spec import CacheOptions, DraftingOptions, EvictingOptions
from dllm_engine.demo import DEMO_GUIDE_DIR, DEMO_MODEL
from dllm_engine.families import ModelFamily
from dllm_engine.text import choices, explain, shortened

OPTIONS_KEY = "dllm"
"""Key of our options in ``additional_config``, and of defaults of requests in a
checkpoint's config.json.
"""


def checkpoint_section(hf_config: object) -> dict[str, Any]:
    """Section of a checkpoint's config.json for this package. Raises ``ValueError`` if
    it is not an object.
    """
    section = getattr(hf_config, OPTIONS_KEY, None)
    if section is not None and not isinstance(section, dict):
        raise ValueError(
            f"config.json: {OPTIONS_KEY!r}={shortened(section)} must be an object of "
            f"request options"
        )
    return section or {}


GUIDE_SETTINGS = ("guide_model", "guide_tokens_per_token")
AUTO = "auto"
"""Value of ``cache_method``: choose by the model."""
PAPER = "paper"
"""Value of ``cache_options``: the settings of the method's paper, which are the
defaults.
"""


class EngineOptions(BaseModel):
    """Options of an engine. They are the same in all of its processes."""

    model_config = Options.model_config

    cache_method: str = "auto"
    """Method that decides what steps compute and keep in pages. ``"auto"``: ``"block"``
    for block diffusion models, ``"none"`` for others."""
    cache_options: dict[str, Any] | Literal["paper"] = {}
    """Options of the cache method. ``"paper"``: the settings of its paper, which are
    the defaults.
    """
    page_size: Positive = 32
    """Tokens per page of one layer."""
    dense_attention: Literal["auto", "flash", "sdpa"] = "auto"
    """Library for attention that reads no pages. ``"flash"`` (vLLM's FlashAttention)
    needs CUDA and float16 or bfloat16; ``"sdpa"`` is PyTorch's. ``"auto"``: ``"flash"``
    if it is available, else ``"sdpa"``."""
    refresh_ratio: float | None = Field(default=1.0, gt=0)
    """Limits how often a long request refreshes while short ones run: rows of its FULL
    and UPDATE steps per row that requests of at most a quarter of its length compute in
    the meantime. None: no limit."""
    share_prompts: bool = False
    """Compute the beginning of a prompt once for all requests that begin so, if the
    model attends to the whole canvas: an approximation (see Shared prompts in docs/methods.md)."""
    anchor_tokens: NotNegative = 0
    """With ``share_prompts``: so many of the first and of the last tokens that a request
    finds in pages are computed again, in whole pages. More of them bring its answer
    nearer to that without sharing.
    """
    steps_per_dispatch: Positive = 8
    """Denoising steps that workers run before they return to the scheduler, while no
    request may begin and no block is complete."""
    guide_model: str | None = None
    """Folder or Hugging Face name of an autoregressive model (Qwen2 or Llama) that
    checks drafts (Guided Diffusion); ``"demo"`` for the demo model's. Requests are then
    guided unless they set ``guided=False``."""
    guide_tokens_per_token: float = Field(default=2.0, gt=0)
    """If the guide has another tokenizer: guide tokens to reserve pages for, per token
    of the model.
    """
    guide_shape: GuideShape | None = None
    """Filled in by the engine."""
    lora_path: str | None = None
    """Folder of a LoRA adapter as PEFT saves it. It is merged into the weights while
    they are loaded, and serves all requests. Every node needs the folder."""
    cuda_graphs: bool | None = None
    """Record the passes of steps and the filling in of their tokens as CUDA graphs and
    replay them. Needs a GPU. None: on if there is one and vLLM's ``enforce_eager`` is
    not set."""
    batch_invariant: bool = False
    """Compute every request on its own, so that its response is bit-identical in any
    batch. Slower with several requests."""
    max_automaton_states: Positive = 4096
    """The most states that the automaton of a request's ``structured_outputs`` may
    have.
    """
    max_automaton_seconds: float = Field(default=30.0, gt=0, le=86400)
    """The longest time that building such an automaton may take."""
    max_automaton_search: Positive = 1 << 24
    """The most that a step may search of such an automaton: its size × the positions
    that are searched at once (see Structured output). Bounds what a decision may
    compute, too (see Decisions)."""
    decision_way: Literal["auto", "marks", "labels"] = "auto"
    """What a model answers questions with: a letter for each option, or the labels
    spelled out. ``"auto"``: as the template of its questions says."""
    decision_template: str | None = None
    """File with the words of questions, a Jinja template (see Decisions). None: the
    checkpoint's ``decision_template.jinja``, else the one of this package."""
    decision_joint: bool = False
    """Answer all questions of a request in one canvas, where each sees the others."""
    decision_calibration: str | None = None
    """File of ``dllm calibrate``, by which the answers to questions are corrected.
    None: they are the model's own."""
    trace: bool = False
    """Record for each forward pass which positions were unmasked and computed."""
    playground: bool = True
    """Serve the page ``/playground``."""
    fim_markers: bool = True
    """Read the markers that editors put around the text before and behind the cursor in
    the prompt of a completion. Turn it off for a model that is trained on them."""
    request_defaults: dict[str, Any] = {}
    """Request options for requests that do not set them."""

    def with_paper_settings(self, model: str, family: ModelFamily) -> "EngineOptions":
        """The options with the family's method in place of ``"auto"``, and with the
        settings of the method's paper for cache options that are not set. Raises
        ``ValueError`` like ``parse``, and for options that do not suit the family."""
        name = (
            DEFAULT_METHODS[family.attention]
            if self.cache_method == AUTO
            else self.cache_method
        )
        if name not in (suited := methods_for(family.attention)):
            reason = (
                "a position attends to the whole canvas"
                if family.attention == "full"
                else "attention goes by blocks, whose keys and values are final once their tokens are; the method "
                "approximates those of models that attend to the whole canvas"
            )
            raise ValueError(
                f"cache_method={name!r} does not suit {family.name}: {reason}; choose "
                f"{', '.join(suited)}"
            )
        if family.attention != "full":
            for option, ignored in {
                "share_prompts": False,
                "anchor_tokens": 0,
                "guide_model": None,
                "dense_attention": AUTO,
            }.items():
                if (value := getattr(self, option)) != ignored:
                    raise ValueError(
                        f"{option}={value!r}: attention of {family.name} goes by "
                        f"blocks, which it does not serve; leave {option} unset"
                    )
        chosen = {} if isinstance(self.cache_options, str) else self.cache_options
        _, settings = CACHE_METHODS[name].settings_for(model, family)
        options = self.parse(
            self.model_dump()
            | {"cache_method": name, "cache_options": {**settings, **chosen}}
        )
        options._check_sharing()
        return options

    def _check_sharing(self) -> None:
        """Raise ``ValueError`` if prompts cannot be shared."""
        if not self.share_prompts:
            if self.anchor_tokens:
                raise ValueError(
                    f"anchor_tokens={self.anchor_tokens} needs share_prompts=True; set "
                    f"it, or leave anchor_tokens unset"
                )
            return
        suited = [name for name in CACHE_METHODS if CACHE_METHODS[name].shares_prompts]
        if self.cache_method not in suited:
            raise ValueError(
                f"share_prompts=True is not supported with "
                f"cache_method={self.cache_method!r}; choose {', '.join(suited)}, or "
                f"leave share_prompts unset"
            )
        against = [
            f"{option}={value!r}"
            for option in ("guide_model", "batch_invariant")
            if (value := getattr(self, option))
        ]
        if self.cache.unshared is not None:
            against.append(self.cache.unshared)
        if against:
            raise ValueError(
                f"share_prompts=True is not supported with {', '.join(against)}; leave "
                f"one of them unset"
            )

    def num_sharable(self, layout: CanvasLayout, *, by_token: bool) -> int | None:
        """Number of prompt tokens that requests share, without the row that predicts
        the first token of the response. ``by_token``: all tokens, not only whole pages.
        """
        if not self.share_prompts:
            return None
        num_tokens = layout.prompt_length - layout.shifts_logits
        return num_tokens if by_token else num_tokens // self.page_size * self.page_size

    @property
    def num_anchor_pages(self) -> int:
        """Number of pages that hold ``anchor_tokens``."""
        return pages_for(self.anchor_tokens, self.page_size)

    def on_device(self, device_type: str, enforce_eager: bool) -> "EngineOptions":
        """The options with ``cuda_graphs`` decided. Raises ``ValueError`` if graphs are
        requested without a GPU.
        """
        if self.cuda_graphs and device_type != "cuda":
            raise ValueError(
                f"cuda_graphs=True needs a GPU, and the device is {device_type!r}; "
                f"leave it out"
            )
        default = device_type == "cuda" and not enforce_eager
        return self.model_copy(
            update={
                "cuda_graphs": default if self.cuda_graphs is None else self.cuda_graphs
            }
        )

    @field_validator("guide_model")
    @classmethod
    def _demo_guide(cls, value: str | None) -> str | None:
        return str(DEMO_GUIDE_DIR) if value == DEMO_MODEL else value

    @field_validator("cache_method")
    @classmethod
    def _known_method(cls, value: str) -> str:
        if value not in (AUTO, *CACHE_METHODS):
            raise ValueError(
                f"unknown cache method{choices(value, (AUTO, *CACHE_METHODS))}"
            )
        return value

    @classmethod
    def parse(cls, raw: dict[str, Any]) -> "EngineOptions":
        """Validate options. Raises ``ValueError`` naming the option, its value and what
        is allowed.
        """
        try:
            options = cls.model_validate(raw)
        except ValidationError as error:
            known = [name for name in cls.model_fields if name != "guide_shape"]
            raise ValueError(
                f"{explain(error, 'engine option', known)} (engine options: "
                f"{', '.join(known)})"
            ) from None
        _ = options.cache
        return options

    @property
    def _method_name(self) -> str:
        return (
            DEFAULT_METHODS["full"] if self.cache_method == AUTO else self.cache_method
        )

    @property
    def layer_pass(self) -> Any:
        """Import the class of the cache method's layer pass."""
        return CACHE_METHODS.function(self._method_name, self.method.layer_pass)

    @property
    def method(self) -> CacheMethod:
        method = CACHE_METHODS[self._method_name]
        # Keys and values that are computed among other rows differ in their last bits,
        # so nothing is shared or computed again.
        return replace(method, keeps_for_good=False) if self.batch_invariant else method

    @property
    def uses_pages(self) -> bool:
        return (
            self.method.pages is not None
            or self.guide_model is not None
            or self.share_prompts
        )

    @cached_property
    def cache(self) -> CacheOptions:
        """The validated options of the cache method."""
        schema = self.method.options
        try:
            return schema.model_validate(
                {} if self.cache_options == PAPER else self.cache_options
            )
        except ValidationError as error:
            known = schema.model_fields or ["none"]
            raise ValueError(
                f"cache_method={self.cache_method!r}: "
                f"{explain(error, 'cache option', known)}"
            ) from None

    @property
    def draft_lora(self) -> str | None:
        """Folder in the checkpoint with the adapter for drafts; None: there is none."""
        cache = self.cache
        return cache.draft_lora if isinstance(cache, DraftingOptions) else None

    @property
    def retention_ratio(self) -> float | None:
        """The largest share that a request may retain; None: nothing is evicted."""
        cache = self.cache
        return cache.retention_ratio if isinstance(cache, EvictingOptions) else None

    def geometry(self, hf_config: Any, tensor_parallel_size: int) -> PoolGeometry:
        def on_rank(num_kv_heads: int) -> int:
            # With more ranks than KV heads, each head is on several ranks.
            return max(1, num_kv_heads // tensor_parallel_size)

        guide = self.guide_shape
        return PoolGeometry(
            page_size=self.page_size,
            num_layers=hf_config.num_hidden_layers,
            num_heads=hf_config.num_attention_heads // tensor_parallel_size,
            num_kv_heads=on_rank(hf_config.num_key_value_heads),
            head_dim=head_dim_of(hf_config),
            hidden_size=hf_config.hidden_size,
            total_kv_heads=hf_config.num_key_value_heads,
            guide=guide
            and guide.model_copy(update={"num_kv_heads": on_rank(guide.num_kv_heads)}),
        )

    @classmethod
    def from_vllm_config(cls, vllm_config: Any) -> "EngineOptions":
        """The options in ``additional_config["dllm"]``."""
        additional = vllm_config.additional_config
        raw = additional.get(OPTIONS_KEY, {}) if isinstance(additional, dict) else {}
        if not isinstance(raw, dict):
            raise ValueError(
                f"additional_config[{OPTIONS_KEY!r}]={raw!r} must be a dictionary of "
                f"engine options"
            )
        return cls.parse(raw)
