"""Arguments of kernels that do not belong together are refused with their shapes."""

import pytest
import torch

from dllm_engine.kernels import eviction, features, noise, rotary, similarity, slots, token_statistics, voting
from dllm_engine.kernels.attention import bidirectional_attention
from dllm_engine.kernels.paged_attention import paged_attention
from tests.kernels.checks import paged_case, refused


def test_tensors_that_do_not_belong_together_are_named():
    x, odd, places = torch.zeros(4, 2, 8), torch.zeros(4, 3, 8), torch.zeros(4, 2, dtype=torch.int64)
    pages, spans, lse = torch.zeros(3, 6, 8), torch.zeros(1, 6, dtype=torch.int64), torch.zeros(4, 2)
    refused(r"slots \[4, 1\] do not belong together", slots.write_slots, x, pages, places[:, :1])
    refused(r"v_pages \[2, 6, 8\], .* do not belong", slots.write_kv, x, x, pages, pages[:2], places)
    refused(r"q \[4, 3, 8\] and k \[4, 2, 8\] do not", eviction.mean_query_scores, odd, x, spans, 4)
    refused(r"spans \[1, 5\] torch.int64 are not", eviction.mean_query_scores, x, x, spans[:, :5], 4)
    refused(r"count=5 of scores \[4\]", eviction.select_retained, torch.zeros(4), 5, 3)
    refused("pool_kernel_size=2 is not a positive odd", eviction.select_retained, torch.zeros(4), 1, 2)
    refused(r"torch.float32 and k \[4, 2, 8\] torch.float16", voting.voting_scores, x, x.half(), lse)
    refused("3 query heads are not a multiple of 2 KV", voting.voting_scores, odd, x, lse)
    refused(r"lse \[2, 4\] torch.float32 is not float32", voting.voting_scores, x, x, lse.T)
    refused(r"pages \[3, 6, 8\], slots \[4, 1\] do not", similarity.similarity_sums, x, pages, places[:, :1])
    refused("a page is not contiguous", similarity.similarity_sums, x, torch.zeros(3, 8, 6).mT, places)
    refused(r"differ in type: torch\.float16", similarity.similarity_sums, x.half(), pages, places)
    refused(r"sums \[2, 4\] are not \[3, num_rows\]", similarity.cosine, torch.zeros(2, 4))
    refused(r"count=5 of similarity \[2, 4\]", similarity.least_similar, torch.zeros(2, 4), 5)


def test_rows_of_features_and_phases_that_do_not_fit_are_named():
    rows, values, places = torch.zeros(3, 2, 8), torch.zeros(4, 8), torch.zeros(4, dtype=torch.int64)
    memory = torch.zeros(5, 2, 6, 4)
    refused(r"hidden \[4, 7\] .*, rows \[3, 2, 8\] .*", features.add_features, values[:, :7], rows, places)
    refused("a row of hidden is not contiguous", features.add_features, torch.zeros(8, 4).T, rows, places)
    refused(r"rows \[3, 2, 8\] and slots \[2, 2\]", features.read_features, rows, places.view(2, 2))
    refused("rows of a page do not follow", features.read_features, torch.zeros(3, 2, 9)[..., :8], places)
    refused("page_size=3 holds 48 elements.*: page_size=4 at", features.feature_rows, memory, 49, num_kv_heads=2)
    refused("is not contiguous", features.feature_rows, memory[:, :, :3], 8)
    refused("width=0", features.feature_rows, memory, 0)
    x, table = torch.zeros(4, 2, 8), torch.zeros(5, 8)
    refused(r"positions \[2\] and cos_sin \[5, 8\] do not", rotary.rotate_, x, places[:2], table)
    refused(r"positions torch\.int32", rotary.rotate_, x, places.int(), table)
    refused("a head of x is not contiguous", rotary.rotate_, torch.zeros(4, 8, 2).mT, places, table)


def test_what_makes_no_sense_for_logits_is_refused():
    logits, counters = torch.zeros(2, 9), torch.zeros(3, 2, dtype=torch.int64)
    refused("temperature=0.0, top_p=0.9, top_k=1", noise.filtered_logits, logits, 0.0, 0.9, 1, -1)
    refused("forbidden_token=9 is not a column", noise.filtered_logits, logits, 1.0, 0.9, 1, 9)
    refused("temperature=0.0 is not above 0", noise.gumbel_max, logits, *counters, 0, 0.0, -1)
    refused("forbidden_token=9 is not a column", noise.gumbel_max, logits, *counters, 0, 1.0, 9)
    refused(r"counters \[1\] torch.int64 are not", noise.gumbel_max, logits, *counters[:, :1], 0, 1.0, 3)
    statistics = token_statistics.token_statistics
    refused(r"logits \[9\] are not", statistics, logits[0], -1, False, False)
    refused("forbidden_token=9 is not a column", statistics, logits, 9, False, False)
    refused("at least 2 tokens", statistics, logits[:, :1], -1, False, True)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"k": torch.zeros(4, 1, 8)}, r"k \[4, 1, 8\], v \[4, 2, 8\] do not belong together"),
        ({"q": torch.zeros(4, 3, 8)}, "3 query heads are not a multiple of 2 KV heads"),
        ({"cu_seqlens": [0, 5]}, "does not divide 4 rows"),
        ({"k_pages": torch.zeros(9, 8, 4), "v_pages": torch.zeros(9, 8, 4)}, r"k_pages \[9, 8, 4\]"),
        ({"k_pages": torch.zeros(1, 8, 8).half()}, r"differ in type: .*float16"),
        ({"page_tables": torch.zeros(2, 3)}, r"page_tables \[2, 3\]"),
        ({"head_len": torch.zeros(1, 2).long()}, r"contiguous int32; one is torch.int64 \[1, 2\]"),
        ({"head_len": torch.full((1, 2), 100).int()}, "retains tokens up to slot 200 of page tables of 16 slots"),
        ({"lse": torch.empty(4, 1)}, r"is not contiguous float32 \[4, 2\]"),
    ],
)
def test_arguments_of_paged_attention_that_do_not_belong_together_are_named(change, message):
    case, change = paged_case([4], [[2, 2]], heads=2, dim=8), change.copy()
    of_rows = {name: change.pop(name) for name in ("q", "k", "cu_seqlens") if name in change}
    lse = change.pop("lse", None)
    if change.keys() == {"k_pages"}:
        change["k_pages"] = case.tokens.k_pages.half()
    case = case._replace(**of_rows, tokens=case.tokens._replace(**change))
    refused(message, paged_attention, *case, attend_fresh=True, lse=lse)


def test_arguments_of_attention_that_do_not_belong_together_are_named():
    x, bounds = torch.zeros(4, 2, 8), torch.tensor([0, 4], dtype=torch.int32)
    refused(r"k \[3, 2, 8\]", bidirectional_attention, x, x[:3], x[:3], [0, 4], bounds)
    refused("3 query heads are not a multiple", bidirectional_attention, torch.zeros(4, 3, 8), x, x, [0, 4], bounds)
    refused(r"bounds=\[0, 3\] does not divide 4 rows", bidirectional_attention, x, x, x, [0, 3], bounds)
    refused(r"is not int32 \[2\]", bidirectional_attention, x, x, x, [0, 4], bounds.long())
