"""``dllm inspect``: draw what the cache of one request retained, and the order of denoising.

Not ``inspect.py``: that is a module of Python.
"""

import argparse
from pathlib import Path

from dllm_engine.checkpoints import load_config
from dllm_engine.cli.engine import add_decoding_arguments, add_engine_arguments, add_structure_arguments, start_engine
from dllm_engine.demo import DEMO_MODELS
from dllm_engine.demo.tasks import make_examples
from dllm_engine.families import family_of
from dllm_engine.options import AUTO


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "inspect",
        help="draw which tokens the cache of a request retained, and the order of denoising",
        description="Answer PROMPT and draw, per block, which canvas positions each layer retained, how many layers "
        "retained each prompt token, and the step at which each token of the response was unmasked. Without "
        "--cache-method, a model that attends to the whole canvas is run with sparse.",
    )
    parser.add_argument(
        "prompt", nargs="?", metavar="PROMPT", help="default, for the demo model only: one of its tasks"
    )
    parser.add_argument(
        "--output",
        type=Path,
        metavar="FILE",
        default=Path("inspect.html"),
        help="an .html page (default: %(default)s)",
    )
    parser.add_argument("--raw", action="store_true", help="give the prompt to the model as it is, no chat template")
    add_decoding_arguments(parser)
    add_structure_arguments(parser)
    add_engine_arguments(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from dllm_engine.inspection.record import check_page_path

    prompt = args.prompt if args.prompt is not None else _demo_prompt(args.model)
    check_page_path(args.output)  # before the engine takes its time to start
    if args.cache_method == AUTO and family_of(load_config(args.model)).attention == "full":
        args.cache_method = "sparse"
    llm, params = start_engine(args, trace=True)
    messages = [{"role": "user", "content": prompt}]
    inspection = llm.inspect(prompt if args.raw or not llm.has_chat_template else messages, params)
    inspection.save(args.output)
    print(f"wrote {args.output}", *inspection.summary, sep="\n")
    return 0


def _demo_prompt(model: str) -> str:
    if model not in DEMO_MODELS:
        raise ValueError("give a PROMPT")
    (example,) = make_examples("facts", 1, seed=3, min_pairs=6, max_pairs=6, filler=0.4, asked=3)
    return example.prompt
