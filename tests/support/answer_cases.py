"""Run as a program: answers requests with a sharded engine and prints the tokens as JSON.

python -m tests.support.answer_cases CHECKPOINT TENSOR_PARALLEL_SIZE BACKEND < task.json

The task is ``{"engine": arguments of LLM, "requests": [{"prompt": token ids, "params": fields of DiffusionParams}]}``,
and may have ``"aborted"``: such requests that run for two steps and are aborted before the others begin.
Where the engine's core is in this process (VLLM_ENABLE_V1_MULTIPROCESSING=0), it also prints the pages after each step.
"""

import json
import sys

from dllm_engine import LLM, DiffusionParams


def main() -> None:
    checkpoint, size, backend = sys.argv[1:]
    task = json.load(sys.stdin)
    requests = task["requests"]
    llm = LLM(
        checkpoint,
        tensor_parallel_size=int(size),
        distributed_executor_backend=backend,
        dtype="float32",
        trace=True,
        **{"skip_tokenizer_init": True, "max_model_len": 512, **task["engine"]},
    )
    pages = watch_pages(llm)
    aborted = task.get("aborted", [])
    for number, request in enumerate(aborted):
        prompt = {"prompt_token_ids": request["prompt"]}
        llm.llm_engine.add_request(f"aborted {number}", prompt, DiffusionParams(**request["params"]))
    for _ in range(2 if aborted else 0):
        llm.llm_engine.step()
    llm.llm_engine.abort_request([f"aborted {number}" for number in range(len(aborted))])
    outputs = llm.generate(
        [{"prompt_token_ids": request["prompt"]} for request in requests],
        [DiffusionParams(**request["params"]) for request in requests],
        use_tqdm=False,
    )
    answers = [
        {
            "tokens": list(output.outputs[0].token_ids),
            "order": output.outputs[0].diffusion.unmasked_per_step,
            "forward_passes": output.outputs[0].diffusion.forward_passes,
            "retained": output.outputs[0].diffusion.retained_positions,
            "selected": output.outputs[0].diffusion.selected_positions,
            "trace": output.outputs[0].diffusion.trace,
            "tokens_computed": output.outputs[0].diffusion.tokens_computed,
        }
        for output in outputs
    ]
    print("PAGES " + json.dumps(pages), flush=True)
    print("ANSWERS " + json.dumps(answers), flush=True)


def watch_pages(llm: LLM) -> list[tuple[int, int, int]]:
    """Pages reserved when a step is planned, and allocated and reserved after it; a list that fills as the engine
    runs."""
    seen: list[tuple[int, int, int]] = []
    core = getattr(llm.llm_engine.engine_core, "engine_core", None)
    if core is not None:
        pages, schedule, update = core.scheduler.pages, core.scheduler.schedule, core.scheduler.update_from_output
        planned = [0]

        def counting_schedule(*args, **kwargs):
            output = schedule(*args, **kwargs)
            planned[0] = pages.num_reserved
            return output

        def counting_update(*args, **kwargs):
            outputs = update(*args, **kwargs)
            seen.append((planned[0], pages.num_allocated, pages.num_reserved))
            return outputs

        core.scheduler.schedule, core.scheduler.update_from_output = counting_schedule, counting_update
    return seen


if __name__ == "__main__":
    main()
