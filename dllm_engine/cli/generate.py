"""``dllm generate``: answer one prompt, or a file of them."""

import argparse
import sys
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from dllm_engine.cli.batch import (
    BatchRequest,
    InputLine,
    ResultFile,
    parse_request,
    read_input,
    settings_digest,
)
from dllm_engine.cli.engine import (
    add_decoding_arguments,
    add_engine_arguments,
    check_for_all,
    has_chat_template,
    start_engine,
)
from dllm_engine.cli.errors import CommandError, one_line

if TYPE_CHECKING:
    from dllm_engine.llm import LLM
    from dllm_engine.params import DiffusionParams

SOME_FAILED = 1
_SETTINGS = (
    *("model", "dtype", "raw", "cache_method", "cache_option", "retention_ratio", "guide_model"),
    "guide_tokens_per_token",
    *("gen_length", "block_length", "steps", "unmasking", "threshold", "factor", "entropy_bound", "margin"),
    *("temperature", "top_p", "top_k", "seed", "ignore_eos"),
)
"""Arguments that a response depends on."""


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "generate",
        help="answer a prompt, or every line of a file",
        description="Answer PROMPT, or with --input and --output every line of a file. Such a run may be interrupted "
        "at any time; the same command goes on where it stopped.",
    )
    parser.add_argument("prompt", nargs="?", metavar="PROMPT")
    parser.add_argument(
        "--input",
        type=Path,
        metavar="FILE",
        help='JSON lines {"prompt": "…"} or {"messages": […]}, optionally with "id"',
    )
    parser.add_argument("--output", type=Path, metavar="FILE", help="JSON lines, in the order of finishing")
    parser.add_argument("--raw", action="store_true", help="give prompts to the model as they are, no chat template")
    parser.add_argument("--figures", action="store_true", help="print on stderr what the answer to PROMPT cost")
    add_decoding_arguments(parser)
    add_engine_arguments(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    if (args.prompt is None) == (args.input is None):
        raise CommandError("give either a PROMPT or --input FILE")
    if (args.input is None) != (args.output is None):
        raise CommandError("--input and --output go together")
    return _answer_prompt(args) if args.input is None else _answer_file(args)


def _answer_prompt(args: argparse.Namespace) -> int:
    llm, params = start_engine(args)
    request = BatchRequest(None, args.prompt, None)
    _enqueue(llm, request, params, use_chat=not args.raw and has_chat_template(llm))
    (output,) = llm.wait_for_completion(use_tqdm=False)
    completion = output.outputs[0]
    outcome = _outcome(completion)
    if "error" in outcome:
        raise CommandError(outcome["error"])
    print(completion.text.strip())
    if args.figures:
        figures = {"prompt_tokens": len(output.prompt_token_ids), "response_tokens": len(completion.token_ids)}
        for name, value in (figures | completion.diffusion.to_json()).items():
            print(f"{name}: {value}", file=sys.stderr)
    return 0


def _answer_file(args: argparse.Namespace) -> int:
    lines = read_input(args.input)
    settings = settings_digest({name: getattr(args, name) for name in _SETTINGS})
    with ResultFile(args.output, lines, settings) as results:
        if results.pending:
            llm, params = start_engine(args)
            check_for_all(llm, params)
            with tqdm(total=len(lines), initial=results.num_resumed, desc="Requests", unit="") as bar:
                answer_lines(llm, results, params, use_chat=not args.raw and has_chat_template(llm), bar=bar)
        print(
            f"{args.output}: {len(lines)} of {len(lines)} requests done, {results.num_resumed} of them by an earlier "
            f"run; errors: {results.num_errors}",
            file=sys.stderr,
        )
        return SOME_FAILED if results.num_errors else 0


def answer_lines(llm: "LLM", results: ResultFile, params: "DiffusionParams", *, use_chat: bool, bar: Any) -> None:
    """Answer what is pending in ``results``; a line that cannot be served gets an error record.

    The engine holds as many requests as it can run and as many to follow, so that its steps are full, memory stays
    bounded, and records are written as the requests finish.
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
                request = parse_request(line)
                request_id = request.id
                engine_id = _enqueue(llm, request, _params_of_line(params, line), use_chat=use_chat)
                running[engine_id] = (line, request)
            except (ValueError, VLLMClientError) as error:
                records.append(results.record(line, request_id, error=one_line(error)))
        for output in llm.llm_engine.step() if running else ():
            line, answered = running.pop(output.request_id)
            records.append(results.record(line, answered.id, **_outcome(output.outputs[0])))
        results.append(records)
        bar.update(len(records))


def _params_of_line(params: "DiffusionParams", line: InputLine) -> "DiffusionParams":
    """The same for every line but the seed: equal prompts draw different responses, and again the same on resuming."""
    params = params.clone()
    if params.seed is not None:
        params.seed += line.index
    return params


def _enqueue(llm: "LLM", request: BatchRequest, params: "DiffusionParams", *, use_chat: bool) -> str:
    """Hand a request to the engine; returns the id under which it will be reported."""
    if request.messages is not None and not use_chat:
        raise ValueError("'messages' need the tokenizer's chat template: the model has none, or --raw is set")
    if use_chat:
        messages = request.messages or [{"role": "user", "content": request.prompt}]
        (internal_id,) = llm.enqueue_chat(messages, params, use_tqdm=False)
    else:
        (internal_id,) = llm.enqueue([request.prompt], params, use_tqdm=False)
    # vLLM returns "<number>-<random>" and reports the number.
    return str(internal_id).split("-")[0]


def _outcome(completion: Any) -> dict[str, Any]:
    if completion.finish_reason not in ("stop", "length"):
        why = getattr(completion.diffusion, "error", None) or completion.finish_reason
        return {"error": f"the engine ended the request: {why}"}
    return {
        "text": completion.text,
        "token_ids": list(completion.token_ids),
        "finish_reason": completion.finish_reason,
        "figures": completion.diffusion.to_json(),
    }
