"""``sparse`` with many requests in flight, against the ideal of its shapes and against a plain loop over the requests.

The ideal is the sum over the forward passes of the floor at their shapes: linear layers, attention and head of the
whole batch (``dllm_engine/bench/floor.py``), measured in this run. The loop is the same method in
plain PyTorch, one request after the other. All three take turns.

Where a response is not the loop's, both are followed to their first decision that differs (which tokens a layer
retained, which position was filled, or with what), and the numbers that it went by are computed again, in float32 and
float64, from what both had decided before: a tie, if the two alternatives are within 1e-4 of each other.

    python benchmarks/batched_sparse.py [--requests 32 --rounds 3] [--output FILE.json]

Weights are random, but the same on both sides: the engine loads what this program writes.
"""

import argparse
import itertools
import json
import statistics
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from random_engine import llada_config
from safetensors.torch import save_file
from vllm import RequestOutput

from dllm_engine import LLM, DiffusionParams
from dllm_engine.bench.floor import Floor, PassShape
from dllm_engine.bench.machine import CLOCKS, machine, now, use_clock
from dllm_engine.bench.passes import ForwardPass, PassWatch, runner_of
from dllm_engine.bench.plain import KeysValues, PlainCanvas, PlainDecoder
from dllm_engine.families import family_of
from dllm_engine.model_executor.models.llada import LLaDAModelLM
from dllm_engine.scheduler.methods.sparse import SparseOptions
from dllm_engine.scheduler.methods.sparse import plan as plan_sparse
from dllm_engine.scheduler.request import DecodingSpec, Progress
from dllm_engine.scheduler.resolve import resolve_decoding
from dllm_engine.scheduler.step_plan import RefreshState
from dllm_engine.sizing import load_config


@dataclass(frozen=True)
class Step:
    """What a forward pass decided."""

    retained: list[list[int]]
    """Canvas positions per layer, ascending; of an UPDATE step."""
    position: int
    """The one that it filled,"""
    token: int
    """with this."""
    scores: list[torch.Tensor] = field(default_factory=list, compare=False)
    """Per layer, pooled scores of all canvas positions; of an UPDATE step."""
    p: torch.Tensor | None = field(default=None, compare=False)
    """``[canvas, vocabulary]``: probabilities of the tokens, where asked for; of masked positions."""


@torch.inference_mode()
def decode_sparse(
    model: PlainDecoder, prompt: list[int], spec: DecodingSpec, follow: Sequence[Step] = (), *, with_p: bool = False
) -> Iterator[Step]:
    """Sparse-dLLM, Algorithm 4, for one request with one token per step. The first steps decide as ``follow`` did."""
    options = spec.cache
    assert isinstance(options, SparseOptions)
    canvas = PlainCanvas(model, prompt, spec)
    everywhere = torch.arange(spec.canvas_length)
    num_forwards = 0
    for block in range(spec.num_blocks):
        span, step = slice(*spec.block_span(block)), 0
        outside = torch.cat((everywhere[: span.start], everywhere[span.stop :]))
        kept: list[KeysValues] = []
        while (masked := canvas.masked(spec.block_span(block))).numel():
            plan = plan_sparse(spec, Progress(block, step, masked.numel(), num_forwards))
            given = follow[num_forwards] if num_forwards < len(follow) else None
            rows = everywhere[slice(*plan.span)]
            x, phases = model.embed(canvas.tokens[rows]), model.phases(rows)
            retained, scores = [], []
            for number in range(model.shape.num_layers):
                reused = kept[number] if plan.state is RefreshState.REUSE else None
                x, q, (k, v) = model.layer(number, x, phases, reused)
                if plan.state is RefreshState.UPDATE:
                    mean = q[:, span].mean(dim=1).unflatten(0, (k.shape[0], -1)).sum(dim=1)
                    raw = torch.einsum("gd,gtd->t", mean, k[:, outside])
                    size = options.pool_kernel_size
                    pooled = F.max_pool1d(raw[None], size, stride=1, padding=size // 2)[0]
                    chosen = outside[pooled.topk(plan.retained).indices.sort().values]
                    if given is not None:
                        chosen = torch.tensor(given.retained[number])
                    kept.append((k[:, chosen], v[:, chosen]))
                    retained.append(chosen.tolist())
                    scores.append(pooled.new_zeros(spec.canvas_length).index_copy_(0, outside, pooled))
            p = None
            if with_p:
                p = x.new_zeros(spec.canvas_length, model.shape.vocab_size)
                p[masked] = model.logits(x[masked - plan.span.start]).softmax(dim=-1)
            if given is None:
                canvas.fill(x, plan.span.start, plan.quota)
            else:
                canvas.tokens[given.position] = given.token
            position = int(masked[canvas.tokens[masked] != model.mask_token_id])
            yield Step(retained, position, int(canvas.tokens[position]), scores, p)
            num_forwards += 1
            step += 1


def traced_steps(output: RequestOutput) -> list[Step]:
    """What the engine decided, from the record of an engine that traces."""
    response = output.outputs[0]
    retained = iter(response.diffusion.retained_positions)
    steps = []
    for state, (position,) in zip(response.diffusion.refresh_states, response.diffusion.unmasked_per_step, strict=True):
        of_layers = next(retained) if state == RefreshState.UPDATE.value else []
        steps.append(Step(of_layers, position, response.token_ids[position - len(output.prompt_token_ids)]))
    return steps


def first_difference(
    models: Sequence[PlainDecoder], prompt: list[int], spec: DecodingSpec, one: list[Step], other: list[Step]
) -> dict[str, Any]:
    """The first decision that differs, and how far its alternatives are apart, over the larger, by each model."""
    number = next(i for i, (a, b) in enumerate(zip(one, other, strict=True)) if a != b)
    a, b = one[number], other[number]
    gaps = []
    for model in models:
        steps = decode_sparse(model, prompt, spec, one[:number], with_p=True)
        step = next(itertools.islice(steps, number, None))
        assert step.p is not None
        if a.retained != b.retained:
            what = "retained"
            layer = next(i for i in range(len(a.retained)) if a.retained[i] != b.retained[i])
            disputed = step.scores[layer][sorted({*a.retained[layer]} ^ {*b.retained[layer]})]
        elif a.position != b.position:
            what = "position"
            disputed = step.p[[a.position, b.position]].amax(dim=-1)
        else:
            what = "token"
            disputed = step.p[a.position, [a.token, b.token]]
        gaps.append(float((disputed.max() - disputed.min()) / disputed.abs().max()))
    return {"step": number, "decision": what, "gaps": dict(zip(("float32", "float64"), gaps, strict=True))}


def released_tensors(model: PlainDecoder) -> dict[str, torch.Tensor]:
    """The weights under the names of a LLaDA checkpoint."""
    parts = "attn_norm ff_norm q_proj k_proj v_proj attn_out ff_proj up_proj ff_out".split()
    modules = ["wte", "ln_f", "ff_out"]
    modules += [f"blocks.{i}.{part}" for i in range(model.shape.num_layers) for part in parts]
    names = [f"model.transformer.{module}.weight" for module in modules]
    return {name: model.weights[LLaDAModelLM.locate(name)] for name in names}


def run_engine(llm: LLM, prompts: list[list[int]], params: DiffusionParams) -> tuple[float, list[ForwardPass], list]:
    """Seconds for all requests at once, the passes it took, and the responses."""
    engine, watch = llm.llm_engine, PassWatch(llm)
    for i, prompt in enumerate(prompts):
        engine.add_request(str(i), {"prompt_token_ids": prompt}, params)
    passes: list[ForwardPass] = []
    tokens: dict[str, list[int]] = {}
    seconds = 0.0
    with watch.watching():
        while engine.has_unfinished_requests():
            watch.before_dispatch()
            start = now()
            outputs = engine.step()
            seconds += now() - start
            passes += watch.take()
            tokens |= {output.request_id: list(output.outputs[0].token_ids) for output in outputs if output.finished}
    return seconds, passes, [tokens[str(i)] for i in range(len(prompts))]


def ideal_seconds(llm: LLM, passes: list[ForwardPass], repeats: int) -> float:
    """Sum of the floors of all passes; those of equal rows and keys count with the mean of their head's rows."""
    alike: dict[tuple[tuple[int, int], ...], list[int]] = {}
    for forward in passes:
        alike.setdefault(forward.shape.requests, []).append(forward.shape.head_rows)
    total = 0.0
    for requests, head_rows in alike.items():
        shape = PassShape(requests, round(statistics.mean(head_rows)))
        total += len(head_rows) * Floor(runner_of(llm).model, shape).median_seconds(repeats)
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hidden-size", type=int, default=512)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--vocab-size", type=int, default=8192)
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--prompt", type=int, default=224)
    parser.add_argument("--gen-length", type=int, default=32)
    parser.add_argument("--block-length", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--floor-repeats", type=int, default=3, help="of each shape's floor in each round")
    parser.add_argument("--clock", choices=CLOCKS, default="wall", help="processor: hardly sees what else runs here")
    parser.add_argument("--output", type=Path, help="also write the figures to this JSON file")
    options = parser.parse_args()
    use_clock(options.clock)
    config = llada_config(
        options.hidden_size,
        options.layers,
        options.heads,
        options.vocab_size,
        options.prompt + options.gen_length,
        "float32",
    )
    engine_settings: dict[str, Any] = {
        "skip_tokenizer_init": True,
        "dtype": "float32",
        "max_num_seqs": options.requests,
        "max_num_batched_tokens": options.requests * (options.prompt + options.gen_length),
        "cache_method": "sparse",
        "kv_cache_memory_bytes": 1 << 30,
    }
    with tempfile.TemporaryDirectory(prefix="dllm-sparse-") as name:
        folder = Path(name)
        (folder / "config.json").write_text(json.dumps(config | {"architectures": ["LLaDAModelLM"]}))
        hf_config = load_config(name)
        plain = PlainDecoder.random(hf_config, torch.float32)
        save_file(released_tensors(plain), folder / "model.safetensors")
        llm = LLM(model=name, **engine_settings)
        tracing = LLM(model=name, trace=True, **engine_settings)
    params = DiffusionParams(gen_length=options.gen_length, block_length=options.block_length, ignore_eos=True)
    spec = resolve_decoding(params, options.prompt, family_of(hf_config), runner_of(llm).options)
    draw = torch.Generator().manual_seed(0)
    prompts = torch.randint(options.vocab_size - 2, (options.requests, options.prompt), generator=draw).tolist()
    measured: dict[str, list[float]] = {"engine": [], "ideal": [], "loop": []}
    for number in range(options.rounds + 1):
        seconds, passes, tokens = run_engine(llm, prompts, params)
        ideal = ideal_seconds(llm, passes, options.floor_repeats)
        start = now()
        expected = [list(decode_sparse(plain, prompt, spec)) for prompt in prompts]
        loop = now() - start
        if number:  # the first round warms up
            for name, value in (("engine", seconds), ("ideal", ideal), ("loop", loop)):
                measured[name].append(value)
    traced = tracing.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
    assert [list(output.outputs[0].token_ids) for output in traced] == tokens
    ours = [traced_steps(output) for output in traced]
    responses = [[step.token for step in sorted(steps, key=lambda step: step.position)] for steps in expected]
    doubled = PlainDecoder(hf_config, {part: weight.double() for part, weight in plain.weights.items()})
    differences = [
        {"request": i} | first_difference((plain, doubled), prompts[i], spec, ours[i], expected[i])
        for i in range(options.requests)
        if ours[i] != expected[i]
    ]
    medians = {name: statistics.median(seconds) for name, seconds in measured.items()}
    pairs = list(zip(measured["engine"], measured["ideal"], measured["loop"], strict=True))
    figures: dict[str, Any] = {
        **{f"{name}_seconds": seconds for name, seconds in medians.items()},
        "ideal_over_engine": statistics.median(ideal / engine for engine, ideal, _ in pairs),
        "loop_over_engine": statistics.median(loop / engine for engine, _, loop in pairs),
        "loop_over_ideal": statistics.median(loop / ideal for _, ideal, loop in pairs),
        "equal_responses": sum(responses[i] == tokens[i] for i in range(options.requests)),
        "differences": differences,
    }
    print(
        f"sparse, {options.requests} requests of prompt {options.prompt} and response {options.gen_length}, block "
        f"{options.block_length}, one token per step, d={options.hidden_size}, {options.layers} layers, float32"
    )
    print(f"{machine()}, {options.clock} clock; medians of {options.rounds} interleaved rounds")
    print(f"engine {medians['engine']:.2f} s, ideal {medians['ideal']:.2f} s, plain loop {medians['loop']:.2f} s")
    print(f"ideal/engine {figures['ideal_over_engine']:.2f} (1: as fast as its floor)")
    print(f"plain loop/engine {figures['loop_over_engine']:.2f} (above 1: the engine is faster)")
    print(f"at the ideal it would be {figures['loop_over_ideal']:.2f} times as fast as the loop")
    print(f"equal responses: {figures['equal_responses']} of {options.requests}")
    if differences:
        about = ", ".join(f"{n} about {what}" for what, n in Counter(d["decision"] for d in differences).items())
        gaps = {dtype: max(d["gaps"][dtype] for d in differences) for dtype in ("float32", "float64")}
        print(
            f"requests that decide otherwise: {len(differences)}; first ones: {about}; alternatives at most "
            + " and ".join(f"{gap:.1e} in {dtype}" for dtype, gap in gaps.items())
            + " apart (a tie: 1e-4)"
        )
    if options.output:
        settings = {k: v for k, v in vars(options).items() if k != "output"}
        options.output.write_text(json.dumps({"machine": machine(), **settings, **figures}, indent=1) + "\n")


if __name__ == "__main__":
    main()
