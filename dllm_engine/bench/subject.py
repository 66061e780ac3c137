"""What is measured: a model, its prompts, its engines and its plain baseline."""

import random
from collections.abc import Iterable
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
from dllm_engine.memory.deployment import shares_tokenizer
from dllm_engine.memory.plan import bytes_of_page
from dllm_engine.memory.weights import DTYPE_BYTES, weight_bytes
from dllm_engine.model_executor.guide.sizes import guide_config, with_shape
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
class Lengths:
    """In tokens."""

    prompts: tuple[int, ...]
    response: int
    block: int | None
    """None: the model's default."""
    shared: int = 0
    """Tokens that the prompts of a batch begin with alike."""

    @property
    def longest(self) -> int:
        return max(self.prompts) + self.response


class Subject:
    """A model by its name: ``demo``, a checkpoint, or random weights of a named shape.

    Raises ``ValueError`` for a model that is unknown or too short for the lengths.
    """

    def __init__(
        self, model: str, dtype: str, lengths: Lengths, max_batch: int, engine_args: dict[str, Any], max_model_len: int
    ) -> None:
        self.model, self.lengths, self.max_batch = model, lengths, max_batch
        self.has_random_weights = is_named_shape(model)
        self.engine_args = engine_args
        self.config = config_of(model)
        self.guide = {name: engine_args[name] for name in GUIDE_SETTINGS if name in engine_args}
        if self.guide and self.has_random_weights:
            raise ValueError(f"model {model!r} has random weights, which agree with no guide; leave out --guide-model")
        self.family = family_of(self.config)
        # The last block of a response may end behind it.
        whole = (lengths.block or self.family.attention_block) if self.family.attention_block else 1
        self.max_model_len = max_model_len = -(-max_model_len // whole) * whole
        self.shape = decoder_shape(self.config)
        if lengths.shared and not self.has_random_weights:
            raise ValueError(
                f"--shared-prefix {lengths.shared}: prompts of {model!r} are questions; give random weights as --model"
            )
        own = str(getattr(self.config, "dtype", None) or "float32").removeprefix("torch.")
        self.dtype = own if dtype == "auto" else {"float": "float32", "half": "float16"}.get(dtype, dtype)
        most = self.config.max_position_embeddings
        if max_model_len > most:
            raise ValueError(
                f"prompt and response of {max_model_len} tokens: {model} has {most} positions; lower --prompt or "
                f"--response"
            )

    # Requests

    def params(self, unmasking: Unmasking) -> DiffusionParams:
        """Greedy; random weights ignore end tokens, which mean nothing there."""
        return DiffusionParams(
            gen_length=self.lengths.response,
            block_length=self.lengths.block,
            ignore_eos=self.has_random_weights,
            **unmasking.options,
        )

    def end_tokens(self, unmasking: Unmasking) -> frozenset[int]:
        return end_token_ids(self.params(unmasking), self.config)

    def options(self, method: str) -> EngineOptions:
        """As the engine fills them in."""
        options = EngineOptions(cache_method=method, request_defaults=checkpoint_defaults(self.config), **self.guide)
        options = options.with_paper_settings(self.model, self.family)
        if (guide := options.guide_model) is None:
            return options
        return with_shape(options, same_tokens=shares_tokenizer(guide, self.model))

    def spec(self, method: str, unmasking: Unmasking, prompt: int) -> DecodingSpec:
        return resolve_decoding(self.params(unmasking), prompt, self.family, self.options(method))

    def prompts(self, length: int, count: int, seed: int, tokenizer: Any) -> list[list[int]]:
        """Prompts of exactly ``length`` tokens: of random tokens for random weights, else a question about a few names
        behind filler.

        Raises:
            ValueError: the question alone is longer.
        """
        if self.has_random_weights:
            draw = torch.Generator().manual_seed(seed)
            # The last two are the end and mask tokens.
            tokens = torch.randint(self.shape.vocab_size - 2, (count, length), generator=draw)
            tokens[:, : self.lengths.shared] = tokens[0, : self.lengths.shared]
            found: list[list[int]] = tokens.tolist()
            return found
        examples = make_examples("names", count, seed, min_pairs=ASKED, max_pairs=ASKED, asked=ASKED)
        rng = random.Random(seed)
        return [_padded(example.prompt, length, rng, tokenizer) for example in examples]

    # Engines

    @property
    def weight_bytes(self) -> int:
        guide = self.options("none").guide_model
        models = [self.config] if guide is None else [self.config, guide_config(guide)]
        return sum(weight_bytes(config, 1, DTYPE_BYTES[self.dtype]) for config in models)

    def pool_bytes(self, method: str, unmaskings: Iterable[Unmasking]) -> int:
        """Of a pool in which the largest batch runs at once."""
        options = self.options(method)
        geometry = options.geometry(self.config, 1)
        demands = [
            options.method.page_demand(self.spec(method, unmasking, prompt), geometry)
            for unmasking in unmaskings
            for prompt in self.lengths.prompts
        ]
        pages = max(
            self.max_batch * max(demands), options.method.longest_demand(options.cache, geometry, self.max_model_len)
        )
        # vLLM keeps a page for itself.
        return (pages + 1) * bytes_of_page(geometry, DTYPE_BYTES[self.dtype])

    def start(self, method: str, unmaskings: Iterable[Unmasking]) -> "LLM":
        """An engine in this process that runs the largest batch at once."""
        from dllm_engine.llm import LLM

        settings: dict[str, Any] = {
            "cache_method": method,
            "dtype": self.dtype,
            "max_model_len": self.max_model_len,
            "max_num_seqs": self.max_batch,
            "max_num_batched_tokens": self.max_batch * self.max_model_len,
            "kv_cache_memory_bytes": self.pool_bytes(method, unmaskings),
            "use_tqdm_on_load": False,
        }
        if torch.cuda.is_available():
            # The pool's size is given; this only says how much must be free, beside the baseline.
            settings["gpu_memory_utilization"] = GPU_MEMORY_SHARE
        settings |= self.engine_args
        if self.has_random_weights:
            return random_engine(named_shape(self.model), **settings)
        return LLM(self.model, **settings)

    def plain(self, device: torch.device) -> PlainDecoder:
        """The baseline, with weights of its own: the engine's may be packed."""
        dtype = getattr(torch, self.dtype)
        if self.has_random_weights:
            return PlainDecoder.random(self.config, dtype, device)
        folder = Path(model_path(self.model))
        if not folder.is_dir():
            from huggingface_hub import snapshot_download

            folder = Path(snapshot_download(self.model, allow_patterns=["*.safetensors"], local_files_only=True))
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
