"""Reference cases: outputs of the authors' own code (``tests/reference``), as requests and what they must give.

One driver for all kinds. A new kind of case needs an entry in ``CACHES``; a new way to ask one a branch in
``ReferenceRow.fields``; a new thing that cases state a check in ``assert_as_stated``.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from tests.oracles.decoding import Decoding
from tests.support.answers import Answer

REFERENCE = Path(__file__).parents[1] / "reference"
Case = dict[str, Any]

KINDS = "vanilla fast_dllm dkv sparse_dllm dllm_cache es_dllm slow_fast d2_cache multi_block block".split()
"""What the files' names begin with."""
DLLM_CACHE = {
    "prompt_refresh_interval": "prompt_interval_steps",
    "response_refresh_interval": "gen_interval_steps",
    "update_ratio": "transfer_ratio",
}
ES_DLLM = {
    "alpha": "importance_score_alpha",
    "keep_schedule": "proportion_steps",
    "prompt_refresh_interval": "prompt_update_freq",
    "block_refresh_interval": "block_update_freq",
}
D2_CACHE = {"rollout_p": "rollout_p", "masked_rows": "current_k", "sigma": "cache_sigma", "gap_fill": "inflate_w"}
CACHES: dict[str, tuple[str, dict[str, str]]] = {
    "block": ("block", {}),
    "dkv": ("dkv", {"refresh_interval": "cache_steps"}),
    "sparse_dllm": ("sparse", {"retention_ratio": "keep_ratio", "pool_kernel_size": "kernel_size"}),
    "dllm_cache": ("dllm_cache", DLLM_CACHE),
    "slow_fast": ("dllm_cache", DLLM_CACHE),
    "es_dllm": ("es_dllm", ES_DLLM),
    "d2_cache": ("d2_cache", D2_CACHE),
    "multi_block": ("delayed", {"cache_delay": "cache_delay_iter", "refresh_interval": "refresh_interval"}),
}
"""By kind: our method, and what the authors call its options."""
FIELDS = {name: name for name in ("gen_length", "block_length", "threshold", "factor", "top_p", "top_k", "early_stop")}
FIELDS |= {"block_add_threshold": "block_add_threshold", "tokens_per_step": "num_transfer_tokens"}
FIELDS |= {"certainty_sigma": "sigma", "unmasking": "alg", "delay_eos": "delay_eos_generation"}
"""What the authors call a request's fields."""
SLOW_FAST = {
    "span_steps": ("k_exploration_steps", "n_cycle_discovery_steps"),
    "span_threshold": ("cycle_len_confidence_threshold", "conf_threshold_cycle_len_pred"),
    "span_window": ("cycle_length_stability_window", "stabilize_count"),
    "slow_threshold": ("high_confidence_threshold", "high_conf_for_parallel_decode_discovery"),
    "fast_threshold": ("high_confidence_threshold", "high_conf_for_cycle_decode"),
    "slow_minimum": ("min_tokens_for_parallel_decode_discovery",),
    "fast_minimum": ("min_decode_in_cycle_fallback",),
    "span_variance": ("cycle_len_variance_threshold",),
}
"""What SlowFast sampling's authors call its options, for LLaDA and for Dream."""
ODD = {"overwrites_known_tokens", "early_stop_finds_eos_in_prompt"}
"""What the authors' code does and does not say."""


def reference_cases(file: str) -> list[Case]:
    return json.loads((REFERENCE / f"{file}.json").read_text())


@dataclass(frozen=True)
class ReferenceRow:
    """One row of an authors' batch."""

    kind: str
    case: Case
    row: int
    keeps: bool = True
    """Whether the engine has a cache, where the authors' code is the same without one."""

    @property
    def name(self) -> str:
        return f"{self.case['name']}, row {self.row}"

    @property
    def prompt(self) -> list[int]:
        return self.case["prompt_ids"][self.row]

    @property
    def response(self) -> list[int]:
        """Up to the end token, where one ends it."""
        tokens = self.case["output_ids"][self.row][len(self.prompt) :]
        tokens = tokens[: self.fields["gen_length"]]
        ends = self.fields.get("stop_token_ids", [])
        return tokens[: next((i + 1 for i, token in enumerate(tokens) if token in ends), None)]

    @property
    def engine(self) -> dict[str, Any]:
        """The engine's cache."""
        h = self.case["hyperparameters"]
        method, names = CACHES.get(self.kind, (h.get("cache", "none"), {}))
        if h.get("cache") == "none" or False in (h.get("use_kvcache"), h.get("kv_cache")):
            method, names = "none", {}
        options = {ours: h[theirs] for ours, theirs in names.items() if theirs in h}
        repairs = h.get("upstream_repairs", ())
        if "cache_reloading_step" in h:
            options["refresh_interval"] = h["cache_reloading_step"]
        if self.kind == "slow_fast" and method == "dllm_cache":
            options |= {"refresh_first_layer": False, "interval_unit": "passes"}
        if method == "es_dllm" and h["ESdLLM_mode"] is None:
            options["indicator"] = "none"
        if "confidence" in repairs:
            options["confidence"] = "latest"
        if "block_mask" in repairs:
            options["range_unit"] = "block"
        return {"cache_method": method, "cache_options": options}

    @property
    def fields(self) -> dict[str, Any]:
        """What the case asks for, as fields of ``DiffusionParams``."""
        h = self.case["hyperparameters"]
        asked = {ours: h[theirs] for ours, theirs in FIELDS.items() if h.get(theirs) is not None}
        asked = {"ignore_eos": True, "block_length": h["gen_length"]} | asked
        match self.kind:
            case "block":
                return fields_of_blocks(h)
            case "multi_block":
                asked |= {"entropy_threshold": asked.pop("threshold"), "unmasking": "low_entropy"}
                return asked | ({"stop_token_ids": [h["eos_token_id"]]} if h["early_stop"] else {})
            case "slow_fast":
                options = {ours: h[name] for ours, theirs in SLOW_FAST.items() for name in theirs if name in h}
                if "cycle_length_stability_std_dev_threshold" in h:
                    options["span_variance"] = h["cycle_length_stability_std_dev_threshold"] ** 2
                return asked | {"slow_fast": options}
            case "d2_cache":
                return asked
        if h.get("alg") == "confidence_threshold":  # Fast-dLLM's name for unmasking by threshold on Dream
            asked["unmasking"] = "maskgit_plus"
        return asked | {"steps": h["steps"] if "steps" in h else h["gen_length"] // h["token_per_step"]}

    @property
    def makes_empty_passes(self) -> bool:
        """Fast-dLLM's code makes a pass that unmasks nothing where the first one completed the block."""
        h = self.case["hyperparameters"]
        return self.kind == "fast_dllm" and h["threshold"] is not None and h.get("alg") != "entropy"

    @property
    def rows_per_pass(self) -> list[int] | None:
        if self.kind == "vanilla":
            return [len(self.prompt) + len(self.response)] * self.case["num_forward_passes"]
        # With a cache, SlowFast sampling's is the canvas that rows are refreshed of.
        return None if self.kind == "slow_fast" else self.case.get("forward_lengths")


def fields_of_blocks(h: dict[str, Any]) -> dict[str, Any]:
    """Of a model whose attention goes by blocks; steps count per block."""
    ends = h.get("stopping_criteria_idx") or ([h["eos_id"]] if "eos_id" in h else [])
    steps = h["denoising_steps"] if "denoising_steps" in h else min(h["steps"], h["gen_length"] // h["minimal_topk"])
    asked = {"gen_length": h["gen_length"], "block_length": h["block_length"], "ignore_eos": True}
    asked |= {"steps_per_block": steps, "stop_token_ids": ends, "early_stop": h.get("eos_early_stop", False)}
    match h.get("remasking_strategy", "low_confidence_dynamic"):
        case "low_confidence_dynamic":
            asked["threshold"] = h.get("confidence_threshold", h.get("threshold"))
        case "entropy_bounded":
            asked["entropy_budget"] = h["eb_threshold"]
        case "sequential":
            asked["unmasking"] = "sequential"
    return asked


def reference_rows(*kinds: str) -> list[ReferenceRow]:
    """Of all files whose names begin with a kind."""
    return [
        ReferenceRow(kind, case, row)
        for kind in kinds
        for file in sorted(REFERENCE.glob(f"{kind}_*.json"))
        for case in reference_cases(file.stem)
        if not ODD & {*case.get("quirks", ())}
        for row in range(len(case["prompt_ids"]))
    ]


def by_engine(rows: Iterable[ReferenceRow]) -> dict[str, list[ReferenceRow]]:
    """Rows that one engine can answer together, by its model and options."""
    groups: dict[str, list[ReferenceRow]] = {}
    for row in rows:
        options = json.dumps(row.engine.get("cache_options", {}))
        groups.setdefault(f"{row.case['model']} {row.engine['cache_method']} {options}", []).append(row)
    return groups


DECISIVE_GAP = 1e-6
"""Rows whose similarity differs by less than this from that of the first row left out are rounding's choice."""


def assert_as_stated(row: ReferenceRow, answer: Answer | Decoding) -> None:
    """An engine's or a plain version's answer is, in all that the case states, what the authors' code did."""
    case, name = row.case, row.name
    assert answer.tokens == row.response, name
    order = [sorted(step[row.row]) for step in case["unmasked_per_step"]]
    if row.kind == "block":
        # The authors also decode what is behind the response or its end, and feed a finished block once more by itself.
        assert answer.order == order[: len(answer.order)], name
        length = case["hyperparameters"]["block_length"]
        starts = [step[0] // length * length for step in answer.order]
        kept = [0, *starts[:-1]] if row.keeps else [0] * len(starts)
        assert answer.computed == [list(range(a, b + length)) for a, b in zip(kept, starts, strict=True)], name
        return
    if row.makes_empty_passes:
        assert [step for step in answer.order if step] == [step for step in order if step], name
        assert len(answer.order) <= case["num_forward_passes"], name
        return
    if "fills_after_eos" not in case.get("quirks", ()):
        assert answer.order == order, name
    assert len(answer.computed) == case["num_forward_passes"], name
    if row.rows_per_pass is not None:
        assert [len(positions) for positions in answer.computed] == row.rows_per_pass, name
        if isinstance(answer, Answer) and row.kind != "es_dllm":
            assert answer.tokens_computed == sum(row.rows_per_pass), name
    if row.kind == "slow_fast":
        assert [positions[-1] + 1 for positions in answer.computed] == case["forward_lengths"], name
    if "computed_positions_per_step" in case:
        whole = list(range(len(row.prompt) + len(row.response)))
        stated = case["computed_positions_per_step"]
        assert answer.computed == [whole if step is None else step[row.row] for step in stated], name
    if "retained_positions" in case:
        stated = [block["per_layer"] for block in case["retained_positions"]]
        assert answer.traces.get("retained_positions", []) == stated, name
    if "es_selected_positions_first_skips" in case:
        stated = [rows[row.row] for rows in case["es_selected_positions_first_skips"]]
        assert rows_kept(answer.traces["selected_positions"])[: len(stated)] == stated, name
    if row.kind == "dllm_cache":
        updated = answer.traces.get("updated_positions", [])
        assert len(updated) == num_adaptive_passes(case), name
        if case.get("similarity_gap", 0) > DECISIVE_GAP:
            stated = first_updates(row)
            assert updated[: len(stated)] == stated, name


def rows_kept(selected_positions: list[list[list[int]]]) -> list[list[int]]:
    """What layers kept, one after the other; the authors' record leaves out a layer that kept all it had."""
    return [
        rows
        for layers in selected_positions
        for before, rows in pairwise([None, *layers])
        if before is None or len(rows) < len(before)
    ]


def num_adaptive_passes(case: Case) -> int:
    """Passes in which the response is not due."""
    h = case["hyperparameters"]
    if not h["transfer_ratio"]:
        return 0
    return sum(n % h["gen_interval_steps"] != 0 for n in range(case["num_forward_passes"]))


def first_updates(row: ReferenceRow) -> list[list[list[int]]]:
    """The positions updated by each layer but the first, in the first adaptive passes."""
    by_pass: dict[int, list[list[int]]] = {}
    for update in row.case["adaptive_update_positions_first_steps"]:
        positions = [len(row.prompt) + i for i in update["gen_relative_indices"][row.row]]
        by_pass.setdefault(update["forward"], []).append(positions)
    return list(by_pass.values())
