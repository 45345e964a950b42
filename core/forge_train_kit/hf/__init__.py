"""The exchange with Hugging Face: reads folders in its layout, starts runs from them, and plans exports."""

from __future__ import annotations

from .model import HFAdapter, HFAround, HFModel, Tables

__all__ = ["HFAdapter", "HFAround", "HFModel", "Tables"]
