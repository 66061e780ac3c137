"""New requests, as vLLM sends them."""

import random
from dataclasses import dataclass
from typing import Any

from vllm.v1.request import Request

from dllm_engine.decoding.page_layout import PoolGeometry
from dllm_engine.decoding.progress import Progress
from dllm_engine.options import EngineOptions
from dllm_engine.request_options.resolve import check_room, resolve_decoding
from dllm_engine.request_options.sampling_params import SOURCE, bytes_in
from dllm_engine.scheduler.scheduled_request import ScheduledRequest


@dataclass
class RequestResolver:
    """Resolver of new requests, by the same rules as the front end."""

    options: EngineOptions
    hf_config: Any
    geometry: PoolGeometry
    max_rows: int
    num_pages: int
    seeds: random.Random
    """Source of seeds for requests without one."""

    def resolve(self, request: Request) -> ScheduledRequest:
        """State of a new request; raises ``ValueError`` for one that cannot be served."""
        params = request.sampling_params
        if params is None or not request.prompt_token_ids:
            raise ValueError("a prompt of token ids and sampling parameters are needed")
        spec = resolve_decoding(
            params, len(request.prompt_token_ids), self.hf_config, self.options
        )
        check_room(spec, self.options, self.max_rows, self.geometry, self.num_pages)
        seed = params.seed if params.seed is not None else self.seeds.getrandbits(63)
        source = bytes_in(params, SOURCE)
        return ScheduledRequest(
            request,
            spec,
            Progress.begin(spec),
            seed,
            source.hex() if source else request.request_id,
        )
