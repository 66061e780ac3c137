"""Ways to split a model or its work that diffusion engines do not have are refused by name, with what to use."""

import pytest

from tests.support.engines import start_engine


@pytest.mark.parametrize(
    ("settings", "named", "instead"),
    [
        ({"pipeline_parallel_size": 2}, "pipeline_parallel_size", "tensor_parallel_size"),
        ({"decode_context_parallel_size": 2, "tensor_parallel_size": 2}, "decode_context_parallel_size", "tensor_par"),
        ({"prefill_context_parallel_size": 2}, "prefill_context_parallel_size", "tensor_parallel_size"),
        ({"enable_expert_parallel": True}, "enable_expert_parallel", "models with experts, on GPUs"),
        ({"enable_batch_sharded_sampling": True}, "enable_batch_sharded_sampling", "leave it unset"),
        ({"enable_dbo": True}, "enable_dbo", "leave it unset"),
        ({"ubatch_size": 2}, "ubatch_size", "leave it unset"),
        ({"cpu_offload_gb": 1}, "cpu_offload_gb", "tensor_parallel_size"),
        ({"offload_group_size": 2}, "offload_group_size", "tensor_parallel_size"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_layout_that_is_not_supported_is_refused(tiny_llada, settings, named, instead):
    with pytest.raises(ValueError) as error:
        start_engine(tiny_llada, **settings)
    assert f"{named} is not supported for diffusion models" in str(error.value)
    assert instead in str(error.value)


@pytest.mark.parametrize(
    ("settings", "instead"),
    [
        ({"enable_expert_parallel": True, "tensor_parallel_size": 2}, "on GPUs; use tensor_parallel_size"),
        ({"data_parallel_size": 2}, "start one server for each"),
        ({"enable_expert_parallel": True, "enable_eplb": True, "tensor_parallel_size": 2}, "on GPUs"),
    ],
    ids=str,
)
def test_a_layout_that_experts_do_not_have_is_refused(tiny_llada_moe, settings, instead):
    with pytest.raises(ValueError) as error:
        start_engine(tiny_llada_moe, **settings)
    assert f"{next(iter(settings))} is not supported for diffusion models" in str(error.value)
    assert instead in str(error.value)


@pytest.mark.parametrize("size", [3, 8])
def test_ranks_that_do_not_share_the_heads_evenly_are_refused(tiny_llada, size):
    """Four heads."""
    with pytest.raises(ValueError, match=rf"tensor.parallel.size.*{size}|{size}.*tensor.parallel.size"):
        start_engine(tiny_llada, tensor_parallel_size=size)
