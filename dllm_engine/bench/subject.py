"""What is measured: a model, its prompts, its engines and its plain baseline."""

import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from dllm_engine.batch.files import BatchRequest
from dllm_engine.bench.plain import PlainDecoder, decoder_shape
from dllm_engine.bench.random_model import config_of, is_named_shape, named_shape, random_engine
from dllm_engine.demo import model_path
from dllm_engine.demo.tasks import filler_sentences, make_examples
from dllm_engine.families import family_of
from dllm_engine.memory.plan import bytes_of_page, models_of, shares_tokenizer
from dllm_engine.memory.weights import DTYPE_BYTES, weights_of_models
from dllm_engine.model_executor.guide.sizes import with_shape
from dllm_engine.options import GUIDE_SETTINGS, EngineOptions
from dllm_engine.params import DiffusionParams
from dllm_engine.scheduler.options.resolve import checkpoint_defaults, end_token_ids, resolve_decoding
from dllm_engine.scheduler.request import DecodingSpec

if TYPE_CHECKING:
    from dllm_engine.llm import LLM

GPU_MEMORY_SHARE = 0.5
ASKED = 2
"""Items that each prompt of a model with a tokenizer asks for, so that answers are equally long."""


@dataclass(frozen=True)
class Unmasking:
    """A way of unmasking, as the command line names it."""

    text: str
    options: dict[str, Any] = field(hash=False)
    """Fields of ``DiffusionParams``."""

    @property
    def has_baseline(self) -> bool:
        """Whether the plain model can decode so: it has no guide."""
        return not self.options.get("guided")


@dataclass(frozen=True)
class BenchSettings:
    """What is measured of one model. Lengths are in tokens."""

    model: str
    methods: tuple[str, ...]
    unmaskings: tuple[Unmasking, ...]
    batches: tuple[int, ...]
    prompts: tuple[int, ...]
    response: int
    repeats: int
    seed: int
    block_length: int | None = None
    """None: the model's default."""
    shared_prefix: int = 0
    """Tokens that the prompts of a batch begin with alike."""
    dtype: str = "auto"
    max_model_len: int | None = None
    """None: what the lengths need."""
    baseline: bool = True
    engine_args: dict[str, Any] = field(default_factory=dict)


class Subject:
    """A model by its name: ``demo``, a checkpoint, or random weights of a named shape.

    Raises ``ValueError`` for a model that is unknown or too short for the lengths.
    """

    def __init__(self, settings: BenchSettings) -> None:
        self.settings = s = settings
        self.has_random_weights = is_named_shape(s.model)
        self.config = config_of(s.model)
        self.guide = {name: s.engine_args[name] for name in GUIDE_SETTINGS if name in s.engine_args}
        if self.guide and self.has_random_weights:
            raise ValueError(
                f"model {s.model!r} has random weights, which agree with no guide; leave out --guide-model"
            )
        self.family = family_of(self.config)
        # The last block of a response may end behind it.
        whole = (s.block_length or self.family.attention_block) if self.family.attention_block else 1
        longest = max(max(s.prompts) + s.response, s.max_model_len or 0)
        self.max_model_len = -(-longest // whole) * whole
        self.shape = decoder_shape(self.config)
        if s.shared_prefix and not self.has_random_weights:
            raise ValueError(
                f"--shared-prefix {s.shared_prefix}: prompts of {s.model!r} are questions; give random weights as "
                f"--model"
            )
        own = str(getattr(self.config, "dtype", None) or "float32").removeprefix("torch.")
        self.dtype = own if s.dtype == "auto" else {"float": "float32", "half": "float16"}.get(s.dtype, s.dtype)
        most = self.config.max_position_embeddings
        if self.max_model_len > most:
            raise ValueError(
                f"prompt and response of {self.max_model_len} tokens: {s.model} has {most} positions; lower --prompt "
                f"or --response"
            )

    # Requests

    def params(self, unmasking: Unmasking) -> DiffusionParams:
        """Greedy; random weights ignore end tokens, which mean nothing there."""
        return DiffusionParams(
            gen_length=self.settings.response,
            block_length=self.settings.block_length,
            ignore_eos=self.has_random_weights,
            **unmasking.options,
        )

    def end_tokens(self, unmasking: Unmasking) -> frozenset[int]:
        return end_token_ids(self.params(unmasking), self.config)

    def options(self, method: str) -> EngineOptions:
        """As the engine fills them in."""
        options = EngineOptions(cache_method=method, request_defaults=checkpoint_defaults(self.config), **self.guide)
        options = options.with_paper_settings(self.settings.model, self.family)
        if (guide := options.guide_model) is None:
            return options
        return with_shape(options, same_tokens=shares_tokenizer(guide, self.settings.model))

    def spec(self, method: str, unmasking: Unmasking, prompt: int) -> DecodingSpec:
        return resolve_decoding(self.params(unmasking), prompt, self.family, self.options(method))

    def prompts(self, length: int, tokenizer: Any) -> list[list[int]]:
        """Prompts of exactly ``length`` tokens for the largest batch: of random tokens for random weights, else a
        question about a few names behind filler.

        Raises:
            ValueError: the question alone is longer.
        """
        count, seed = max(self.settings.batches), self.settings.seed
        if self.has_random_weights:
            draw = torch.Generator().manual_seed(seed)
            # The last two are the end and mask tokens.
            tokens = torch.randint(self.shape.vocab_size - 2, (count, length), generator=draw)
            tokens[:, : self.settings.shared_prefix] = tokens[0, : self.settings.shared_prefix]
            found: list[list[int]] = tokens.tolist()
            return found
        examples = make_examples("names", count, seed, min_pairs=ASKED, max_pairs=ASKED, asked=ASKED)
        rng = random.Random(seed)
        return [_padded(example.prompt, length, rng, tokenizer) for example in examples]

    # Engines

    @property
    def weight_bytes(self) -> int:
        models = models_of(self.config, self.options("none"))
        return sum(weights_of_models(models, 1, DTYPE_BYTES[self.dtype], None))

    def pool_bytes(self, method: str) -> int:
        """Of a pool in which the largest batch runs at once."""
        s, options = self.settings, self.options(method)
        geometry = options.geometry(self.config, 1)
        demands = [
            options.method.page_demand(self.spec(method, unmasking, prompt), geometry)
            for unmasking in s.unmaskings
            for prompt in s.prompts
        ]
        longest = options.method.longest_demand(options.cache, geometry, self.max_model_len)
        pages = max(max(s.batches) * max(demands), longest)
        # vLLM keeps a page for itself.
        return (pages + 1) * bytes_of_page(geometry, DTYPE_BYTES[self.dtype])

    def start(self, method: str) -> "LLM":
        """An engine in this process that runs the largest batch at once."""
        from dllm_engine.llm import LLM

        model, batch = self.settings.model, max(self.settings.batches)
        settings: dict[str, Any] = {
            "cache_method": method,
            "dtype": self.dtype,
            "max_model_len": self.max_model_len,
            "max_num_seqs": batch,
            "max_num_batched_tokens": batch * self.max_model_len,
            "kv_cache_memory_bytes": self.pool_bytes(method),
            "use_tqdm_on_load": False,
        }
        if torch.cuda.is_available():
            # The pool's size is given; this only says how much must be free, beside the baseline.
            settings["gpu_memory_utilization"] = GPU_MEMORY_SHARE
        settings |= self.settings.engine_args
        return random_engine(named_shape(model), **settings) if self.has_random_weights else LLM(model, **settings)

    def plain(self, device: torch.device) -> PlainDecoder:
        """The baseline, with weights of its own: the engine's may be packed."""
        dtype = getattr(torch, self.dtype)
        if self.has_random_weights:
            return PlainDecoder.random(self.config, dtype, device)
        model = self.settings.model
        folder = Path(model_path(model))
        if not folder.is_dir():
            from huggingface_hub import snapshot_download

            folder = Path(snapshot_download(model, allow_patterns=["*.safetensors"], local_files_only=True))
        return PlainDecoder.from_checkpoint(folder, self.config, dtype, device)


def _padded(question: str, length: int, rng: random.Random, tokenizer: Any) -> list[int]:
    """The question as a chat's only message, with filler before it, cut at the filler's start to the wanted length."""
    bare = BatchRequest(prompt=question).prompt_tokens(tokenizer)
    if len(bare) > length:
        raise ValueError(f"a prompt of {length} tokens is too short for a question of {len(bare)}; raise --prompt")
    # As many words as tokens are wanted are more than enough: no tokenizer joins words.
    filler = " ".join(filler_sentences(rng, length))
    tokens = BatchRequest(prompt=f"{filler} {question}").prompt_tokens(tokenizer)
    # What the template puts before a message.
    start = next((i for i, (a, b) in enumerate(zip(tokens, bare, strict=False)) if a != b), len(bare))
    return tokens[:start] + tokens[start + len(tokens) - length :]
