"""Forward passes that measure a model instead of decoding: memory, importance of layers, likelihood of tokens."""

import itertools
from collections.abc import Iterable

import torch

from dllm_engine.kernels.attention import bidirectional_attention
from dllm_engine.model_executor.models.decoder import DecoderLayer, DiffusionDecoder, RotaryPhases
from dllm_engine.model_executor.passes.base import LayerPass
from dllm_engine.model_executor.passes.dense import DensePass
from dllm_engine.model_executor.token_prediction import TokenPredictor


def run_largest_batch(
    model: DiffusionDecoder, predictor: TokenPredictor, num_rows: int, max_model_len: int, device: torch.device
) -> None:
    """One forward pass of ``num_rows`` masks in canvases of ``max_model_len``, for vLLM to measure its memory."""
    ids = torch.full((num_rows,), predictor.mask_token_id, device=device)
    positions = torch.arange(num_rows, device=device) % max_model_len
    hidden = model(ids, positions, DensePass([*range(0, num_rows, max_model_len), num_rows]))
    rows = min(predictor.max_rows, num_rows)
    model.compute_logits(hidden[:rows]).logits.float().softmax(dim=-1)


def layer_importance(model: DiffusionDecoder, tokens: torch.Tensor) -> list[float]:
    """Importance of each layer in a forward pass over one canvas, ``tokens`` ``[canvas_length]``; see
    ``ProfilingPass``."""
    layer_pass = ProfilingPass(len(tokens))
    model(tokens, torch.arange(len(tokens), device=tokens.device), layer_pass)
    return layer_pass.importance


def masked_logprobs(
    model: DiffusionDecoder,
    predictor: TokenPredictor,
    sequences: list[list[int]],
    masked: list[list[int]],
    shift: int,
    device: torch.device,
) -> list[list[float]]:
    """Log-probability of each token that is masked, given the rest of its sequence; one forward pass for all.

    Args:
        sequences: token ids.
        masked: per sequence the positions that are masked.
        shift: 1 where position p is predicted by row p - 1, else 0.
    """
    cu_seqlens = list(itertools.accumulate(map(len, sequences), initial=0))
    starts = torch.tensor(cu_seqlens[:-1], device=device)
    sizes = torch.tensor([len(positions) for positions in masked], device=device)
    tokens = torch.tensor(list(itertools.chain.from_iterable(sequences)), device=device)
    places = torch.tensor(list(itertools.chain.from_iterable(masked)), dtype=torch.int64, device=device)
    rows = starts.repeat_interleave(sizes) + places
    ids = tokens.index_fill(0, rows, predictor.mask_token_id)
    positions = torch.cat([torch.arange(len(sequence), device=device) for sequence in sequences])
    hidden = model(ids, positions, DensePass(cu_seqlens))
    # As in a response, the first position of a sequence has no row before it.
    predicting = rows - (places > 0).long() * shift
    logprobs = predictor.logprobs_of(hidden[predicting], tokens[rows])
    return [part.tolist() for part in logprobs.split(sizes.tolist())]


class ProfilingPass(LayerPass):
    """A dense pass over one canvas that measures how much each layer changes its tokens.

    The offline profile that MaskKV shares its budget by (arXiv 2510.09309, equation 8).
    """

    def __init__(self, num_rows: int) -> None:
        self.num_rows = num_rows
        self.importance: list[float] = []
        """Per layer 1 − mean cosine between a token's hidden state before and after it, 0 … 2."""

    def __call__(self, layers: Iterable[DecoderLayer], hidden: torch.Tensor, phases: RotaryPhases) -> torch.Tensor:
        for layer in layers:
            q, k, v = layer.qkv(layer.attn_norm(hidden), phases)
            attended = bidirectional_attention(q, k, v, [0, self.num_rows])
            after = hidden + layer.o_proj(attended)
            after += layer.mlp(layer.mlp_norm(after))
            self.importance.append(
                float(1 - torch.cosine_similarity(hidden.double(), after.double(), dim=-1).mean().clamp(-1, 1))
            )
            hidden = after
        return hidden
