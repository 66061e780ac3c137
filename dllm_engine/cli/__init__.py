"""The command ``dllm``.

Each subcommand is a file: its docstring is the command's help, ``add_arguments``
declares its arguments, and ``run`` prints and returns the exit status. They share
``arguments.py`` and ``engine.py``.
"""

TRACEBACK_VARIABLE = "DLLM_TRACEBACK"
"""Variable with which an error of a command is raised, not printed as one line."""
