"""Settings, and the space of them that is searched: cache method, its options, unmasking, blocks."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from dllm_engine.families import ModelFamily
from dllm_engine.options import EngineOptions
from dllm_engine.scheduler.methods import CACHE_METHODS
from dllm_engine.scheduler.unmasking import PARALLEL_RULES

Factor = Literal["rule", "window", "block_length", "cache_method", "cache_options"]
"""What settings may differ in."""
RULES: tuple[tuple[str, float], ...] = tuple(
    (name, value) for name, rule in PARALLEL_RULES.items() for value in rule.tuned
)
WINDOWS = (0.75, 0.5, 0.1, 0.0)
"""Values of ``block_add_threshold``."""
BLOCK_LENGTHS = (1 / 8, 1 / 4, 1 / 2, 2, 4)
"""Of the default block length."""
SHORTEST_BLOCK = 4


@dataclass(frozen=True)
class Setting:
    """How a model is run. The defaults are plain decoding: no cache, a token per pass, one block at a time."""

    cache_method: str = "none"
    cache_options: tuple[tuple[str, Any], ...] = ()
    """Those that differ from the paper's."""
    rule: tuple[str, float] | None = None
    """Request option and value; None: a token per pass."""
    block_add_threshold: float | None = None
    block_length: int | None = None
    """None: the default of the checkpoint, or of the paper whose task is asked."""

    @property
    def engine(self) -> dict[str, Any]:
        """Engine options."""
        return {"cache_method": self.cache_method, "cache_options": dict(self.cache_options)}

    @property
    def decoding(self) -> dict[str, Any]:
        """Request options."""
        options = {"block_length": self.block_length, "block_add_threshold": self.block_add_threshold}
        rule = {} if self.rule is None else dict([self.rule])
        return rule | {name: value for name, value in options.items() if value is not None}

    def to_json(self) -> dict[str, Any]:
        """As ``from_json`` reads it."""
        return {"engine": self.engine, "decoding": self.decoding}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> "Setting":
        """Raises ``KeyError`` or ``TypeError`` for what ``to_json`` did not make."""
        engine, decoding = value["engine"], dict(value["decoding"])
        block_length, window = decoding.pop("block_length", None), decoding.pop("block_add_threshold", None)
        options = tuple(engine["cache_options"].items())
        return cls(engine["cache_method"], options, next(iter(decoding.items()), None), window, block_length)

    def __str__(self) -> str:
        options = [f"{name}={value}" for name, value in (*self.cache_options, *self.decoding.items())]
        return " ".join([self.cache_method, *options])


PLAIN = Setting()


@dataclass(frozen=True)
class Space:
    """The values of each factor that are tried."""

    methods: dict[str, list[tuple[tuple[str, Any], ...]]]
    """Cache methods with the options to try beside the paper's."""
    rules: Sequence[tuple[str, float]]
    windows: Sequence[float]
    block_lengths: Sequence[int]
    """Beside the default."""

    @classmethod
    def of_model(
        cls,
        model: str,
        family: ModelFamily,
        methods: Sequence[str],
        default_block: int,
        longest_block: int,
        rules: Sequence[tuple[str, float]] = RULES,
    ) -> "Space":
        """The space for a model whose blocks have ``default_block`` tokens; ``longest_block`` is a whole response.

        Where attention goes by blocks they keep their length, and run one at a time.

        Raises ``ValueError`` for an unknown cache method.
        """
        is_free = family.attention_block is None
        lengths = sorted({int(default_block * ratio) for ratio in BLOCK_LENGTHS if is_free} - {default_block})
        return cls(
            methods={method: list(_variants(method, model, family)) for method in methods},
            rules=rules,
            windows=WINDOWS if is_free else (),
            block_lengths=[length for length in lengths if SHORTEST_BLOCK <= length <= longest_block],
        )

    def varied(self, setting: Setting, factor: Factor) -> list[Setting]:
        """The settings that differ from one in a factor alone."""
        # Several blocks at once need a rule, because they have no fixed count of tokens.
        windows = (None, *self.windows) if setting.rule is not None and setting.rule[0] in PARALLEL_RULES else ()
        changes: dict[Factor, list[dict[str, Any]]] = {
            "rule": [{"rule": rule} for rule in self.rules],
            "window": [{"block_add_threshold": window} for window in windows],
            "block_length": [{"block_length": length} for length in (None, *self.block_lengths)],
            "cache_method": [{"cache_method": method, "cache_options": ()} for method in self.methods],
            "cache_options": [{"cache_options": o} for o in ((), *self.methods.get(setting.cache_method, ()))],
        }
        made = dict.fromkeys(replace(setting, **change) for change in changes[factor])
        return [other for other in made if other != setting]


def _variants(method: str, model: str, family: ModelFamily) -> Iterator[tuple[tuple[str, Any], ...]]:
    """Cache options that differ in one value from the paper's for the model."""
    own = EngineOptions.parse({"cache_method": method}).with_paper_settings(model, family).cache
    for name, values in CACHE_METHODS[method].tuned.items():
        yield from (((name, value),) for value in values if value != getattr(own, name))
