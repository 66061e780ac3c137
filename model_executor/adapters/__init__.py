"""Adapters: additions to a checkpoint's weights while they are loaded."""
