"""Forge: training of large language models, every technique a plugin.

This is the whole public API. Nothing here is imported before it is asked for, and torch only with what needs it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .base.names import lazy_names

if TYPE_CHECKING:
    from .base.errors import CommunicationError as CommunicationError
    from .base.errors import ConfigError as ConfigError
    from .base.errors import DivergedError as DivergedError
    from .base.errors import Failure as Failure
    from .base.errors import ForgeError as ForgeError
    from .base.errors import PluginError as PluginError
    from .base.errors import Problem as Problem
    from .config.schema import FilePath as FilePath
    from .config.schema import Ge as Ge
    from .config.schema import Gt as Gt
    from .config.schema import Le as Le
    from .config.schema import Lt as Lt
    from .config.schema import Volatile as Volatile
    from .config.schema import section as section
    from .contract.auxiliary import attach_loss as attach_loss
    from .contract.batch import MASKED as MASKED
    from .contract.batch import Axes as Axes
    from .contract.batch import Batch as Batch
    from .contract.batch import BatchPhase as BatchPhase
    from .contract.batch import CurrentStep as CurrentStep
    from .contract.batch import MicroBatch as MicroBatch
    from .contract.batch import Preparation as Preparation
    from .contract.batch import PrepareBatch as PrepareBatch
    from .contract.batch import PrepareStep as PrepareStep
    from .contract.events import Bins as Bins
    from .contract.events import CheckpointEvent as CheckpointEvent
    from .contract.events import Evaluation as Evaluation
    from .contract.events import Finished as Finished
    from .contract.events import LogRecord as LogRecord
    from .contract.events import Metric as Metric
    from .contract.events import StepResult as StepResult
    from .contract.events import Update as Update
    from .contract.model import Init as Init
    from .contract.model import Model as Model
    from .contract.protocols import Executor as Executor
    from .contract.protocols import Loader as Loader
    from .contract.protocols import LossScale as LossScale
    from .contract.protocols import RolloutLoader as RolloutLoader
    from .contract.protocols import Schedule as Schedule
    from .contract.protocols import Span as Span
    from .contract.protocols import SpanName as SpanName
    from .contract.protocols import Task as Task
    from .contract.transform import Applied as Applied
    from .contract.transform import Phase as Phase
    from .contract.transform import Transform as Transform
    from .mesh.axes import Axis as Axis
    from .plugin.job import Job as Job
    from .plugin.plugin import Plugin as Plugin
    from .plugin.plugin import hookimpl as hookimpl
    from .plugin.specs import HookSpec as HookSpec
    from .plugin.specs import hookspec as hookspec

__version__ = "0.1.0"

_WHERE, __getattr__, __dir__ = lazy_names(
    __name__,
    {
        "config.schema": "FilePath Ge Gt Le Lt Volatile section",
        "contract.auxiliary": "attach_loss",
        "contract.batch": "Axes Batch BatchPhase CurrentStep MASKED MicroBatch Preparation PrepareBatch PrepareStep",
        "contract.events": "Bins CheckpointEvent Evaluation Finished LogRecord Metric StepResult Update",
        "mesh.axes": "Axis",
        "plugin.job": "Job",
        "contract.model": "Init Model",
        "plugin.plugin": "Plugin hookimpl",
        "contract.protocols": "Executor Loader LossScale RolloutLoader Schedule Span SpanName Task",
        "plugin.specs": "HookSpec hookspec",
        "contract.transform": "Applied Phase Transform",
        "base.errors": "CommunicationError ConfigError DivergedError Failure ForgeError PluginError Problem",
    },
)

__all__ = ["__version__", *sorted(_WHERE)]  # noqa: PLE0604  # built from the table above, which a test holds to the imports
