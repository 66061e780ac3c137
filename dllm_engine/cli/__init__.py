"""The command ``dllm``: one file per subcommand, their common parts beside them."""
