"""The search of ``dllm tune``: it varies one factor after the other of the fastest
setting so far that loses at most the allowed score against plain decoding. Each setting
is a row of a comparison."""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from statistics import NormalDist
from typing import Any

from dllm_engine.cache_methods import CACHE_METHODS, methods_for
from dllm_engine.checkpoints import load_config
from dllm_engine.decoding.unmasking_policies import PARALLEL_RULES
from dllm_engine.evaluation.comparison import (
    Combination,
    Comparison,
    Row,
    Task,
    mean_and_error,
)
from dllm_engine.options import EngineOptions
from dllm_engine.request_options.fields import COUNT_OPTIONS
from dllm_engine.request_options.unmasking import PARALLEL_OPTIONS
from dllm_engine.text import assignments, method_text

Options = dict[str, Any]
FACTORS = (
    "rule",
    "block_add_threshold",
    "block_length",
    "cache_method",
    "cache_options",
    "share_prompts",
    "rule",
)
"""Parts of a setting in search order. The rule comes again, because a cache changes
which rules lose too much.
"""
_TUNED = {name: PARALLEL_RULES[name].tuned for name in PARALLEL_OPTIONS}
_MOST_TUNED = max(map(len, _TUNED.values()))
RULES: Sequence[Options] = [
    {name: values[rank]}
    for rank in range(_MOST_TUNED)
    for name, values in _TUNED.items()
    if rank < len(values)
]
"""The most careful value of every rule, then the next ones, so that a short search
tries each rule.
"""
WINDOWS = (0.75, 0.5, 0.1, 0.0)
"""Values of ``block_add_threshold``."""
BLOCK_LENGTHS = (1 / 8, 1 / 4, 1 / 2, 2, 4)
"""Multiples of the default block length."""
SHORTEST_BLOCK = 4


@dataclass(frozen=True)
class Setting:
    """Settings to run a model. The defaults are plain decoding: no cache, one token per
    pass, one block at a time.
    """

    cache_method: str = "none"
    cache_options: Options = field(default_factory=dict)
    """Cache options that differ from the paper's."""
    decoding: Options = field(default_factory=dict)
    share_prompts: bool = False

    @property
    def engine(self) -> Options:
        cache = {"cache_method": self.cache_method, "cache_options": self.cache_options}
        return cache | self.sharing

    @property
    def sharing(self) -> Options:
        """``share_prompts``, if it is not the default."""
        return {"share_prompts": True} if self.share_prompts else {}

    def combination(self, engine: Options, decoding: Options) -> Combination:
        """The combination of this setting and the arguments of ``LLM`` and
        ``DiffusionParams`` that all settings share.
        """
        method = method_text(self.cache_method, self.cache_options | self.sharing)
        unmasking = assignments(self.decoding) or "one"
        return Combination(
            method, unmasking, engine | self.engine, decoding | self.decoding
        )


PLAIN = Setting()


@dataclass(frozen=True)
class Space:
    """The values to try for each factor."""

    methods: dict[str, list[Options]]
    """Cache methods with the options to try beside the paper's."""
    rules: Sequence[Options]
    windows: Sequence[float] = ()
    block_lengths: Sequence[int] = ()
    shares: bool = False
    """True to try ``share_prompts`` with the methods that support it."""

    def varied(self, setting: Setting, factor: str) -> list[Setting]:
        """Settings with another value of a factor."""
        decoding = setting.decoding
        without_rule = {
            k: value
            for k, value in decoding.items()
            if k not in (*COUNT_OPTIONS, *PARALLEL_OPTIONS)
        }
        # A fixed count allows only one block.
        windows = self.windows if decoding.keys() & {*PARALLEL_OPTIONS} else ()
        tried: dict[str, list[dict[str, Any]]] = {
            "rule": [{"decoding": rule | without_rule} for rule in self.rules],
            "block_length": [
                {"decoding": decoding | {factor: length}}
                for length in self.block_lengths
            ],
            "block_add_threshold": [
                {"decoding": decoding | {factor: threshold}} for threshold in windows
            ],
            "cache_method": [
                {"cache_method": name, "cache_options": {}} for name in self.methods
            ],
            "cache_options": [
                {"cache_options": options}
                for options in self.methods.get(setting.cache_method, ())
            ],
            "share_prompts": [{"share_prompts": True}]
            if self.shares and CACHE_METHODS[setting.cache_method].shares_prompts
            else [],
        }
        others = (replace(setting, **changes) for changes in tried[factor])
        return [other for other in others if other != setting]


def space_of(
    model: str,
    methods: Sequence[str] | None,
    rules: Sequence[Options],
    decoding: Options,
    *,
    begin_alike: bool = False,
) -> Space:
    """The search space for a model. ``decoding``: options of all requests;
    ``begin_alike``: True if prompts have a common beginning; ``methods`` None: all
    cache methods that suit the model. With attention by blocks, blocks keep their
    length and run one at a time."""
    from dllm_engine.request_options.defaults import checkpoint_defaults
    from dllm_engine.request_options.sampling_params import DEFAULT_GEN_LENGTH

    config = load_config(model)
    family = config.family
    options = {}
    for method in methods or methods_for(family.attention):
        model_default = (
            EngineOptions.parse({"cache_method": method})
            .with_paper_settings(model, family)
            .cache
        )
        tuned = CACHE_METHODS[method].options.tuned.items()
        options[method] = [
            {name: v}
            for name, values in tuned
            for v in values
            if v != getattr(model_default, name)
        ]
    if family.attention_block is not None:
        return Space(options, rules)
    defaults = checkpoint_defaults(config) | decoding
    longest = defaults.get("gen_length") or DEFAULT_GEN_LENGTH
    default = min(
        defaults.get("block_length") or family.block_length_of(longest), longest
    )
    lengths = sorted({int(default * ratio) for ratio in BLOCK_LENGTHS} - {default})
    lengths = [n for n in lengths if SHORTEST_BLOCK <= n <= longest]
    return Space(options, rules, WINDOWS, lengths, begin_alike)


@dataclass
class Search:
    """Search for the fastest setting within a loss. ``comparison`` gets a row per
    setting.
    """

    comparison: Comparison
    task: Task
    space: Space
    engine: Options
    """Engine options that all settings share."""
    decoding: Options
    limit: float
    """The largest allowed loss of the score."""
    rows: list[tuple[Setting, Row]] = field(default_factory=list)

    def run(self, budget: float) -> None:
        """Search for this number of seconds. A row that is running then is finished."""
        deadline = time.monotonic() + budget
        self._measure([PLAIN], math.inf)
        for factor in FACTORS:
            self._measure(self.space.varied(self.best[0], factor), deadline)

    def _measure(self, settings: Sequence[Setting], deadline: float) -> None:
        combinations = [
            setting.combination(self.engine, self.decoding) for setting in settings
        ]
        self.rows += zip(
            settings, self.comparison.add(combinations, [self.task]), strict=True
        )
        self.comparison.run(deadline)

    @property
    def plain(self) -> Row:
        """The row of plain decoding."""
        return self.rows[0][1]

    @property
    def best(self) -> tuple[Setting, Row]:
        """The fastest setting whose measured loss is allowed. Plain decoding has no
        loss.
        """
        allowed = [
            (setting, row)
            for setting, row in self.rows
            if self.plain.result.score - row.result.score <= self.limit
        ]
        return max(allowed, key=lambda pair: pair[1].cost.tokens_per_second)

    def figures(self) -> dict[str, float]:
        """The loss of the best setting with its 90 % interval, and the speeds."""
        best, plain = self.best[1], self.plain
        lowest, highest = loss_interval(
            plain.result.details["scores"], best.result.details["scores"]
        )
        return {
            "loss": plain.result.score - best.result.score,
            "loss_lowest": lowest,
            "loss_highest": highest,
            "examples": best.cost.requests,
            "tokens_per_second": best.cost.tokens_per_second,
            "plain_tokens_per_second": plain.cost.tokens_per_second,
        }


def loss_interval(
    plain: Sequence[float], scores: Sequence[float]
) -> tuple[float, float]:
    """90 % confidence interval of the mean loss against plain decoding on the same
    examples, with one lost and one won example added. For answers that are right or
    wrong this is the adjusted Wald interval of Bonett and Price (2012, Journal of
    Educational and Behavioral Statistics 37), which also holds for few examples, and if
    no example differs."""
    differences = [a - b for a, b in zip(plain, scores, strict=True)]
    centre, error = mean_and_error([*differences, 1.0, -1.0])
    bound = NormalDist().inv_cdf(0.95) * error
    return centre - bound, centre + bound
