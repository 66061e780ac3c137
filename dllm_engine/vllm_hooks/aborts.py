"""What vLLM's output processor leaves behind when a request is aborted."""

from collections.abc import Callable, Iterable
from typing import Any


def dropping_parents(abort_requests: Callable[..., list[str]]) -> Callable[..., list[str]]:
    """A request with ``n`` > 1 is a parent of ``n`` children. Aborted by the id that its caller gave, vLLM drops the
    children only, and keeps the parent for ever."""

    def abort(self: Any, request_ids: Iterable[str], internal: bool) -> list[str]:
        request_ids = list(request_ids)
        children = request_ids if internal else [i for name in request_ids for i in self.external_req_ids.get(name, ())]
        states = [self.request_states[child] for child in children if child in self.request_states]
        parents = {state.parent_req for state in states if state.parent_req is not None}
        aborted = abort_requests(self, request_ids, internal)
        for parent in parents:
            if self.request_states.keys().isdisjoint(parent.child_requests):
                self.parent_requests.pop(parent.request_id, None)
        return aborted

    return abort
