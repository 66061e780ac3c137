"""``tool_choice`` of requests over HTTP. Required calls are JSON by a schema that the
answer matches. A tool parser finds the calls of a model that is free to make them."""

import shlex
from argparse import Namespace
from pathlib import Path
from typing import Any

from vllm.config import ModelConfig
from vllm.entrypoints.generate.base.protocol import (
    DeltaMessage,
    ExtractedToolCallInformation,
)
from vllm.logger import init_logger
from vllm.renderers.chat_utils import load_chat_template
from vllm.tokenizers import cached_tokenizer_from_config
from vllm.tool_parsers import ToolParserManager
from vllm.tool_parsers.abstract_tool_parser import ToolParser

from dllm_engine.demo import DEMO_MODELS
from dllm_engine.request_options.errors import InvalidRequestError

logger = init_logger(f"vllm.{__name__}")

HERMES = "hermes"
"""vLLM's parser of calls that are JSON with ``name`` and ``arguments`` between
``<tool_call>`` and ``</tool_call>``.
"""
_OTHER_FORMS = ("<function=", "<arg_key>")
"""Texts between these markers in templates whose calls are not JSON."""


class MadeCalls(ToolParser):
    """Base class of a server's tool parser: required calls are JSON by a schema. For
    many parsers vLLM would use structural tags, which are not supported."""

    structural_tag_model = None
    supports_required_and_named = True

    def adjust_request(self, request: Any) -> Any:
        if request.tools and request.tool_choice == "auto":
            return super().adjust_request(request)
        # Not the parser's method, which may ask for the format of its model.
        return ToolParser.adjust_request(self, request)


class NoCalls(ToolParser):
    """Parser of a server that does not know the form in which its model writes calls."""

    command = ""
    """Command that starts a server with a tool parser."""

    def adjust_request(self, request: Any) -> Any:
        raise InvalidRequestError(
            f'tool_choice="auto": this server does not know how the model writes '
            f"calls; start it with the parser of their form, for example: "
            f'{self.command}. Or set tool_choice to "required", to a function or to '
            f'"none"'
        )

    def extract_tool_calls(
        self, model_output: str, request: Any
    ) -> ExtractedToolCallInformation:
        return ExtractedToolCallInformation(
            tools_called=False, tool_calls=[], content=model_output
        )

    def extract_tool_calls_streaming(
        self,
        previous_text: str,
        current_text: str,
        delta_text: str,
        *tokens_and_request: Any,
    ) -> DeltaMessage:
        return DeltaMessage(content=delta_text)


def parser_for(template: str | None) -> str | None:
    """The tool parser for the form of calls that a chat template describes; None if it
    describes no calls, or a form that no diffusion model has so far."""
    if template is None or any(form in template for form in _OTHER_FORMS):
        return None
    return (
        HERMES
        if all(part in template for part in ("<tool_call>", "name", "arguments"))
        else None
    )


def chat_template(args: Namespace, model_config: ModelConfig) -> str | None:
    """The template of a server's chats with tools."""
    if model_config.skip_tokenizer_init:
        return None
    # Imported here, because it imports much.
    from vllm.renderers.hf import resolve_chat_template

    tokenizer = cached_tokenizer_from_config(model_config)
    return resolve_chat_template(
        tokenizer,
        load_chat_template(args.chat_template),
        tools=[],
        model_config=model_config,
    )


def serve_tool_calls(args: Namespace, model_config: ModelConfig) -> None:
    """Change the arguments of ``vllm serve`` so that it answers every ``tool_choice``.
    ``"auto"`` works only if the arguments name a parser, or the chat template describes
    the form of calls.

    vLLM needs a parser even if the answer is JSON.
    """
    named = args.tool_call_parser
    if named is None and (described := parser_for(chat_template(args, model_config))):
        logger.info(
            "The chat template describes calls as --tool-call-parser %s reads them; "
            "taking it",
            described,
        )
        args.tool_call_parser = described
        args.enable_auto_tool_choice = True
    if args.enable_auto_tool_choice:
        parser = ToolParserManager.get_tool_parser(args.tool_call_parser)
    else:
        args.tool_call_parser = "json_schema"
        args.enable_auto_tool_choice = True
        model = shlex.quote(_name_for_clients(args.model))
        command = (
            f"dllm serve {model} --enable-auto-tool-choice --tool-call-parser "
            f"{named or HERMES}"
        )
        parser = type("UnknownCalls", (NoCalls,), {"command": command})
    if not issubclass(parser, MadeCalls):
        both = type(parser.__name__, (MadeCalls, parser), {})
        ToolParserManager.register_module(args.tool_call_parser, module=both)


def _name_for_clients(model: str) -> str:
    """Name of a model in a command that clients see. Folders are hidden, because vLLM
    tells clients no paths.
    """
    demo = next((name for name, folder in DEMO_MODELS.items() if folder == model), None)
    if demo is not None:
        return demo
    return "MODEL" if Path(model).is_dir() else model
