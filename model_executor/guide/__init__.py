"""Guided Diffusion: an autoregressive guide that checks what the diffusion model
drafts.
"""
