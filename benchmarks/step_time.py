"""Time of a FULL step of the engine over its floor.

The floor is what no implementation of the step can leave out: the model's own linear layers, the attention call of
its layers and the head on the masked rows of the block, on the same weights, in the same process, with the same
threads. Engine and floor take turns; the figures are medians over the pairs.

    python benchmarks/step_time.py [--hidden-size 1024 --layers 8 --canvas 512 --pairs 9] [--output FILE.json]
"""

import argparse
import json
import statistics
import time
from pathlib import Path

import torch
from random_engine import machine, random_llada, runner_of

from dllm_engine import LLM, DiffusionParams
from dllm_engine.kernels.attention import bidirectional_attention
from dllm_engine.model_executor.models.decoder import DiffusionDecoder

BLOCK_LENGTH = 32


def floor_seconds(model: DiffusionDecoder, batch: int, canvas: int, masked_rows: int) -> float:
    """One pass of linear layers, attention and head alone."""
    shape = model.shape
    dtype = next(model.parameters()).dtype
    x = torch.randn(batch * canvas, shape.hidden_size, dtype=dtype)
    heads = torch.randn(batch * canvas, shape.num_heads, shape.head_dim, dtype=dtype)
    gated = torch.randn(batch * canvas, shape.intermediate_size, dtype=dtype)
    cu_seqlens = list(range(0, batch * canvas + 1, canvas))
    with torch.inference_mode():
        start = time.perf_counter()
        for layer in model.layers:
            layer.qkv_proj(x)
            bidirectional_attention(heads, heads, heads, cu_seqlens)
            layer.out_proj(x)
            layer.gate_up_proj(x)
            layer.down_proj(gated)
        model.lm_head.quant_method.apply(model.lm_head, x[:masked_rows])
        return time.perf_counter() - start


def measure(llm: LLM, batch: int, canvas: int, pairs: int) -> dict[str, float]:
    """Medians of engine step, floor, and their ratio, in milliseconds."""
    engine = llm.llm_engine
    model = runner_of(llm).model
    gen_length = canvas // 2
    for i in range(batch):
        engine.add_request(
            f"{batch}-{i}",
            {"prompt_token_ids": [1 + i] * (canvas - gen_length)},
            DiffusionParams(gen_length=gen_length, block_length=BLOCK_LENGTH, ignore_eos=True),
        )
    engine.step()
    floor_seconds(model, batch, canvas, batch * BLOCK_LENGTH)
    steps, floors = [], []
    for masked in range(BLOCK_LENGTH - 1, BLOCK_LENGTH - 1 - pairs, -1):
        start = time.perf_counter()
        engine.step()
        steps.append(time.perf_counter() - start)
        floors.append(floor_seconds(model, batch, canvas, batch * masked))
    engine.abort_request([f"{batch}-{i}" for i in range(batch)])
    while engine.has_unfinished_requests():
        engine.step()
    return {
        "batch": batch,
        "step_ms": 1e3 * statistics.median(steps),
        "floor_ms": 1e3 * statistics.median(floors),
        "floor_over_step": statistics.median(f / s for s, f in zip(steps, floors, strict=True)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hidden-size", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--vocab-size", type=int, default=32_768)
    parser.add_argument("--canvas", type=int, default=512)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--pairs", type=int, default=9, choices=range(1, BLOCK_LENGTH), metavar=f"1…{BLOCK_LENGTH - 1}")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--output", type=Path, help="also write the figures to this JSON file")
    options = parser.parse_args()
    llm = random_llada(
        hidden_size=options.hidden_size,
        num_layers=options.layers,
        num_heads=options.heads,
        vocab_size=options.vocab_size,
        max_model_len=options.canvas,
        dtype=options.dtype,
        max_num_seqs=max(options.batch),
    )
    print(f"FULL step, canvas {options.canvas}, d={options.hidden_size}, {options.layers} layers, {options.dtype}")
    print(f"{machine()}; medians of {options.pairs} interleaved pairs")
    print(f"{'batch':>6} {'step ms':>10} {'floor ms':>10} {'floor/step':>11}")
    figures = [measure(llm, batch, options.canvas, options.pairs) for batch in options.batch]
    for row in figures:
        print(f"{row['batch']:>6} {row['step_ms']:>10.1f} {row['floor_ms']:>10.1f} {row['floor_over_step']:>11.2f}")
    if options.output:
        settings = {k: v for k, v in vars(options).items() if k != "output"}
        options.output.write_text(json.dumps({"machine": machine(), **settings, "figures": figures}, indent=1) + "\n")


if __name__ == "__main__":
    main()
