"""Guided Diffusion: an autoregressive guide checks the drafts of the diffusion model."""
