"""``dllm profile``: measure how much each layer changes its tokens, for MaskKV's layer budgets.

Not ``profile.py``: that is a module of Python.
"""

import argparse
import json
from pathlib import Path

import numpy as np
from tqdm import tqdm

from dllm_engine.batch.files import BatchRequest, read_input
from dllm_engine.checkpoints import load_config
from dllm_engine.cli.arguments import positive_int
from dllm_engine.cli.engine import add_engine_arguments, engine_arguments, load, prepare
from dllm_engine.demo import DEMO_MODEL
from dllm_engine.demo.tasks import make_examples
from dllm_engine.evaluation.result_file import check_folder_of
from dllm_engine.families import check_profiled, family_of
from dllm_engine.text import format_table

DEMO_PROMPTS = 60
"""As many as the paper calibrates with."""


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "profile",
        help="measure the importance of a model's layers, for cache_method=maskkv",
        description="Runs one forward pass over each prompt and a masked response, and averages per layer 1 - cosine "
        "between what enters and what leaves it, or its attention. `--cache-option profile=FILE` uses the result.",
    )
    parser.add_argument("model", metavar="MODEL", help="folder or Hugging Face name of a checkpoint, or `demo`")
    parser.add_argument(
        "--prompts",
        type=Path,
        metavar="FILE",
        help="calibration prompts, JSON lines as for `dllm generate --input`; default, for the demo model only: its "
        "tasks",
    )
    parser.add_argument(
        "--gen-length", type=positive_int, metavar="N", default=32, help="masked tokens after a prompt (default: 32)"
    )
    parser.add_argument(
        "--output", type=Path, metavar="FILE", default=Path("profile.json"), help="default: %(default)s"
    )
    add_engine_arguments(parser, with_model=False)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    if args.prompts is None and args.model != DEMO_MODEL:
        raise ValueError("give --prompts FILE with prompts like those the model will see")
    check_profiled(family_of(load_config(args.model)))
    check_folder_of(args.output)
    if args.prompts is not None:
        requests = [line.parse() for line in read_input(args.prompts)]
    else:
        examples = make_examples("facts", DEMO_PROMPTS, seed=0, filler=0.6)
        requests = [BatchRequest(prompt=example.prompt) for example in examples]
    prepare(args)
    llm = load(engine_arguments(args))
    prompts = [request.prompt_tokens(llm.get_tokenizer()) for request in requests]
    measured = [llm.profile_layers(prompt, args.gen_length) for prompt in tqdm(prompts, desc="Prompts", unit="")]
    importance = {name: np.mean([each[name] for each in measured], axis=0).tolist() for name in measured[0]}
    profile = {"model": args.model, "num_prompts": len(prompts), "gen_length": args.gen_length, **importance}
    args.output.write_text(json.dumps(profile, indent=2) + "\n", encoding="utf-8")
    per_layer = zip(*importance.values(), strict=True)
    rows = [(str(i), *(f"{score:.4f}" for score in scores)) for i, scores in enumerate(per_layer)]
    print(format_table([("LAYER", "IMPORTANCE", "OF ATTENTION"), *rows]))
    print(f"wrote {args.output}; use it with --cache-method maskkv --cache-option profile={args.output}")
    return 0
