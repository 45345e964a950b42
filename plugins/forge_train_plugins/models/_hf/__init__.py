"""Parts of the `hf` plugin."""

from __future__ import annotations

import logging

# With its classes, the library imports torchao, which warns at length about kernels that are missing here.
_WORDY = [logging.getLogger(name) for name in ("torchao", "torch.utils._pytree")]
_LEVELS = [one.level for one in _WORDY]
for _one in _WORDY:
    _one.setLevel(logging.ERROR)
try:
    import transformers.modeling_utils  # noqa: F401
finally:
    for _one, _level in zip(_WORDY, _LEVELS, strict=True):
        _one.setLevel(_level)
