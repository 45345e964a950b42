"""Building blocks of pipeline parallelism: timetables of ranks, and split backward passes. Imports no torch."""

from __future__ import annotations

from .backward import wanted_gradients
from .timetable import Action, Overlap, PipelineExecutor, Timetable, Work

__all__ = ["Action", "Overlap", "PipelineExecutor", "Timetable", "Work", "wanted_gradients"]
