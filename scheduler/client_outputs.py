"""Outputs on their way to the front ends."""

from collections import defaultdict

from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.request import Request


class ClientOutputs:
    """Outputs that wait for each client, which is a front end of vLLM."""

    def __init__(self, *, tells_ended: bool) -> None:
        """``tells_ended``: clients also get the ids of requests that ended."""
        self.tells_ended = tells_ended
        self._outputs: defaultdict[int, list[EngineCoreOutput]] = defaultdict(list)
        self._ended: defaultdict[int, set[str]] = defaultdict(set)

    def __len__(self) -> int:
        """Outputs that wait to be taken."""
        return sum(map(len, self._outputs.values()))

    def add(self, request: Request, output: EngineCoreOutput) -> None:
        self._outputs[request.client_index].append(output)

    def end(self, request: Request) -> None:
        """Note that a request has ended, for whatever reason."""
        if self.tells_ended:
            self._ended[request.client_index].add(request.request_id)

    def take(self, stats: SchedulerStats | None) -> dict[int, EngineCoreOutputs]:
        """Take all outputs, by client. One client gets ``stats``, also when no client
        has output.
        """
        messages = {
            client: EngineCoreOutputs(outputs=outputs)
            for client, outputs in self._outputs.items()
        }
        for client, ids in self._ended.items():
            messages.setdefault(client, EngineCoreOutputs()).finished_requests = ids
        if stats is not None:
            client = next(iter(messages), 0)
            messages.setdefault(client, EngineCoreOutputs()).scheduler_stats = stats
        self._outputs.clear()
        self._ended.clear()
        return messages
