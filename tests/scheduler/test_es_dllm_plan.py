"""ES-dLLM's rule and the layers that drop rows; its plans are those of ``tests/methods/test_random_requests.py``."""

import torch

from dllm_engine.model_executor.unmasking.rules import PARALLEL_RULES
from dllm_engine.scheduler.request import ParallelRule
from tests.support.plans import cache_of, plans_of, spec_of


def test_a_threshold_must_be_exceeded():
    spec = spec_of(parallel=ParallelRule("threshold", 0.9), cache=cache_of("es_dllm"))
    assert {plan.quota.parallel for plan in plans_of(spec, "es_dllm")} == {ParallelRule("exceeded_threshold", 0.9)}
    exceeded = PARALLEL_RULES["exceeded_threshold"](torch.tensor([0.875, 0.75, 0.5]), 0.75)
    assert exceeded.tolist() == [True, False, False]


def test_layers_that_drop_rows():
    assert cache_of("es_dllm").cuts(32) == {4: 0.5, 8: 0.25}
    assert cache_of("es_dllm").cuts(4) == {0: 0.5, 1: 0.25}
    assert cache_of("es_dllm", indicator="none").cuts(32) == {}
    # Two depths of one layer: the deeper one.
    assert cache_of("es_dllm", keep_schedule=[[1, 0], [0.5, 0.3], [0.2, 0.4]]).cuts(2) == {0: 0.2}
