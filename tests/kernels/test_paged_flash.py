"""FlashAttention over pages. On a CPU the formula stands in for it, over what it is given."""

import pytest
import torch
from vllm.v1.attention.backends import fa_utils

from dllm_engine import DiffusionParams
from dllm_engine.kernels import attention, paged_attention
from dllm_engine.kernels._operator import Operator
from dllm_engine.kernels.attention import choose_paged_flash
from tests.kernels import checks
from tests.kernels.checks import paged_case
from tests.support.engines import generate, runner_of
from tests.support.fake_cuda_graphs import record_steps

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


class FlashStandIn:
    """``flash_attn_varlen_func`` a request at a time. It refuses arguments that the real one would not take."""

    def __init__(self):
        self.num_calls = 0

    def __call__(
        self, q, k, v, *, max_seqlen_q, cu_seqlens_q, max_seqlen_k, seqused_k, block_table, causal, fa_version
    ):
        self.num_calls += 1
        assert (causal, fa_version) == (False, 3)
        assert type(max_seqlen_q) is type(max_seqlen_k) is int
        assert q.stride(-1) == k.stride(-1) == v.stride(-1) == 1
        num_requests, page_size = len(cu_seqlens_q) - 1, k.shape[1]
        assert page_size % 16 == 0
        assert seqused_k.shape == block_table.shape[:1] == (num_requests,)
        for numbers in (cu_seqlens_q, seqused_k, block_table):
            assert numbers.dtype == torch.int32
            assert numbers.is_contiguous()
        assert (cu_seqlens_q.diff() * (seqused_k > 0)).max() <= max_seqlen_q
        assert seqused_k.max() <= max_seqlen_k
        out = torch.full_like(q, torch.nan, memory_format=torch.contiguous_format)
        for i, length in enumerate(seqused_k.tolist()):
            rows = slice(*cu_seqlens_q[i : i + 2].tolist())
            if length:
                pages = block_table[i, : -(-length // page_size)].long()
                keys, values = (x[pages].flatten(0, 1)[:length] for x in (k, v))
                out[rows] = checks.attention(q[rows], keys, values)[0].to(q.dtype)
        return out


@pytest.fixture
def flash(monkeypatch):
    """What stands in for FlashAttention 3, on a GPU that has it."""
    stand_in = FlashStandIn()
    monkeypatch.setattr(fa_utils, "get_flash_attn_version", lambda head_size: 3)
    # As an operator, so that a fake of CUDA graphs takes it for one kernel.
    monkeypatch.setattr(fa_utils, "flash_attn_varlen_func", Operator(stand_in, ":flash"), raising=False)
    monkeypatch.setattr(paged_attention, "_flash", choose_paged_flash(CUDA, torch.bfloat16, 16, 16))
    return stand_in


@pytest.mark.parametrize(
    ("settings", "recorded"),
    [
        ({"cache_method": "dual", "cache_options": {"refresh": "near", "near_tokens": 4}}, True),
        ({"cache_method": "dllm_cache"}, True),
        ({"cache_method": "es_dllm"}, True),
        ({"cache_method": "maskkv"}, False),
    ],
)
def test_engines_answer_the_same_with_it(flash, monkeypatch, engines, tiny_llada, settings, recorded):
    """Also where a recorded step is padded with requests that have no tokens."""
    prompts = [[3] * 17, [5, 6] * 4, [9, 8, 7]]
    params = DiffusionParams(gen_length=16, block_length=8, ignore_eos=True)

    def answers():
        return [output.outputs[0].token_ids for output in generate(llm, prompts, params)]

    llm = engines(tiny_llada, page_size=16, **settings)
    monkeypatch.setattr(paged_attention, "_flash", None)
    expected = answers()
    monkeypatch.setattr(paged_attention, "_flash", choose_paged_flash(CUDA, torch.bfloat16, 16, 16))
    if recorded:
        monkeypatch.setattr(runner_of(llm).denoiser, "graphs", None)
        recorder = record_steps(runner_of(llm))
    assert answers() == expected
    assert (flash.num_calls > 0) == (settings["cache_method"] != "maskkv")  # whose heads have tokens of their own
    if recorded:
        assert recorder.num_replayed > 0


@pytest.mark.parametrize(
    ("device", "dtype", "page_size", "version", "reason"),
    [
        (CUDA, torch.float16, 16, 2, None),
        (CPU, torch.bfloat16, 32, 3, "needs a CUDA device"),
        (CUDA, torch.bfloat16, 24, 3, "needs a page_size of a multiple of 16, here 24"),
        (CUDA, torch.bfloat16, 32, 4, "needs FlashAttention 2 or 3, and vLLM takes 4"),
    ],
)
def test_when_it_is_chosen(flash, monkeypatch, device, dtype, page_size, version, reason):
    monkeypatch.setattr(fa_utils, "get_flash_attn_version", lambda head_size: version)
    lines = []
    monkeypatch.setattr(attention.logger, "info", lambda line, *values: lines.append(line % values))
    assert (choose_paged_flash(device, dtype, 128, page_size) is None) == (reason is not None)
    (line,) = lines
    assert (reason or f"flash {version} where it applies") in line


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("heads", [2, 8])
def test_on_a_gpu(monkeypatch, heads):
    attend = choose_paged_flash(CUDA, torch.bfloat16, 64, 32)
    assert attend is not None
    monkeypatch.setattr(paged_attention, "_flash", attend)
    rows, retained = [32, 5, 1], [[300, 300], [64, 64], [1, 1]]
    case = paged_case(rows, retained, heads, 64, 32, dtype=torch.bfloat16, device="cuda")
    tables = torch.where(case.tokens.page_tables < 2**30, case.tokens.page_tables, 0)
    tokens = case.tokens._replace(page_tables=tables, token_lens=case.tokens.head_len[:, 0].contiguous())
    expected, _ = checks.paged_attention(case, attend_fresh=False)
    out = paged_attention.paged_attention(*case[:4], tokens, attend_fresh=False, max_seqlen=32)
    assert (out.double() - expected).norm() < 1e-2 * expected.norm()
