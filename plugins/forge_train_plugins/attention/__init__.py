"""Attention layers and their kernels."""
