"""An engine's front end before its model is loaded: it refuses what the engine would refuse, minutes earlier."""

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from vllm.engine.arg_utils import EngineArgs
from vllm.renderers import renderer_from_config
from vllm.usage.usage_lib import UsageContext
from vllm.v1.engine.input_processor import InputProcessor

from dllm_engine.infill.answers import candidates
from dllm_engine.infill.template import Piece
from dllm_engine.llm import explained, vllm_arguments
from dllm_engine.params import DiffusionParams


class FrontEnd:
    """Settings, tokenizer and request checks of an engine that is not started.

    Args:
        arguments: those of ``LLM``.

    Raises:
        ValueError: as ``LLM`` before it loads weights.
    """

    def __init__(self, arguments: Mapping[str, Any]) -> None:
        names = {field.name for field in fields(EngineArgs)}
        known = {name: value for name, value in vllm_arguments(arguments).items() if name in names}
        with explained():
            self._config = EngineArgs(**known).create_engine_config(UsageContext.LLM_CLASS)
        renderer = renderer_from_config(self._config)
        self._input_processor = InputProcessor(self._config, renderer)
        self.tokenizer = renderer.get_tokenizer()

    @property
    def has_chat_template(self) -> bool:
        """True if the tokenizer can turn messages into a prompt."""
        return bool(getattr(self.tokenizer, "chat_template", None))

    def check(self, prompt: Any, params: DiffusionParams, template: Sequence[Piece] | None = None) -> None:
        """Raise ``ValueError`` for a request that the engine would refuse.

        Args:
            prompt: text, or ``{"prompt_token_ids": [...]}``.
            template: as for ``LLM.fill_in``.
        """
        asked = [params]
        if template is not None:
            asked = [
                candidate.params
                for candidate in candidates([template], params, self.tokenizer, self._config.model_config.max_model_len)
            ]
        for each in asked:
            self._input_processor.process_inputs("check", prompt, each, ("generate",))

    def check_params(self, params: DiffusionParams) -> None:
        """Raise ``ValueError`` for parameters that no prompt could be answered with."""
        not_a_mask = int(self._config.model_config.hf_config.mask_token_id == 0)
        self.check({"prompt_token_ids": [not_a_mask]}, params)
