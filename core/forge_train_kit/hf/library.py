"""The library `transformers`, without the warnings of what its classes import.

They import torchao, which warns at length about kernels that are missing here.
"""

from __future__ import annotations

import logging

_WORDY = [logging.getLogger(name) for name in ("torchao", "torch.utils._pytree")]
_LEVELS = [one.level for one in _WORDY]
for _one in _WORDY:
    _one.setLevel(logging.ERROR)
try:
    import transformers
    import transformers.modeling_utils
finally:
    for _one, _level in zip(_WORDY, _LEVELS, strict=True):
        _one.setLevel(_level)

__all__ = ["transformers"]
