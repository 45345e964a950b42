"""The attention kernel of a run, for modules that need more of it than plugins announce."""

from __future__ import annotations

from forge_train.contract.attention import KernelCapabilities
from forge_train.plugin.job import Job

from .hookspecs import attention_kernel
from .layers import AttentionKernel


def kernel_with(needs: KernelCapabilities, job: Job) -> AttentionKernel:
    """The run's attention kernel; composition fails if it lacks something of `needs`."""
    job.hooks.asked_of_kernel.append(needs)
    return attention_kernel(job)
