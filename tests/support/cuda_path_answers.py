"""Answers prompts the way a GPU would, as far as a CPU can: every kernel's CUDA implementation (Triton, in
its interpreter) stands in for its CPU one, and the rest of the engine is as always.

Reads a JSON list of ``{"model", "settings", "recorded", "requests": [{"prompt", "params"}]}`` and writes the answers of
each, with how often each kernel ran, as the last line. With ``recorded``, a stand-in for CUDA graphs runs what can be
recorded.
"""

import json
import sys
from collections import Counter
from types import SimpleNamespace

import torch

from tests.support.engines import freeze_imports, generate, runner_of, start_engine
from tests.support.kernels import all_operators
from tests.support.stand_in_recorder import record_steps


def run_cuda_kernels() -> Counter[str]:
    """Let CPU tensors take the way of CUDA ones; returns a count of calls that grows."""
    calls: Counter[str] = Counter()
    # Asked for the number of processors to spread over.
    torch.cuda.get_device_properties = lambda device: SimpleNamespace(multi_processor_count=3)

    def counted(name, kernel):
        def run(*args):
            calls[name] += 1
            return kernel(*args)

        return run

    for name, operator in all_operators().items():
        if operator.triton_kernel:
            operator.kernel, operator.composite = counted(name, operator.triton_kernel), False
    return calls


def main() -> None:
    from dllm_engine import DiffusionParams

    freeze_imports()
    calls = run_cuda_kernels()
    results = []
    engines = []  # shutting one down would take vLLM's process groups from the others
    for task in json.load(sys.stdin):
        calls.clear()
        engines.append(start_engine(task["model"], **task["settings"]))
        replays = record_steps(runner_of(engines[-1])) if task["recorded"] else None
        params = [DiffusionParams(**request["params"]) for request in task["requests"]]
        outputs = generate(engines[-1], [request["prompt"] for request in task["requests"]], params)
        answers = [
            {"tokens": list(output.outputs[0].token_ids), "order": output.outputs[0].diffusion.unmasked_per_step}
            for output in outputs
        ]
        results.append({"answers": answers, "calls": dict(calls), "replays": replays and replays.num_replayed})
    print(json.dumps(results))


if __name__ == "__main__":
    main()
