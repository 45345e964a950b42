"""Puts stand-ins in the place of kernels that only a GPU has."""

from __future__ import annotations

import sys
import types
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import flex_attention as flex
from torch.nn.attention import varlen

sys.path.insert(0, str(Path(__file__).parents[1]))
import fused_kernels


def _module(name: str, **content: Any) -> None:
    made = types.ModuleType(name)
    made.__path__, made.__spec__ = [], ModuleSpec(name, None, is_package=True)
    vars(made).update(content)
    sys.modules[name] = made


F.scaled_mm = fused_kernels.scaled_mm
varlen.varlen_attn = fused_kernels.varlen_attn
_module("flash_attn", flash_attn_varlen_func=fused_kernels.flash_2)
_module("flash_attn_2_cuda")
_compile: Any = torch.compile


def compile_all_but_flex(function: Any = None, **options: Any) -> Any:
    """FlexAttention runs unfused: the kernel that torch would generate needs a device."""
    return function if function is flex.flex_attention else _compile(function, **options)


torch.compile = compile_all_but_flex
