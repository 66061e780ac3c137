"""Rotary position embedding on the CPU, with vLLM's compiled kernel and without, against the formula in float64."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.platforms import current_platform

from dllm_engine.kernels.rotary import rotate_
from tests.kernels.checks import check_rotate
from tests.support.paged_cases import TOLERANCE


@pytest.fixture(params=["compiled", "pytorch"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "compiled":
        current_platform.import_kernels()
        assert hasattr(torch.ops._C, "rotary_embedding")
    else:
        monkeypatch.setattr(torch.ops, "_C", object())
    return request.param


def test_rotation_is_that_of_the_formula(path):
    @given(
        num_rows=st.integers(0, 70),
        num_heads=st.sampled_from([1, 2, 7]),
        head_dim=st.sampled_from([2, 32, 64, 96, 128, 256]),
        dtype=st.sampled_from(list(TOLERANCE)),
        seed=st.integers(0, 1000),
    )
    @settings(max_examples=60, deadline=None)
    def check(**arguments):
        check_rotate(rotate_, **arguments)

    check()


def test_a_quarter_turn(path):
    # At an angle of 90 degrees the halves change places, one of them with the other sign.
    x = torch.tensor([[[1.0, 2.0, 3.0, 4.0]]])
    rotate_(x, torch.tensor([[0.0, 1.0, 1.0, 0.0]]))
    assert x.tolist() == [[[-3.0, 2.0, 1.0, 4.0]]]


def test_errors_name_what_does_not_fit():
    x = torch.zeros(3, 2, 8)
    with pytest.raises(ValueError, match=r"x \[3, 2, 8\] and cos_sin \[2, 8\] do not belong together"):
        rotate_(x, torch.zeros(2, 8))
    with pytest.raises(ValueError, match=r"x \[3, 2, 7\]"):
        rotate_(x[..., :7], torch.zeros(3, 7))
    with pytest.raises(ValueError, match=r"cos_sin torch\.float64"):
        rotate_(x, torch.zeros(3, 8, dtype=torch.float64))
    with pytest.raises(ValueError, match="a head of x is not contiguous"):
        rotate_(torch.zeros(3, 8, 2).transpose(1, 2), torch.zeros(3, 8))


def test_operator_is_registered_correctly():
    utils = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(torch.ops.dllm.rotate_.default, (torch.randn(3, 2, 8), torch.randn(3, 8)), test_utils=utils)
