"""Run as a program: answers requests with a sharded engine and prints the tokens as JSON.

python -m tests.distributed.answer_cases CHECKPOINT TENSOR_PARALLEL_SIZE BACKEND < task.json

The task is ``{"engine": arguments of LLM, "requests": [{"prompt": token ids, "params": fields of DiffusionParams}]}``.
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
        skip_tokenizer_init=True,
        dtype="float32",
        max_model_len=512,
        trace=True,
        **task["engine"],
    )
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
        }
        for output in outputs
    ]
    print("ANSWERS " + json.dumps(answers), flush=True)


if __name__ == "__main__":
    main()
