"""The command ``dllm``.

Each subcommand is a file with ``add_parser``, which declares its arguments, and ``run``, which prints and returns the
exit status. ``arguments.py`` and ``engine.py`` are what they share.
"""
