"""Passes of decisions: log-probabilities of the tokens in accepted texts, and the
fields that a pass commits.
"""

import numpy as np
import torch
from torch import Tensor

from dllm_engine.decoding.messages import Failures
from dllm_engine.model_executor.candidates import BatchCandidates
from dllm_engine.model_executor.canvas_store import Canvas
from dllm_engine.model_executor.constraints.running_decision import TokenOptions
from dllm_engine.model_executor.failures import failure_of
from dllm_engine.model_executor.token_prediction import TokenPredictor
from dllm_engine.model_executor.transfer import on_device, on_host
from dllm_engine.model_executor.unmasking.filling import CHOSEN, NOT_FINITE, Filled
from dllm_engine.model_executor.unmasking.statistics import TokenLogprobs


def decide(
    predictor: TokenPredictor, hidden: Tensor, group: BatchCandidates
) -> tuple[Filled, Failures]:
    """Commit fields of each decision from the hidden states of a group of decisions.
    Waits for the device once. Also returns the failures of single decisions."""
    device = hidden.device
    canvases = group.batch.canvases
    row_tokens = []
    for index in group.members:
        decision = canvases[index].decision
        assert decision is not None
        row_tokens.append((group.rows_of(index), on_device(decision.columns, device)))
    logprobs = on_host(predictor.logprobs_at(hidden, row_tokens))
    parts = [np.empty((4, 0), np.int64)]
    failures: Failures = {}
    for index, (rows, _), request_logprobs in zip(
        group.members, row_tokens, logprobs, strict=True
    ):
        try:
            positions = group.columns[2, rows]
            exact = request_logprobs.astype(np.float64)
            parts.append(_commit(index, canvases[index], positions, exact))
        except Exception as error:
            request_id = group.batch.request_ids[index]
            failures[request_id] = failure_of(request_id, error)
    return on_device(np.concatenate(parts, axis=1), device), failures


def _commit(
    index: int, canvas: Canvas, positions: np.ndarray, logprobs: np.ndarray
) -> np.ndarray:
    """Commit fields of one decision, and return its part of ``Filled``. ``positions``:
    predicted canvas positions, ascending.
    """
    if not np.isfinite(logprobs).all():
        return np.stack(
            [np.full_like(positions, value) for value in (index, 0, 0, NOT_FINITE)]
        )
    decision = canvas.decision
    start = canvas.spec.layout.prompt_length
    assert decision is not None
    in_response = positions < canvas.spec.layout.response_span.stop
    places = (positions[in_response] - start).tolist()
    with_logprobs = canvas.logprobs is not None
    committed, options = decision.commit(
        places, logprobs[in_response], with_logprobs=with_logprobs
    )
    tokens = {start + position: token for position, token in committed.items()}
    if decision.is_complete:
        # Positions behind the response in its last block may hold any token.
        tokens |= dict.fromkeys(
            positions[~in_response].tolist(), int(decision.columns[-1])
        )
    written, values = on_device(
        [[*tokens], [*tokens.values()]], canvas.tokens.device
    ).unbind()
    canvas.tokens[written] = values
    canvas.masked[written] = False
    if canvas.logprobs is not None:
        _keep_logprobs(canvas, canvas.logprobs, committed, options)
    return np.array(
        [[index, position, token, CHOSEN] for position, token in tokens.items()]
    ).T.reshape(4, -1)


def _keep_logprobs(
    canvas: Canvas, kept: TokenLogprobs, tokens: dict[int, int], options: TokenOptions
) -> None:
    """Keep the log-probabilities among accepted texts for the report."""
    for position, token in tokens.items():
        place, (names, values) = (
            canvas.spec.layout.prompt_length + position,
            options[position],
        )
        token_logprob = values[names == token].max()
        # Fewer tokens than requested may be possible. Repetitions of the first fill the
        # rest, and are not shown.
        num_kept = kept.top.shape[1]
        order = np.argsort(-values)[:num_kept]
        order = np.append(order, np.repeat(order[:1], num_kept - len(order)))
        kept.token[place] = float(token_logprob)
        kept.rank[place] = 1 + int((values > token_logprob).sum())
        kept.top_tokens[place] = torch.from_numpy(names[order])
        kept.top[place] = torch.from_numpy(values[order])
