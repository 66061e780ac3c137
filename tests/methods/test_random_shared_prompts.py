"""Random engines that share prompts: requests and decisions come, end and are aborted
at any time, go on where others ended, and prefixes are forgotten. Each answer is that of the plain
version which reads the pages that the engine found, as those left them that wrote them.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from vllm.sampling_params import RequestOutputKind

from dllm_engine import LLM, DiffusionParams
from dllm_engine.scheduler.scheduled_request import ScheduledRequest
from tests.oracles.buffer import Buffer
from tests.oracles.decisions import decide_in_passes
from tests.oracles.decode import decode
from tests.oracles.decoding import Decoding
from tests.oracles.models import PlainModel
from tests.oracles.shared_prompts import SharedPrompts
from tests.support.answers import params_of
from tests.support.engines import assert_nothing_left, runner_of, scheduler_of
from tests.support.random_decisions import (
    assert_fields_are,
    decision_params,
    random_decision,
)
from tests.support.random_requests import (
    COIN_TOSS,
    in_constraints,
    in_spans,
    noise_of,
    random_requests,
)
from tests.support.stepped_engines import Poison, copied_pages, held_pages

SAMPLED = {
    "n": 2,
    "temperature": 0.6,
    "gen_length": 9,
    "block_length": 4,
}
PAGE_SIZE, NUM_REQUESTS, LONGEST = 8, 16, 150
RESPONSE = {
    "refresh": "response",
    "prompt_refresh_interval": 2,
    "pool_kernel_size": 1,
}
ENGINES: list[tuple[str, dict[str, Any]]] = [
    ("none", {}),
    ("prefix", {}),
    ("dual", {}),
    ("dual", {"refresh": "response", "prompt_refresh_interval": 2}),
    ("dual", {"refresh": "near", "near_tokens": 5}),
    ("sparse", {"retention_ratio": 0.6, "pool_kernel_size": 1}),
    ("sparse", {"retention_ratio": 0.3, "update_delay": 0, "pool_kernel_size": 1}),
    ("sparse", RESPONSE | {"retention_ratio": 0.6}),
    ("sparse", RESPONSE | {"update_delay": 0, "scope": "prefix"}),
]
"""Cache methods that share prompts, with options."""


@dataclass
class Asked:
    """A request, and what the engine did with it."""

    prompt: list[int]
    asked: dict[str, Any]
    salt: str | None
    decision: tuple[Any, ...] | None = None
    """As ``random_decision`` draws it; ``asked`` has its ``passes``."""
    tokens: dict[int, list[int]] = field(default_factory=dict)
    """That its client got, by number of the sequence."""
    figures: Any = None
    """Of the answer."""
    is_aborted: bool = False


@dataclass
class Admitted:
    """A sequence that the engine ran."""

    request: Asked
    number: int
    epoch: int
    """How often prefixes were forgotten before."""
    found: list[tuple[str, int]]
    """Sequence that kept each page that it found, and the number there."""
    num_read: int
    """Tokens that it did not compute."""
    num_passes: int = 0
    copied: tuple[str, int] | None = None
    """Sequence of which it copied a page behind those, and the number there."""


class Client:
    """Sends requests, aborts some, and goes on with others' answers."""

    def __init__(self, llm: LLM, draw: random.Random, requests: list[Asked]) -> None:
        self.llm, self.draw, self.waiting = llm, draw, requests
        self.sent: dict[str, Asked] = {}
        self.running: list[str] = []
        self.is_pausing = False

    def step(self) -> None:
        """Pause now and then until the engine is idle and forgets all prefixes."""
        if self.is_pausing and not self.running:
            if self.draw.random() < 0.5:
                assert self.llm.reset_prefix_cache()
            else:
                self.llm.collective_rpc("reload_weights")
            self.is_pausing = False
        elif self.draw.random() < 0.03:
            self.is_pausing = True
        for _ in range(self.draw.randrange(3)):
            if self.waiting and not self.is_pausing:
                self.send(self.waiting.pop())
        if self.running and self.draw.random() < 0.1:
            victim = self.draw.choice(self.running)
            self.llm.llm_engine.abort_request([victim])
            self.sent[victim].is_aborted = True
            self.end(victim)
        for output in self.llm.llm_engine.step():
            request = self.sent[output.request_id]
            for part in output.outputs:
                request.tokens.setdefault(part.index, []).extend(part.token_ids)
                request.figures = part.diffusion
            if output.finished and output.request_id in self.running:
                self.end(output.request_id)

    def send(self, request: Asked) -> None:
        name = f"r{len(self.sent)}"
        salt = {} if request.salt is None else {"cache_salt": request.salt}
        if request.decision is None:
            params = params_of(request.asked)
        else:
            decided = decision_params(request.decision[0], **request.asked)
            params = DiffusionParams(**decided)
        params.output_kind = RequestOutputKind.DELTA
        prompt: Any = {"prompt_token_ids": request.prompt, **salt}
        self.llm.llm_engine.add_request(name, prompt, params)
        self.sent[name] = request
        self.running.append(name)

    def end(self, name: str) -> None:
        """Some clients ask again, with what they got in the prompt."""
        self.running.remove(name)
        request = self.sent[name]
        prompt = [*request.prompt, *request.tokens.get(0, []), 7, 8, 9]
        asked = {"gen_length": 9, "block_length": 4, "threshold": 0.4}
        if len(prompt) < LONGEST and len(self.sent) < 2 * NUM_REQUESTS:
            self.waiting.append(Asked(prompt, asked, request.salt))


def draw_requests(draw: random.Random, model: PlainModel) -> list[Asked]:
    number = draw.randrange(1 << 30)
    drawn = random_requests(number, NUM_REQUESTS, model.is_dream)
    drawn = in_constraints(
        in_spans(drawn, number), number, model.head.shape[0], model.mask
    )
    beginnings = [[draw.randrange(480) for _ in range(n)] for n in (45, 24, 3)]
    requests = []
    for prompt, asked in drawn:
        if draw.random() < 0.2:
            policy = "maskgit_plus" if model.is_dream else "low_confidence"
            asked = SAMPLED | {"seed": draw.randrange(99), "unmasking": policy}
        decision = None
        if draw.random() < 0.4:
            decision, asked = random_decision(draw), {"passes": draw.randint(1, 3)}
        text = beginnings[0] if decision is not None else draw.choice(beginnings)
        text = text + prompt[: draw.choice([1, 9, 60])]
        salt = draw.choice([None, None, "mine"])
        requests.append(Asked(text, asked, salt, decision))
    return requests


@pytest.fixture
def admitted(monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Admitted]]:
    """``admitted(llm, sent)``: the sequences that an engine runs from then on, in order
    of their admission. Pages that they get hold NaN until they are written.
    """

    def record(llm: LLM, sent: dict[str, Asked]) -> dict[str, Admitted]:
        tables = scheduler_of(llm).tables
        pages = tables.pages
        last_found: list[Any] = []
        sequences: dict[str, Admitted] = {}
        writers: dict[int, tuple[str, int]] = {}
        """Of pages of the first layer that can be found or copied."""
        epoch = 0

        def after(owner: Any, name: str) -> Callable[..., None]:
            """A decorator: call a function after each call of a method, with its result
            and arguments.
            """
            method = getattr(owner, name)

            def decorate(note: Callable[..., None]) -> None:
                def call(*args: Any) -> Any:
                    result = method(*args)
                    note(result, *args)
                    return result

                monkeypatch.setattr(owner, name, call)

            return decorate

        def written(request_id: str, page: int) -> None:
            block = pages._tables[request_id][0][page]
            writers[block.block_id] = request_id, page

        @after(pages, "find")
        def found(shared: Any, *_: Any) -> None:
            last_found[:] = shared[0] if shared else []

        @after(pages, "reserve")
        def reserved(_: Any, request_id: str, *settings: Any) -> None:
            state = scheduler_of(llm).states[request_id]
            name = request_id.rsplit("-", 1)[0]
            number, _, parent = name.rpartition("_")
            sequences[request_id] = Admitted(
                *(sent[parent], int(number or 0), epoch),
                [writers[page.block_id] for page in last_found],
                state.progress.num_read,
            )
            assert state.request.prompt_token_ids == sent[parent].prompt

        @after(pages, "add_keys")
        def added(_: Any, request_id: str, keys: Any, *settings: Any) -> None:
            stop = pages.num_keyed[request_id]
            for page in range(stop - len(keys), stop):
                written(request_id, page)

        @after(pages, "note_next")
        def noted(_: Any, request_id: str, number: int, *settings: Any) -> None:
            written(request_id, number)

        @after(pages, "append_copies")
        def appended(_: Any, request_id: str, sources: Any) -> None:
            sequences[request_id].copied = writers[sources[0].block_id]

        @after(tables, "give_back")
        def gave_back(_: Any, state: ScheduledRequest) -> None:
            if state.request_id in sequences:
                num_passes = state.progress.num_forwards
                sequences[state.request_id].num_passes = num_passes

        @after(pages, "forget_keys")
        def forgot(done: bool) -> None:
            nonlocal epoch
            epoch += done

        @after(pages._blocks, "get_new_blocks")
        def allocated(blocks: Any, *_: Any) -> None:
            ids = {block.block_id for block in blocks} - copied_pages(llm)
            runner_of(llm).rank.pages.memory[sorted(ids)] = torch.nan

        return sequences

    return record


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "seed" in metafunc.fixturenames:
        metafunc.parametrize(
            "seed", range(len(ENGINES) * metafunc.config.getoption("red_team"))
        )


def logits_over(run: Decoding, canvas: Sequence[int | None]) -> np.ndarray:
    """Logits of the response, from a pass over a prompt that may be shared."""
    buffer, start = run.buffer or Buffer.of(run), len(run.prompt)
    run.canvas[start:] = [run.model.mask if t is None else t for t in canvas]
    first = start - run.model.shifts
    logits = buffer.forward(run.seen, run.seen)[first : first + len(canvas)]
    return logits.double().numpy()


def test_random_requests_share_prompts(engines, reference_checkpoints, admitted, seed):
    draw = random.Random(seed)
    method, options = ENGINES[seed % len(ENGINES)]
    checkpoint = reference_checkpoints / draw.choice(("llada-tiny-a", "dream-tiny-a"))
    model = PlainModel(checkpoint)
    anchor_tokens = draw.choice([0, 0, 5, PAGE_SIZE])
    llm = engines(
        checkpoint,
        cache_method=method,
        cache_options=options,
        page_size=PAGE_SIZE,
        kv_cache_memory_bytes=draw.choice([3, 16]) << 20,
        max_num_seqs=draw.choice([3, 16]),
        max_num_batched_tokens=draw.choice([256, 2048]),
        steps_per_dispatch=draw.choice([1, 4]),
        share_prompts=True,
        anchor_tokens=anchor_tokens,
    )
    assert llm.reset_prefix_cache()
    client, poison = Client(llm, draw, draw_requests(draw, model)), Poison(llm)
    sequences = admitted(llm, client.sent)
    while client.waiting or llm.llm_engine.has_unfinished_requests():
        client.step()
        poison()
        if held_pages(llm):
            assert not llm.reset_prefix_cache()
    assert_nothing_left(llm)

    # The plain version, sequence by sequence.
    kept: dict[str, SharedPrompts] = {}
    certain: set[tuple[str, int]] = set()
    """Pages that hold what no rounding may have decided."""
    ends = llm.llm_engine.vllm_config.model_config.hf_config.eos_token_id
    num_compared = num_found = 0
    for name, sequence in sequences.items():
        request, copied = sequence.request, sequence.copied
        if not certain.issuperset([*sequence.found, *([copied] if copied else [])]):
            continue
        shared = SharedPrompts(
            PAGE_SIZE,
            anchor_tokens,
            keeps_responses=method != "none",
            update_step=options.get("update_delay", 1) if method == "sparse" else 0,
            num_passes=sequence.num_passes,
            by_token=request.decision is not None,
        )
        for number, (writer, page) in enumerate(sequence.found):
            text = tuple(request.prompt[: (page + 1) * PAGE_SIZE])
            assert number == page
            assert sequences[writer].epoch == sequence.epoch
            assert sequences[writer].request.salt == request.salt
            shared.pages[text] = kept[writer].pages[text]
        if copied is not None:
            writer, page = copied
            text = tuple(request.prompt[: page * PAGE_SIZE])
            shared.following[text] = kept[writer].following[text]
        tokens, order = noise_of(
            request.asked.get("seed", 0) + sequence.number, len(model.head)
        )
        if request.decision is None:
            run = decode(
                *(model, request.prompt, method, options),
                **{key: value for key, value in request.asked.items() if key != "n"},
                order_noise=order,
                uniform=tokens if "temperature" in request.asked else None,
                shared=shared,
            )
        else:
            decision, fields, literals = request.decision
            template = list(decision.template)
            size = len(template)
            run = Decoding(
                *(model, request.prompt, size, size),
                response_template=template,
                shared=shared,
            )
            by_pass = decide_in_passes(
                *(fields, literals, template, partial(logits_over, run)),
                *([ends], request.asked["passes"]),
            )
            if not request.is_aborted:
                assert request.figures.forward_passes == len(by_pass)
                for expected in by_pass:
                    assert_fields_are(request.figures.decision, expected)
        assert run.num_found == sequence.num_read
        shared.end(run)
        kept[name] = shared
        num_certain = run.length if run.closest > COIN_TOSS else run.buffer.num_sharable
        certain |= {(name, page) for page in range(-(-num_certain // PAGE_SIZE))}
        if run.closest > COIN_TOSS and request.decision is None:
            answer = request.tokens.get(sequence.number, [])
            assert answer == run.tokens[: len(answer) if request.is_aborted else None]
            num_compared += 1
            num_found += bool(sequence.num_read)
    assert num_compared >= NUM_REQUESTS // 2
    assert num_found >= NUM_REQUESTS // 4
