"""Reference cases: outputs of the authors' own code (``tests/reference``), as requests
and what they must give.

One driver for all kinds; ``assert_as_stated`` has a check for each thing that cases
state.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from tests.oracles.decoding import Decoding
from tests.support.answers import Answer
from tests.support.checkout import REFERENCE

Case = dict[str, Any]

KINDS = (
    "vanilla fast_dllm dkv sparse_dllm dllm_cache "
    "es_dllm slow_fast d2_cache multi_block block focus stable_diffcoder"
).split()
"""What the files' names begin with."""
MORE = (
    "vanilla_a2d",
    "infill_a2d",
    "block_a2d",
    "vanilla_open_dcoder",
    "infill_open_dcoder",
    "block_fast_dllm_v2",
    "block_nemotron_labs",
    "ar_nemotron_labs",
    "spec_nemotron_labs",
)
"""Files of cases of the smaller models, which state less."""
ODD = {"overwrites_known_tokens", "early_stop_finds_eos_in_prompt"}
"""What the authors' code does and does not say."""


def reference_cases(file: str) -> list[Case]:
    return json.loads((REFERENCE / f"{file}.json").read_text())


@dataclass(frozen=True)
class ReferenceRow:
    kind: str
    case: Case
    row: int

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
        return tokens[
            : next((i + 1 for i, token in enumerate(tokens) if token in ends), None)
        ]

    @property
    def engine(self) -> dict[str, Any]:
        return self.case["engine"]

    @property
    def fields(self) -> dict[str, Any]:
        """What the case asks for, as fields of ``DiffusionParams``."""
        return self.case["fields"]


def reference_rows(*kinds: str) -> list[ReferenceRow]:
    return [
        ReferenceRow(kind, case, row)
        for kind in kinds
        for file in sorted(REFERENCE.glob(f"{kind}*.json"))
        if (file.stem in kinds) == (file.stem in MORE)
        for case in reference_cases(file.stem)
        if not ODD & {*case.get("quirks", ())}
        for row in range(len(case["prompt_ids"]))
    ]


def by_engine(rows: Iterable[ReferenceRow]) -> dict[str, list[ReferenceRow]]:
    """Rows that one engine can answer together, by its model and options."""
    groups: dict[str, list[ReferenceRow]] = {}
    for row in rows:
        options = json.dumps(row.engine["cache_options"])
        groups.setdefault(
            f"{row.case['model']} {row.engine['cache_method']} {options}", []
        ).append(row)
    return groups


DECISIVE_GAP = 1e-6
"""Rows whose similarity differs by less than this from that of the first row left out
are rounding's choice.
"""


def assert_as_stated(row: ReferenceRow, answer: Answer | Decoding) -> None:
    """An engine's or a plain version's answer is, in all that the case states, what the
    authors' code did.
    """
    case, name = row.case, row.name
    assert answer.tokens == row.response, name
    order = [sorted(step[row.row]) for step in case["unmasked_per_step"]]
    if row.kind in ("block", "stable_diffcoder"):
        # The authors also decode what is behind the response or its end, and feed a
        # finished block once more by itself.
        assert answer.order == order[: len(answer.order)], name
        length = row.fields["block_length"]
        # The last block is whole, but Stable-DiffCoder's ends with the response.
        end = (
            len(row.prompt)
            + row.fields["gen_length"]
            + (length if row.kind == "block" else 0)
        )
        starts = [step[0] // length * length for step in answer.order]
        fed = [
            list(range(a, min(b + length, end)))
            for a, b in zip([0, *starts[:-1]], starts, strict=True)
        ]
        assert answer.computed == fed, name
        return
    if row.kind == "focus":
        assert_rows_as_stated(row, answer)
        return
    if (
        row.kind == "fast_dllm"
        and "threshold" in row.fields
        and row.fields.get("unmasking") != "entropy"
    ):
        # The authors make a pass that unmasks nothing where the first one completed the
        # block.
        assert [step for step in answer.order if step] == [
            step for step in order if step
        ], name
        assert len(answer.order) <= case["num_forward_passes"], name
        return
    if "fills_after_eos" not in case.get("quirks", ()):
        assert answer.order == order, name
    assert len(answer.computed) == case["num_forward_passes"], name
    whole = list(range(len(row.prompt) + len(row.response)))
    if row.kind == "slow_fast":
        # The canvas that rows are refreshed of.
        assert [positions[-1] + 1 for positions in answer.computed] == case[
            "forward_lengths"
        ], name
    elif row.kind == "vanilla" or "forward_lengths" in case:
        lengths = case.get("forward_lengths", [len(whole)] * case["num_forward_passes"])
        assert [len(positions) for positions in answer.computed] == lengths, name
        if isinstance(answer, Answer) and row.kind != "es_dllm":
            assert answer.tokens_computed == sum(lengths), name
    if "computed_positions_per_step" in case:
        stated = case["computed_positions_per_step"]
        assert answer.computed == [
            whole if step is None else step[row.row] for step in stated
        ], name
    if "retained_positions" in case:
        stated = [block["per_layer"] for block in case["retained_positions"]]
        assert answer.traces.get("retained_positions", []) == stated, name
    if "es_selected_positions_first_skips" in case:
        stated = [rows[row.row] for rows in case["es_selected_positions_first_skips"]]
        assert (
            rows_kept(answer.traces["selected_positions"])[: len(stated)] == stated
        ), name
    if row.kind == "dllm_cache":
        updated = answer.traces.get("updated_positions", [])
        assert len(updated) == num_adaptive_passes(case), name
        if case.get("similarity_gap", 0) > DECISIVE_GAP:
            stated = first_updates(row)
            assert updated[: len(stated)] == stated, name


def assert_rows_as_stated(row: ReferenceRow, answer: Answer | Decoding) -> None:
    """The rows of the block that passes feed, and those that they keep. The authors
    also decode what is behind the response or its end, and feed a finished block once
    more by itself.
    """
    case = row.case
    fed, kept = (
        [
            step[row.row]
            for step, kind in zip(
                case[f"{name}_positions_per_step"], case["pass_kinds"], strict=True
            )
            if kind == "denoise"
        ]
        for name in ("computed", "kept")
    )
    length = row.fields["block_length"]
    starts = [step[0] // length * length for step in answer.order]
    own = [
        [position for position in step if position >= start]
        for step, start in zip(answer.computed, starts, strict=True)
    ]
    order = [sorted(step[row.row]) for step in case["unmasked_per_step"]]
    num_passes = len(answer.order)
    assert answer.order == order[:num_passes], row.name
    assert own == fed[:num_passes], row.name
    selected = [[rows] for rows in kept[:num_passes]]
    assert answer.traces["selected_positions"] == selected, row.name


def rows_kept(selected_positions: list[list[list[int]]]) -> list[list[int]]:
    """What layers kept, one after the other; the authors' record leaves out a layer
    that kept all it had.
    """
    return [
        rows
        for layers in selected_positions
        for before, rows in pairwise([None, *layers])
        if before is None or len(rows) < len(before)
    ]


def num_adaptive_passes(case: Case) -> int:
    """Passes in which the response is not due."""
    options = case["engine"]["cache_options"]
    if not options["update_ratio"]:
        return 0
    return sum(
        n % options["response_refresh_interval"] != 0
        for n in range(case["num_forward_passes"])
    )


def first_updates(row: ReferenceRow) -> list[list[list[int]]]:
    """The positions updated by each layer but the first, in the
    first adaptive passes.
    """
    by_pass: dict[int, list[list[int]]] = {}
    for update in row.case["adaptive_update_positions_first_steps"]:
        positions = [
            len(row.prompt) + i for i in update["gen_relative_indices"][row.row]
        ]
        by_pass.setdefault(update["forward"], []).append(positions)
    return list(by_pass.values())
