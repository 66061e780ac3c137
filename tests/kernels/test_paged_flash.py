"""FlashAttention over pages. On a CPU the formula stands in for it, over what it is given."""

import pytest
import torch
from vllm.v1.attention.backends import fa_utils

from dllm_engine import DiffusionParams
from dllm_engine.kernels import attention, paged_attention
from dllm_engine.kernels.attention import choose_paged_flash
from tests.kernels import checks
from tests.kernels.checks import flash_stand_in, paged_case
from tests.support.engines import generate, runner_of
from tests.support.fake_cuda_graphs import record_steps

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.mark.parametrize(
    ("settings", "recorded"),
    [
        ({"cache_method": "dual", "cache_options": {"refresh": "near", "near_tokens": 4}}, True),
        ({"cache_method": "dllm_cache"}, True),
        ({"cache_method": "es_dllm"}, True),
        ({"cache_method": "maskkv"}, False),
    ],
)
def test_engines_answer_the_same_with_it(monkeypatch, engines, tiny_llada, settings, recorded):
    """Also where a recorded step is padded with requests that have no tokens."""
    prompts = [[3] * 17, [5, 6] * 4, [9, 8, 7]]
    params = DiffusionParams(gen_length=16, block_length=8, ignore_eos=True)

    def answers():
        return [output.outputs[0].token_ids for output in generate(llm, prompts, params)]

    llm = engines(tiny_llada, page_size=16, **settings)
    monkeypatch.setattr(paged_attention, "_flash", None)
    expected, flash = answers(), flash_stand_in(monkeypatch)
    monkeypatch.setattr(paged_attention, "_flash", choose_paged_flash(CUDA, torch.bfloat16, 16, 16))
    if recorded:
        monkeypatch.setattr(runner_of(llm).denoiser, "graphs", None)
        recorder = record_steps(runner_of(llm))
    assert answers() == expected
    assert bool(flash.calls) == (settings["cache_method"] != "maskkv")  # whose heads have tokens of their own
    if recorded:
        assert recorder.num_replayed > 0


@pytest.mark.parametrize(
    ("device", "dtype", "page_size", "version", "reason"),
    [
        (CUDA, torch.float16, 16, 2, None),
        (CPU, torch.bfloat16, 32, 3, "needs a CUDA device"),
        (CUDA, torch.bfloat16, 24, 3, "needs a page_size of a multiple of 16, here 24"),
        (CUDA, torch.bfloat16, 64, 3, "needs a page_size below 64, here 64"),
        (CUDA, torch.bfloat16, 64, 2, None),
        (CUDA, torch.bfloat16, 32, 4, "needs FlashAttention 2 or 3, and vLLM takes 4"),
    ],
)
def test_when_it_is_chosen(monkeypatch, device, dtype, page_size, version, reason):
    flash_stand_in(monkeypatch)
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
