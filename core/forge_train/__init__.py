"""Forge: training of large language models, every technique a plugin.

This is the whole public API. Nothing here is imported before it is asked for, and torch only with what needs it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .auxiliary import attach_loss as attach_loss
    from .choices import record_choices as record_choices
    from .composition.model import Model as Model
    from .errors import CommunicationError as CommunicationError
    from .errors import ConfigError as ConfigError
    from .errors import DivergedError as DivergedError
    from .errors import ForgeError as ForgeError
    from .errors import PluginError as PluginError
    from .events import CheckpointEvent as CheckpointEvent
    from .events import Evaluation as Evaluation
    from .events import Finished as Finished
    from .events import LogRecord as LogRecord
    from .events import StepResult as StepResult
    from .events import Update as Update
    from .failure import Failure as Failure
    from .job import Job as Job
    from .plugin import FilePath as FilePath
    from .plugin import Ge as Ge
    from .plugin import Gt as Gt
    from .plugin import Le as Le
    from .plugin import Lt as Lt
    from .plugin import Plugin as Plugin
    from .plugin import Volatile as Volatile
    from .plugin import hookimpl as hookimpl
    from .plugin import section as section
    from .protocols import MASKED as MASKED
    from .protocols import Attention as Attention
    from .protocols import AttentionKernel as AttentionKernel
    from .protocols import Batch as Batch
    from .protocols import Executor as Executor
    from .protocols import FeedForward as FeedForward
    from .protocols import HFModel as HFModel
    from .protocols import Init as Init
    from .protocols import Layer as Layer
    from .protocols import Loader as Loader
    from .protocols import LossFunction as LossFunction
    from .protocols import LossScale as LossScale
    from .protocols import PrepareBatch as PrepareBatch
    from .protocols import Problem as Problem
    from .protocols import Schedule as Schedule
    from .protocols import Span as Span
    from .protocols import SpanName as SpanName
    from .protocols import Task as Task
    from .protocols import TokenDispatch as TokenDispatch
    from .protocols import Tokenizer as Tokenizer
    from .transform import Applied as Applied
    from .transform import Phase as Phase
    from .transform import Transform as Transform
    from .transform import swap as swap

__version__ = "0.1.0"

_HOME = {
    "auxiliary": "attach_loss",
    "choices": "record_choices",
    "errors": "CommunicationError ConfigError DivergedError ForgeError PluginError",
    "failure": "Failure",
    "job": "Job",
    "composition.model": "Model",
    "plugin": "FilePath Ge Gt Le Lt Plugin Volatile hookimpl section",
    "events": "CheckpointEvent Evaluation Finished LogRecord StepResult Update",
    "protocols": "MASKED Attention AttentionKernel Batch Executor FeedForward HFModel Init Layer Loader LossFunction"
    " LossScale PrepareBatch Problem Schedule Span SpanName Task TokenDispatch Tokenizer",
    "transform": "Applied Phase Transform swap",
}
_WHERE = {name: module for module, names in _HOME.items() for name in names.split()}

__all__ = ["__version__", *sorted(_WHERE)]  # noqa: PLE0604  # built from the table above, which a test holds to the imports


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f".{_WHERE[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_WHERE})
