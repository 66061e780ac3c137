"""The autoregressive guide of Guided Diffusion (arXiv 2505.21467): checks a whole draft
in one causal forward pass.

It uses the same layers as diffusion models, and its keys and values are in pages of the
same pool. Pages have a fixed size in bytes, and hold as many of the guide's tokens as
fit.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import get_tp_group
from vllm.logger import init_logger
from vllm.model_executor.model_loader import get_model_loader
from vllm.model_executor.model_loader.reload import record_metadata_for_reloading
from vllm.model_executor.model_loader.utils import process_weights_after_loading
from vllm.utils.torch_utils import set_default_torch_dtype

from dllm_engine.decoding.canvas_layout import Span
from dllm_engine.decoding.messages import Failures, RequestFailure
from dllm_engine.decoding.page_layout import PageKind
from dllm_engine.model_executor.batch_tables import TokenTables
from dllm_engine.model_executor.canvas_store import Canvas
from dllm_engine.model_executor.failures import failure_of
from dllm_engine.model_executor.guide.sizes import guide_config
from dllm_engine.model_executor.guide.text import (
    GuideReader,
    Reading,
    Retokenizer,
    SameTokens,
)
from dllm_engine.model_executor.head_chunks import head_chunks
from dllm_engine.model_executor.loading.files import check_safetensors
from dllm_engine.model_executor.loading.parameters import files_named
from dllm_engine.model_executor.models.decoder import DiffusionDecoder
from dllm_engine.model_executor.page_memory import PageView
from dllm_engine.model_executor.passes.paged import PagedPass
from dllm_engine.model_executor.step_batch import StepBatch
from dllm_engine.model_executor.transfer import gather_shards, on_device
from dllm_engine.options import EngineOptions

logger = init_logger(f"vllm.{__name__}")


@dataclass
class Draft:
    """Proposal of the diffusion model for the leftmost masked positions of a block, and
    the guide's judgement.
    """

    index: int
    """Index of the request in the batch."""
    request_id: str
    canvas: Canvas
    positions: list[int]
    """Canvas positions, ascending. All other masked positions of the block lie behind
    them.
    """
    tokens: list[int]
    probabilities: list[float]
    """Probabilities of ``tokens``, by the diffusion model."""
    reading: Reading = field(init=False)
    judged: list[int] = field(init=False)
    """Guide tokens to judge, ascending."""
    answers: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Rank of each judged token, and the guide's own token in its place. The rank is −1
    if the guide's logits are not finite.
    """
    ranks: list[int] = field(default_factory=list)
    """Number of tokens that the guide prefers to each drafted token (of equally
    probable tokens, the one with the lower id is preferred). If the guide reads the
    drafted token as several tokens, the largest rank of these."""
    guided: list[int] = field(default_factory=list)
    """The guide's own choices, as tokens of the diffusion model."""


class Guide:
    """Autoregressive model that checks drafts."""

    def __init__(self, vllm_config: VllmConfig, device: torch.device) -> None:
        """Load the ``guide_model`` of the engine."""
        options = EngineOptions.from_vllm_config(vllm_config)
        model_config = vllm_config.model_config
        assert options.guide_model is not None
        assert options.guide_shape is not None
        hf_config = guide_config(options.guide_model)
        self.reader: GuideReader = (
            SameTokens(model_config.hf_config.mask_token_id)
            if options.guide_shape.same_tokens
            else Retokenizer.between(model_config, options.guide_model)
        )
        with (
            set_current_vllm_config(vllm_config),
            set_default_torch_dtype(model_config.dtype),
            device,
        ):
            longest = options.guide_shape.num_tokens(model_config.max_model_len)
            model = DiffusionDecoder(
                vllm_config=vllm_config, hf_config=hf_config, max_positions=longest
            )
            record_metadata_for_reloading(model)
        # vLLM's loader takes the folder of the weights from the config.
        self.vllm_config = copy.copy(vllm_config)
        self.vllm_config.model_config = source = copy.copy(model_config)
        source.model = options.guide_model
        source.revision = None
        source.hf_config = hf_config
        is_dummy = vllm_config.load_config.load_format == "dummy"
        tensors = {} if is_dummy else check_safetensors(options.guide_model)
        with files_named(tensors):
            get_model_loader(vllm_config.load_config).load_weights(model, source)
        process_weights_after_loading(model, model_config, device)
        self.model = model.eval()
        self.device = device
        self.shape = options.guide_shape
        self.pages: PageView | None = None

    def check(self, drafts: list[Draft]) -> Failures:
        """Judge drafts in one causal forward pass. The guide reads each canvas with the
        drafted tokens filled in. Tokens that it cannot read, or that do not fit its
        pages, get the last rank. Returns the failures of requests whose drafts cannot
        be judged."""
        failures = _failures_of(drafts, self._read)
        read = [draft for draft in drafts if draft.request_id not in failures]
        asking = [draft for draft in read if draft.judged]
        if asking:
            self._ask(asking)
        return failures | _failures_of(read, self._take_answers)

    def profile_run(self, num_rows: int) -> None:
        """Run the largest pass for ``num_rows`` tokens, so that vLLM can measure the
        memory.
        """
        chunk = self._chunks(num_rows)[0]
        drafted = torch.zeros(num_rows, dtype=torch.int64, device=self.device)[chunk]
        dtype = self.vllm_config.model_config.dtype
        self._judge(
            torch.zeros(
                len(drafted),
                self.model.config.hidden_size,
                dtype=dtype,
                device=self.device,
            ),
            drafted,
        )

    def _chunks(self, num_rows: int) -> list[slice]:
        return head_chunks(
            num_rows, self.model.config.vocab_size, on_gpu=self.device.type != "cpu"
        )

    def _read(self, draft: Draft) -> None:
        text = draft.canvas.known[: draft.positions[-1] + 1].copy()
        text[draft.positions] = draft.tokens
        draft.reading = self.reader.read(text.tolist(), draft.positions)
        room = self.shape.num_tokens(draft.canvas.spec.layout.canvas_length - 1)
        # Row t - 1 judges token t, so pages keep t tokens.
        judged = sorted(
            {t for span in draft.reading.spelling for t in range(*span) if t > 0}
        )
        if judged and judged[-1] > room:
            logger.warning_once(
                "guide_tokens_per_token=%s: a text has more tokens of the guide than "
                "pages are reserved for; later drafts are unmasked unchecked, one per "
                "step. Start the engine with a larger value.",
                self.shape.tokens_per_token,
            )
        draft.judged = [t for t in judged if t <= room]

    def _ask(self, drafts: list[Draft]) -> None:
        """Select the tokens to feed: those that are not in pages yet, and at least the
        one before the first token to be judged.
        """
        assert self.pages is not None
        device = self.pages.keys.device
        spans = []
        for draft in drafts:
            guide_text = draft.canvas.guide_text
            text = draft.reading.tokens
            kept = next(
                (
                    i
                    for i, pair in enumerate(zip(guide_text, text, strict=False))
                    if pair[0] != pair[1]
                ),
                len(guide_text),
            )
            first = draft.judged[0]
            last = draft.judged[-1]
            spans.append(Span(min(kept, first - 1), last))
            draft.canvas.guide_text = text[: draft.judged[-1]]
        fed = [
            token
            for draft, span in zip(drafts, spans, strict=True)
            for token in draft.reading.tokens[slice(*span)]
        ]
        batch = StepBatch(
            [draft.canvas for draft in drafts], [np.arange(*span) for span in spans]
        )
        batch.limits = (
            batch.positions + 1
        ).int()  # causal attention: token t of a table is the guide's token t
        tables = TokenTables(
            batch, self.pages, PageKind.GUIDE, [span.stop for span in spans]
        )
        rows_in_pages = batch.split_rows([False] * len(spans))
        layer_pass = PagedPass(
            tables, rows_in_pages, tables.row_slots(), attend_fresh=False
        )
        hidden, _ = self.model(on_device(fed, device), batch.positions, layer_pass)
        rows = [
            t - 1 - span.start + b
            for draft, span, b in zip(drafts, spans, batch.bounds, strict=False)
            for t in draft.judged
        ]
        tokens = [draft.reading.tokens[t] for draft in drafts for t in draft.judged]
        hidden = hidden[on_device(rows, device)]
        drafted = on_device(tokens, device)
        chunks = [
            self._judge(hidden[chunk], drafted[chunk])
            for chunk in self._chunks(len(rows))
        ]
        ranks, best_tokens = (torch.cat(parts) for parts in zip(*chunks, strict=True))
        answers = zip(ranks.tolist(), best_tokens.tolist(), strict=True)
        for draft in drafts:
            draft.answers = {t: next(answers) for t in draft.judged}

    def _take_answers(self, draft: Draft) -> RequestFailure | None:
        """Set the rank of each drafted token and the guide's token in its place, from
        the results for the guide's tokens that spell the drafted one.
        """
        if any(rank < 0 for rank, _ in draft.answers.values()):
            return RequestFailure(
                "not_finite", "the guide model produced logits that are NaN or infinite"
            )
        for index, (token, span) in enumerate(
            zip(draft.tokens, draft.reading.spelling, strict=True)
        ):
            read = range(*span)
            if read and draft.answers.keys() >= set(read):
                draft.ranks.append(max(draft.answers[t][0] for t in read))
                guided = [draft.answers[t][1] for t in read]
                draft.guided.append(
                    self.reader.answer(draft.reading, index, token, guided)
                )
            else:
                draft.ranks.append(self.model.config.vocab_size)
                draft.guided.append(token)
        return None

    def _judge(self, hidden: Tensor, drafted: Tensor) -> tuple[Tensor, Tensor]:
        """Ranks of the judged tokens, and the guide's own tokens, ``[num_rows]`` each."""
        logits = gather_shards(
            self.model.compute_logits(hidden).logits, get_tp_group()
        ).float()
        for token in self.reader.never_said:
            logits[:, token : token + 1] = -torch.inf
        best, tokens = logits.max(dim=1)
        num_tokens = logits.shape[1]
        scores = logits.gather(1, drafted.clamp(max=num_tokens - 1)[:, None])
        ids = torch.arange(num_tokens, device=logits.device)
        ahead = (logits > scores) | ((logits == scores) & (ids < drafted[:, None]))
        # A token outside the guide's vocabulary ranks behind all others.
        ranks = ahead.sum(dim=1).masked_fill(drafted >= num_tokens, num_tokens)
        return ranks.masked_fill(~(best < torch.inf), -1), tokens


def _failures_of(
    drafts: list[Draft], do: Callable[[Draft], RequestFailure | None]
) -> Failures:
    """Call ``do`` for each draft, and collect the failures that it returns or raises,
    by request id.
    """
    failures: Failures = {}
    for draft in drafts:
        try:
            failure = do(draft)
        except Exception as error:
            failure = failure_of(draft.request_id, error)
        if failure is not None:
            failures[draft.request_id] = failure
    return failures
