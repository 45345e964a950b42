"""Parts of the `hf` plugin."""

from __future__ import annotations

from forge_train_kit.hf import library as library
