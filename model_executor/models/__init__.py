"""Diffusion language models written with vLLM's parallel layers."""
