"""Entry point of ``dllm``: runs a subcommand, with errors as one line."""

import atexit
import gc
import os
import sys
from collections.abc import Sequence

from dllm_engine.entry_points import PluginError
from dllm_engine.text import one_line


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status: 0, 1 (done, but some inputs failed),
    2 (error) or 130 (Ctrl-C).
    """
    atexit.register(
        gc.freeze
    )  # Python would look through all that vLLM imports once more, for seconds
    argv = sys.argv[1:] if argv is None else argv
    try:
        # Here, because another package may add options, and be broken.
        from dllm_engine.cli.commands import TRACEBACK_VARIABLE, build_parser
    except PluginError as error:
        print(f"dllm: error: {error}", file=sys.stderr)
        return 2
    parser = build_parser()
    args, unknown = parser.parse_known_args(argv)
    args.argv, args.unknown = argv, unknown
    try:
        return args.run(args)
    except KeyboardInterrupt:
        print("dllm: interrupted", file=sys.stderr)
        return 130
    except Exception as error:
        if args.traceback or os.environ.get(TRACEBACK_VARIABLE, "0") not in ("", "0"):
            raise
        print(f"dllm: error: {one_line(error)}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
