"""An in-process engine with random weights of a given shape, for measuring: values do not change the time."""

import json
import os
import tempfile
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import torch

from dllm_engine import LLM
from dllm_engine.model_executor.model_runner import DiffusionModelRunner


def random_llada(
    *,
    hidden_size: int,
    num_layers: int,
    num_heads: int,
    vocab_size: int,
    max_model_len: int,
    dtype: str,
    max_num_seqs: int,
    **settings: Any,
) -> LLM:
    """A LLaDA of the given shape (MLP three times as wide, as in LLaDA-8B) without tokenizer.

    ``settings`` are further arguments of ``LLM``.
    """
    folder = Path(tempfile.mkdtemp(prefix="dllm-random-"))
    config = {
        "architectures": ["LLaDAModelLM"],
        "model_type": "llada",
        "d_model": hidden_size,
        "n_heads": num_heads,
        "n_layers": num_layers,
        "mlp_hidden_size": 3 * hidden_size,
        "vocab_size": vocab_size,
        "embedding_size": vocab_size,
        "max_sequence_length": max_model_len,
        "mask_token_id": vocab_size - 1,
        "eos_token_id": vocab_size - 2,
        "torch_dtype": dtype,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return LLM(
        model=str(folder),
        load_format="dummy",
        skip_tokenizer_init=True,
        dtype=dtype,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_seqs * max_model_len,
        **settings,
    )


def runner_of(llm: LLM) -> DiffusionModelRunner:
    """The model runner of an in-process engine."""
    runner = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
    assert isinstance(runner, DiffusionModelRunner)
    return runner


def machine() -> str:
    """What the figures were measured on."""
    name = next(
        (line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line),
        "unknown processor",
    )
    return f"{name}, {torch.get_num_threads()} threads, torch {torch.__version__}"
