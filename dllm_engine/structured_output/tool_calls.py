"""``tool_choice`` of requests over HTTP: a call that must be made is a JSON schema that the answer matches."""

from argparse import Namespace
from typing import Any

from vllm.entrypoints.generate.base.protocol import DeltaMessage, ExtractedToolCallInformation
from vllm.tool_parsers import ToolParserManager
from vllm.tool_parsers.abstract_tool_parser import ToolParser

from dllm_engine.scheduler.options.request_options import InvalidRequestError


class NoCalls(ToolParser):
    """Finds no calls in an answer that was free to have some."""

    def extract_tool_calls(self, model_output: str, request: Any) -> ExtractedToolCallInformation:
        return ExtractedToolCallInformation(tools_called=False, tool_calls=[], content=model_output)

    def extract_tool_calls_streaming(
        self, previous_text: str, current_text: str, delta_text: str, *tokens_and_request: Any
    ) -> DeltaMessage:
        return DeltaMessage(content=delta_text)


def serve_tool_calls(args: Namespace) -> None:
    """Change the arguments of ``vllm serve`` so that it answers ``tool_choice="required"`` and named functions.

    vLLM asks for a tool parser even where the answer is JSON. And for many it makes structural tags, which are not
    supported, of calls that must be made.
    """
    is_free = bool(args.enable_auto_tool_choice and args.tool_call_parser)
    base = ToolParserManager.get_tool_parser(args.tool_call_parser) if is_free else NoCalls

    class JSONCalls(base):  # type: ignore[misc, valid-type]
        structural_tag_model = None
        supports_required_and_named = True

        def adjust_request(self, request: Any) -> Any:
            if request.tools and request.tool_choice == "auto":
                if is_free:
                    return super().adjust_request(request)
                raise InvalidRequestError(
                    'tool_choice="auto" needs a server with --enable-auto-tool-choice and --tool-call-parser; set '
                    'tool_choice to "required", to a function or to "none"'
                )
            # Not the base's: it may ask for its model's own format.
            return ToolParser.adjust_request(self, request)

    args.tool_call_parser = args.tool_call_parser if is_free else "json_schema"
    args.enable_auto_tool_choice = True
    ToolParserManager.register_module(args.tool_call_parser, module=JSONCalls)
