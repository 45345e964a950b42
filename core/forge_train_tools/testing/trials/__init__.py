"""A tiny case for the protocol of every slot and chain: what `plugins check` tries an implementation with."""

from __future__ import annotations

from ..bench import Trials
from .data import TRIALS as DATA
from .items import TRIALS as ITEMS
from .kernel import TRIALS as KERNEL
from .layers import TRIALS as LAYERS
from .metrics import TRIALS as METRICS
from .model import TRIALS as MODEL
from .optimisation import TRIALS as OPTIMISATION
from .step import TRIALS as STEP

TRIALS: Trials = {**MODEL, **LAYERS, **KERNEL, **DATA, **STEP, **OPTIMISATION, **METRICS, **ITEMS}
