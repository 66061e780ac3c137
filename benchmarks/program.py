"""What these programs share: arguments, an engine with random weights, tables and result files."""

import argparse
import json
import os
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

from dllm_engine import LLM
from dllm_engine.checkpoints import named_shape
from dllm_engine.evaluation.bench import random_engine
from dllm_engine.evaluation.hardware import machine_line, provenance
from dllm_engine.text import format_table, json_rows

Rows = list[dict[str, Any]]


def argument_parser(docstring: str) -> argparse.ArgumentParser:
    """A parser with the options of every program."""
    parser = argparse.ArgumentParser(description=docstring.splitlines()[0])
    parser.add_argument("--output", type=Path, help="also write the figures to this JSON file")
    return parser


def add_model_arguments(
    parser: argparse.ArgumentParser, *, hidden_size: int, layers: int, heads: int, vocab_size: int
) -> None:
    """Options of ``start_engine``, with these defaults."""
    parser.add_argument("--model", help="random weights of a named shape, such as llada-8b, in place of these sizes")
    parser.add_argument("--hidden-size", type=int, default=hidden_size)
    parser.add_argument("--layers", type=int, default=layers)
    parser.add_argument("--heads", type=int, default=heads)
    parser.add_argument("--vocab-size", type=int, default=vocab_size)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument(
        "--gpu-memory-utilization",
        type=float,
        default=0.6,
        metavar="SHARE",
        help="of a GPU that must be free when an engine starts; earlier engines of a run keep theirs (default: 0.6)",
    )


def llada_config(options: argparse.Namespace, max_model_len: int) -> dict[str, Any]:
    """A LLaDA's ``config.json``, with an MLP three times as wide, as in LLaDA-8B."""
    return {
        "model_type": "llada",
        "d_model": options.hidden_size,
        "n_heads": options.heads,
        "n_layers": options.layers,
        "mlp_hidden_size": 3 * options.hidden_size,
        "vocab_size": options.vocab_size,
        "embedding_size": options.vocab_size,
        "max_sequence_length": max_model_len,
        "mask_token_id": options.vocab_size - 1,
        "eos_token_id": options.vocab_size - 2,
        "torch_dtype": options.dtype,
    }


def start_engine(options: argparse.Namespace, max_model_len: int, max_num_seqs: int, **settings: Any) -> LLM:
    """A model in this process with random weights of the asked shape and without tokenizer, a LLaDA unless it is named.

    Keep every engine until the program ends: one that is dropped takes vLLM's process groups from the others.
    """
    defaults = {
        "max_num_batched_tokens": max_num_seqs * max_model_len,
        "kv_cache_memory_bytes": 1 << 30,
        "gpu_memory_utilization": options.gpu_memory_utilization,
    }
    return random_engine(
        named_shape(options.model) if options.model else llada_config(options, max_model_len),
        dtype=options.dtype,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        **defaults | settings,
    )


def finish_requests(llm: LLM, request_ids: list[str]) -> None:
    """Abort requests and run the engine until none is left."""
    llm.llm_engine.abort_request(request_ids)
    while llm.llm_engine.has_unfinished_requests():
        llm.llm_engine.step()


def report(options: argparse.Namespace, **sections: Any) -> None:
    """Print the machine and the sections, of which lists of rows are tables; write all of it to ``--output``."""
    print(machine_line(provenance()))
    for name, section in sections.items():
        if isinstance(section, list) and section and isinstance(section[0], dict):
            columns = list(dict.fromkeys(column for row in section for column in row))
            cells = [[_text(row.get(column, "")) for column in columns] for row in section]
            print(f"\n{name}\n{format_table([columns, *cells])}")
        else:
            print(f"{name}: {_text(section)}")
    write(options, **sections)


def write(options: argparse.Namespace, **sections: Any) -> None:
    """Write machine, settings and sections to ``--output``, if it was given."""
    if options.output:
        settings = {
            name: str(value) if isinstance(value, Path) else value
            for name, value in vars(options).items()
            if name != "output"
        }
        content = rounded({"machine": provenance(), "settings": settings} | sections)
        options.output.write_text(json_rows(content, depth=2) + "\n", encoding="utf-8")


def rounded(value: Any) -> Any:
    """The same with floats of five significant digits: no measurement here has more."""
    if isinstance(value, float):
        return float(f"{value:.5g}")
    if isinstance(value, dict):
        return {key: rounded(v) for key, v in value.items()}
    return [rounded(v) for v in value] if isinstance(value, list | tuple) else value


def _text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return value if isinstance(value, str) else json.dumps(value)
