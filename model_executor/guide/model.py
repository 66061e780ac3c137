"""The autoregressive guide of Guided Diffusion (arXiv 2505.21467): checks a whole draft in one causal forward pass.

It runs through the diffusion models' own layers, and its keys and values live in pages of the same pool. A page has as
many bytes as one of the diffusion model's and holds as many of the guide's tokens as fit.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, TypeVar

import numpy as np
import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import get_tensor_model_parallel_world_size, get_tp_group, tensor_model_parallel_all_reduce
from vllm.logger import init_logger
from vllm.model_executor.model_loader import get_model_loader
from vllm.model_executor.model_loader.reload import record_metadata_for_reloading
from vllm.model_executor.model_loader.reload.inplace import reload_weights
from vllm.model_executor.model_loader.utils import process_weights_after_loading
from vllm.utils.torch_utils import set_default_torch_dtype

from dllm_engine.model_executor.batch_tables import TokenTables
from dllm_engine.model_executor.guide.text import GuideReader, Reading
from dllm_engine.model_executor.loading.checkpoint import check_safetensors
from dllm_engine.model_executor.models.decoder import DiffusionDecoder, VocabularyShard
from dllm_engine.model_executor.page_memory import PageMemory, PageView
from dllm_engine.model_executor.passes.base import LayerPass, attend_pages
from dllm_engine.model_executor.step_batch import Canvas, RowBounds, StepBatch
from dllm_engine.model_executor.token_prediction import head_chunks
from dllm_engine.model_executor.transfer import gather_from_ranks, on_device
from dllm_engine.options import EngineOptions
from dllm_engine.scheduler.messages import RequestFailure, failure_of
from dllm_engine.scheduler.page_layout import PageKind
from dllm_engine.scheduler.request import Span

logger = init_logger(f"vllm.{__name__}")
_Result = TypeVar("_Result")


@dataclass(frozen=True)
class Draft:
    """Proposal of the diffusion model for the leftmost masked positions of a block."""

    request_id: str
    canvas: Canvas
    positions: torch.Tensor
    """``[num_drafted]``, ascending; no masked position lies left of or between them."""
    tokens: torch.Tensor
    """``[num_drafted]``"""


@dataclass(frozen=True)
class Verdict:
    """Judgement of a draft by the guide; lists of ``num_drafted``, in the diffusion model's tokens."""

    drafted: list[int]
    ranks: list[int]
    """Tokens that the guide prefers to the drafted one (among equals, those with lower ids). If the guide reads the
    drafted token as several tokens, the largest of their numbers."""
    tokens: list[int]
    """The guide's own tokens."""


@dataclass(frozen=True)
class _Question:
    """A draft as the guide reads it."""

    canvas: Canvas
    drafted: list[int]
    reading: Reading
    judged: list[int]
    """Guide tokens to judge, ascending."""


class CausalPass(LayerPass):
    """K/V go to pages by position, and a row attends to all tokens up to itself."""

    def __init__(self, batch: StepBatch, pages: PageView, head_len: list[int]) -> None:
        self.pages = pages
        self.tables = TokenTables(batch, pages, head_len, PageKind.GUIDE)
        # Token t of a table is the guide's token t.
        limits = (batch.positions + 1).int()
        self.row_bounds = RowBounds(np.diff(batch.cu_seqlens).tolist(), limits.device, limits)

    def attend(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        self.pages.write(k, v, self.tables.row_slots(layer))
        return attend_pages(self.tables.paged_tokens(layer), q, k, v, self.row_bounds, attend_fresh=False)


class Guide:
    """A loaded guide."""

    def __init__(self, hf_config: Any, reader: GuideReader, vllm_config: VllmConfig, device: torch.device) -> None:
        """Load the engine's ``guide_model``, of configuration ``hf_config``."""
        options = EngineOptions.from_vllm_config(vllm_config)
        assert options.guide_model is not None
        assert options.guide_shape is not None
        dtype = vllm_config.model_config.dtype
        with set_current_vllm_config(vllm_config), set_default_torch_dtype(dtype), device:
            longest = options.guide_shape.num_tokens(vllm_config.model_config.max_model_len)
            model = DiffusionDecoder(vllm_config=vllm_config, hf_config=hf_config, max_positions=longest)
            record_metadata_for_reloading(model)
        # vLLM's loader asks the model's config where the weights are.
        source = copy.copy(vllm_config.model_config)
        source.model, source.revision, source.hf_config = options.guide_model, None, hf_config
        if vllm_config.load_config.load_format != "dummy":
            check_safetensors(options.guide_model)
        self._source = copy.copy(vllm_config)
        self._source.model_config = source
        get_model_loader(vllm_config.load_config).load_weights(model, source)
        process_weights_after_loading(model, vllm_config.model_config, device)
        self.model = model.eval()
        self.device = device
        self.reader = reader
        self.shape = options.guide_shape
        self.pages: PageView | None = None

    def reload_weights(self) -> None:
        """Read the weights from the checkpoint again."""
        reload_weights(self._source, self.model, None, None, is_checkpoint_format=True)

    def attach(self, memory: PageMemory) -> None:
        """Take pages from ``memory`` from now on."""
        self.pages = memory.view_for(self.model.num_kv_heads, self.model.shape.head_dim)

    def check(self, drafts: list[Draft]) -> list[Verdict | RequestFailure]:
        """Judge drafts, each in its canvas with the drafted tokens in place; one causal forward pass for all.

        Feeds what the pages do not hold yet, and at least the row before the first token to be judged. Tokens that the
        guide cannot read, or that its pages have no room for, it ranks behind all others.
        """
        asked = [_or_failure(draft.request_id, self._read, draft) for draft in drafts]
        asking = [question for question in asked if isinstance(question, _Question) and question.judged]
        judged = iter(self._ask(asking) if asking else ())
        return [
            question
            if isinstance(question, RequestFailure)
            else _or_failure(draft.request_id, self._verdict, question, next(judged) if question.judged else {})
            for draft, question in zip(drafts, asked, strict=True)
        ]

    def profile_run(self, num_rows: int) -> None:
        """Judge as many of ``num_rows`` tokens as are judged at once, for vLLM to measure the memory."""
        chunk = self._chunks(num_rows)[0]
        drafted = torch.zeros(num_rows, dtype=torch.int64, device=self.device)[chunk]
        dtype = self._source.model_config.dtype
        self._judge(torch.zeros(len(drafted), self.model.shape.hidden_size, dtype=dtype, device=self.device), drafted)

    def _chunks(self, num_rows: int) -> list[slice]:
        return head_chunks(num_rows, self.model.shape.vocab_size, self.device)

    def _read(self, draft: Draft) -> _Question:
        positions, tokens = draft.positions.tolist(), draft.tokens.tolist()
        text = draft.canvas.tokens[: positions[-1] + 1].tolist()
        for position, token in zip(positions, tokens, strict=True):
            text[position] = token
        reading = self.reader.read(text, positions)
        room = self.shape.num_tokens(draft.canvas.spec.canvas_length - 1)
        # Token t is judged by row t - 1, so that t of them are kept in pages.
        judged = sorted({t for span in reading.spelling for t in range(*span) if t > 0})
        if judged and judged[-1] > room:
            logger.warning_once(
                "guide_tokens_per_token=%s: a text takes more tokens of the guide than that reserves pages for; drafts "
                "beyond are unmasked unchecked, one a step. Start the engine with a larger one.",
                self.shape.tokens_per_token,
            )
        return _Question(draft.canvas, tokens, reading, [t for t in judged if t <= room])

    def _ask(self, questions: list[_Question]) -> list[dict[int, tuple[int, int]]]:
        """Per question the rank and the guide's own token of each token to be judged, by the token's index; a rank of
        −1 where the guide's logits are not finite."""
        assert self.pages is not None
        device = self.pages.keys.device
        spans = []
        for question in questions:
            known, text = question.canvas.guide_text, question.reading.tokens
            kept = next((i for i, pair in enumerate(zip(known, text, strict=False)) if pair[0] != pair[1]), len(known))
            spans.append(Span(min(kept, question.judged[0] - 1), question.judged[-1]))
            question.canvas.guide_text = text[: question.judged[-1]]
        bounds = list(accumulate((span.size for span in spans), initial=0))
        fed = [token for q, span in zip(questions, spans, strict=True) for token in q.reading.tokens[slice(*span)]]
        positions = np.concatenate([np.arange(*span) for span in spans])
        batch = StepBatch(
            request_ids=[],
            plans=[],
            canvases=[question.canvas for question in questions],
            cu_seqlens=bounds,
            positions=on_device(positions, device),
            host_positions=positions,
            places=on_device([], device),
        )
        layer_pass = CausalPass(batch, self.pages, [span.stop for span in spans])
        hidden = self.model(on_device(fed, device), batch.positions, layer_pass)
        rows = [t - 1 - span.start + b for q, span, b in zip(questions, spans, bounds, strict=False) for t in q.judged]
        tokens = [q.reading.tokens[t] for q in questions for t in q.judged]
        hidden, drafted = hidden[on_device(rows, device)], on_device(tokens, device)
        chunks = [self._judge(hidden[chunk], drafted[chunk]) for chunk in self._chunks(len(rows))]
        ranks, own = (torch.cat(parts) for parts in zip(*chunks, strict=True))
        answers = zip(ranks.tolist(), own.tolist(), strict=True)
        return [{t: next(answers) for t in question.judged} for question in questions]

    def _verdict(self, question: _Question, answers: dict[int, tuple[int, int]]) -> Verdict | RequestFailure:
        """``answers``: as of ``_ask``."""
        if any(rank < 0 for rank, _ in answers.values()):
            return RequestFailure("not_finite", "the guide model produced logits that are NaN or infinite")
        ranks, tokens = [], []
        for index, (draft, span) in enumerate(zip(question.drafted, question.reading.spelling, strict=True)):
            read = range(*span)
            if read and answers.keys() >= set(read):
                ranks.append(max(answers[t][0] for t in read))
                tokens.append(self.reader.answer(question.reading, index, draft, [answers[t][1] for t in read]))
            else:
                ranks.append(self.model.shape.vocab_size)
                tokens.append(draft)
        return Verdict(question.drafted, ranks, tokens)

    def _judge(self, hidden: torch.Tensor, drafted: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Ranks of the drafted tokens and the guide's own, ``[num_rows]`` each."""
        shard: VocabularyShard = self.model.compute_logits(hidden)
        logits, first = shard.logits.float(), shard.first_token
        size = logits.shape[1]
        for token in self.reader.never_said:
            if 0 <= token - first < size:
                logits[:, token - first] = -torch.inf
        best, tokens = logits.max(dim=1)
        tokens = tokens + first
        finite = best < torch.inf
        local = drafted - first
        here = (local >= 0) & (local < size)
        scores = logits.gather(1, local.clamp(0, size - 1)[:, None])[:, 0].masked_fill(~here, 0)
        ids = torch.arange(first, first + size, device=logits.device)
        known = drafted < self.model.shape.vocab_size
        sharded = get_tensor_model_parallel_world_size() > 1
        if sharded:
            scores = tensor_model_parallel_all_reduce(scores)
            bests = gather_from_ranks(best, get_tp_group())
            winner, finite = bests.argmax(dim=0, keepdim=True), (bests < torch.inf).all(dim=0)
            tokens = gather_from_ranks(tokens, get_tp_group()).gather(0, winner)[0]
        ahead = (logits > scores[:, None]) | ((logits == scores[:, None]) & (ids < drafted[:, None]))
        ranks = ahead.sum(dim=1)
        if sharded:
            ranks = gather_from_ranks(ranks, get_tp_group()).sum(dim=0)
        # A token that the guide does not have comes after all that it has.
        return ranks.masked_fill(~known, self.model.shape.vocab_size).masked_fill(~finite, -1), tokens


def _or_failure(request_id: str, work: Callable[..., _Result], *arguments: Any) -> _Result | RequestFailure:
    """Result of ``work``, or the failure of the request for which it raises an error."""
    try:
        return work(*arguments)
    except Exception as error:
        return failure_of(request_id, error)
