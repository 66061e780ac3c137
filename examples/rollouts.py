"""Rollouts for training a diffusion model: samples, their rewards, and how each token
came to be.

python examples/rollouts.py
"""

import json
from typing import Any

from dllm_engine import LLM, DiffusionParams

TASKS = {
    "Reverse: Rome Tom Oslo": "Oslo Tom Rome",
    "Tom=48. Ida=07. Max=31. Give: Ida, Tom": "Ida=07, Tom=48",
}
# With the tokens behind an end token, which later passes have seen: a trainer's canvas
# is then the engine's.
WHOLE: dict[str, Any] = {"ignore_eos": True, "return_order": True}
PARAMS = DiffusionParams(
    gen_length=16, block_length=8, temperature=2.0, n=4, seed=0, **WHOLE
)


def main() -> None:
    llm = LLM("demo")
    chats = [[{"role": "user", "content": question}] for question in TASKS]
    rollouts = [
        {
            "prompt_token_ids": output.prompt_token_ids,
            "response_token_ids": list(completion.token_ids),
            # Forward pass of each token.
            "committed_at": completion.diffusion.committed_at,
            # Of each token, in that pass.
            "logprobs": completion.diffusion.committed_logprobs,
            "reward": float(completion.text.strip() == answer),
        }
        for output, answer in zip(
            llm.chat(chats, PARAMS, use_tqdm=False), TASKS.values(), strict=True
        )
        for completion in output.outputs
    ]
    for rollout in rollouts:
        print(json.dumps(rollout))

    # A trainer computes the same log-probabilities: pass by pass, what is not committed
    # yet is masked.
    best = max(rollouts, key=lambda rollout: rollout["reward"])
    tokens = best["prompt_token_ids"] + best["response_token_ids"]
    start = len(best["prompt_token_ids"])
    committed_at = best["committed_at"]
    difference = 0.0
    for number in sorted(set(committed_at)):
        masked = [i for i, each in enumerate(committed_at) if each >= number]
        (logprobs,) = llm.masked_logprobs([(tokens, [start + i for i in masked])])
        for i, logprob in zip(masked, logprobs, strict=True):
            if committed_at[i] == number:
                difference = max(difference, abs(logprob - best["logprobs"][i]))
    print(f"largest difference of a log-probability computed again: {difference:.1e}")

    # After a training step, the engine takes the new weights, here from the same
    # folder.
    llm.collective_rpc("reload_weights")


if __name__ == "__main__":
    main()
