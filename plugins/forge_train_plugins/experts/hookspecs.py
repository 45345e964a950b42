"""The hook of models with experts, for their own plugin and for others that have experts."""

from __future__ import annotations

from forge_train import Job, TokenDispatch, hookspec


@hookspec("slot", optional=True, asked="composition")
def token_dispatch(job: Job) -> TokenDispatch:
    """The transport of tokens to their experts."""
    raise AssertionError
