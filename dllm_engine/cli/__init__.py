"""The command ``dllm``.

Each subcommand is a file with ``add_parser``, which declares its arguments, and ``run``, which returns the exit
status; what they share lies beside them.
"""
