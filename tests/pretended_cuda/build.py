"""Compiles the pretended device, once for each torch, where that lies, and each state of its source."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

SOURCE = Path(__file__).with_name("device.cpp")


def library() -> Path:
    """The compiled device; a quarter of a minute the first time."""
    import torch
    from torch.utils.cpp_extension import include_paths

    lib = Path(torch.__file__).parent / "lib"
    key = hashlib.sha256(SOURCE.read_bytes() + f"{torch.__version__} {lib}".encode()).hexdigest()[:16]
    folder = Path(tempfile.gettempdir()) / f"forge-pretended-cuda-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    made = folder / f"{key}.so"
    if not made.exists():
        partial = folder / f"{key}.{os.getpid()}"
        includes = [f"-I{path}" for path in include_paths()]
        linked = [f"-L{lib}", "-ltorch", "-ltorch_cpu", "-lc10", f"-Wl,-rpath,{lib}"]
        abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}"
        defined = [abi, "-DAT_PER_OPERATOR_HEADERS"]  # those of all operators take twice as long
        command = ["g++", "-std=c++20", "-O0", "-shared", "-fPIC", *defined, *includes, str(SOURCE), "-o", str(partial)]
        subprocess.run([*command, *linked], check=True, capture_output=True, text=True)
        partial.rename(made)
    return made


def missing() -> str:
    """Why it can't be made here; empty if it can."""
    import torch

    if torch.version.cuda:
        return "this torch has a CUDA of its own"
    if shutil.which("g++") is None:
        return "there is no g++ to compile the pretended device with"
    return ""
