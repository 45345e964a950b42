"""Mixture of experts, and the transport of tokens."""
