"""Changes in the processes of an engine: its core, and its workers."""
