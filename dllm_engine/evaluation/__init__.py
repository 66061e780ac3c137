"""Benchmarks of lm-evaluation-harness, run by an engine and set side by side by cache method."""
