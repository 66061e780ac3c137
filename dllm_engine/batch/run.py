"""A batch run on one engine: requests go in as there is room, records come out as they finish."""

from collections import deque
from typing import TYPE_CHECKING, Any

from dllm_engine.batch.files import BatchRequest, InputLine, ResultFile
from dllm_engine.text import one_line

if TYPE_CHECKING:
    from dllm_engine.llm import LLM
    from dllm_engine.params import DiffusionParams


def answer_lines(llm: "LLM", results: ResultFile, params: "DiffusionParams", *, use_chat: bool, bar: Any) -> None:
    """Answer what is pending in ``results``; a line that cannot be served gets an error record.

    The engine holds twice as many requests as it can run at once. So its steps are full, memory stays bounded, and
    records are written as requests finish. ``bar`` is tqdm's.
    """
    from vllm.exceptions import VLLMClientError

    window = 2 * llm.llm_engine.vllm_config.scheduler_config.max_num_seqs
    pending = deque(results.pending)
    running: dict[str, tuple[InputLine, BatchRequest]] = {}
    while pending or running:
        records = []
        while pending and len(running) < window:
            line = pending.popleft()
            request_id: str | int | None = None
            try:
                request = line.parse()
                request_id = request.id
                own = params.clone()
                if own.seed is not None:  # equal prompts get different responses, and a resumed run the same ones
                    own.seed += line.index
                engine_id = enqueue(llm, request, own, use_chat=use_chat)
                running[engine_id] = (line, request)
            except (ValueError, VLLMClientError) as error:
                records.append(results.record(line, request_id, error=one_line(error)))
        for output in llm.llm_engine.step() if running else ():
            line, answered = running.pop(output.request_id)
            records.append(results.record(line, answered.id, **outcome(output.outputs[0])))
        results.append(records)
        bar.update(len(records))


def enqueue(llm: "LLM", request: BatchRequest, params: "DiffusionParams", *, use_chat: bool) -> str:
    """Add a request to the engine; returns the id that its outputs will have."""
    if request.messages is not None and not use_chat:
        raise ValueError("'messages' need the tokenizer's chat template: the model has none, or --raw is set")
    if use_chat:
        (internal_id,) = llm.enqueue_chat(request.as_messages(), params, use_tqdm=False)
    else:
        (internal_id,) = llm.enqueue([request.prompt], params, use_tqdm=False)
    # vLLM returns "<number>-<random>" and reports the number.
    return str(internal_id).split("-")[0]


def outcome(completion: Any) -> dict[str, Any]:
    """The fields of a record that say how its request ended: text and figures, or an ``error``."""
    if completion.finish_reason not in ("stop", "length"):
        why = getattr(completion.diffusion, "error", None) or completion.finish_reason
        return {"error": f"the engine ended the request: {why}"}
    return {
        "text": completion.text,
        "token_ids": list(completion.token_ids),
        "finish_reason": completion.finish_reason,
        "figures": completion.diffusion.to_json(),
    }
