"""Entry point of ``dllm``: runs a subcommand, with errors as one line."""

import atexit
import gc
import os
import sys
from collections.abc import Sequence

from dllm_engine.cli import TRACEBACK_VARIABLE
from dllm_engine.entry_points import PluginError
from dllm_engine.text import one_line


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status: 0, 1 (done, but some inputs failed),
    2 (error) or 130 (Ctrl-C).
    """
    # Otherwise Python's last garbage collection of all imports of vLLM takes seconds.
    atexit.register(gc.freeze)
    argv = sys.argv[1:] if argv is None else argv
    try:
        # Imported here, because options come from other packages too, and one may be
        # broken.
        from dllm_engine.cli.commands import build_parser

        parser = build_parser()
    except PluginError as error:
        if _shows_traceback("--traceback" in argv):
            raise
        print(f"dllm: error: {error}", file=sys.stderr)
        return 2
    if not argv:
        parser.print_help()
        return 0
    args, unknown = parser.parse_known_args(argv)
    args.argv, args.unknown = argv, unknown
    try:
        return args.run(args)
    except KeyboardInterrupt:
        print("dllm: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader has closed the pipe, as in `dllm models | head`. Without this,
        # Python prints an error at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:
        if _shows_traceback(args.traceback):
            raise
        print(f"dllm: error: {one_line(error)}", file=sys.stderr)
        return 2


def _shows_traceback(is_asked_for: bool) -> bool:
    return is_asked_for or os.environ.get(TRACEBACK_VARIABLE, "0") not in ("", "0")


if __name__ == "__main__":
    sys.exit(main())
