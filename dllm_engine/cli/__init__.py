"""The command ``dllm``.

Each subcommand is a file: its docstring is the command's help, ``add_arguments``
declares its arguments, and ``run`` prints the results and returns the exit status.
Commands share ``arguments.py`` and ``engine.py``.
"""

TRACEBACK_VARIABLE = "DLLM_TRACEBACK"
"""Environment variable that makes commands raise errors instead of printing one line.
"""
