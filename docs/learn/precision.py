# %% [markdown]
# # Low precision: what is sent in which dtype
#
# With `train.precision=bf16`, matrices are multiplied in bf16. Its eight bits of mantissa are enough for a product,
# and not for a sum of thousands of small updates: a weight of 1 plus an update of 0.001 is 1 again. So each rank
# *keeps* its share of the weights in fp32, and makes a bf16 copy for the computation.
#
# ![Shares are kept in fp32, gathered in bf16, and gradients are reduced in fp32](precision.svg)
#
# Under [FSDP2](fsdp2.md) the copy is made *before* the all-gather, so half of the bytes are sent. Gradients are sums
# over ranks and are reduced in fp32.

# %% setup

# %% [markdown]
# ## A real step

# %%
step = forge("trace learn.toml --nproc 2 -p fsdp2 -s train.precision=bf16")
first = [call for call in step["calls"] if call["rank"] == 0 and call["plugin"] == "fsdp2"]
for call in first:
    print(f"{call['phase']:9} {call['kind']:14} {call['dtype']:9} {call['bytes']:7,} B")

# %% [markdown]
# ## The formula

# %%
weights = 2 * VOCABULARY * DIM + LAYERS * (16 * DIM**2 + 2 * DIM) + DIM
kept = VOCABULARY * DIM + DIM  # the head and the last norm are not gathered again in the backward pass
gathered = sum(call["bytes"] for call in first if call["kind"] == "all_gather")
reduced = sum(call["bytes"] for call in first if call["kind"] == "reduce_scatter")
assert gathered == (2 * weights - kept) * 2
assert reduced == weights * 4
print(f"{gathered:,} B gathered at two bytes a number, {reduced:,} B reduced at four")

# %% [markdown]
# So bf16 makes two of the three transfers half as large. `fp8` computes in eight bits, and with `fp8.all_gather` it
# gathers in eight bits, too. See [Train in low precision](../how-to/low-precision.md).
#
# ## Break it
#
# The worst faults of precision are quiet: something computes in fewer bits than you think. This plugin does so in one
# linear of an fp32 run, on several processes.

# %%
Path("broken.py").write_text('''
import torch.nn.functional as F

from forge_train import Plugin, hookimpl


class Broken(Plugin):
    """Computes one linear in bf16."""

    @hookimpl
    def on_start(self, job, model):
        down = model.parts[0].get_submodule("layers.1.feed_forward.down")
        if job.dist.world > 1:
            down.forward = lambda x: F.linear(x.bfloat16(), down.weight.bfloat16()).float()
''')
verdict = forge("verify learn.toml --nproc 2 -p fsdp2 -p ./broken.py --steps 2")
print("They agree." if verdict["agree"] else "They differ.")
print(verdict["advice"][0].partition(": ")[2])

# %% [markdown]
# `forge verify` tells rounding from a wrong number by the size of the errors, about 2⁻⁸, and by their lack of a
# pattern: no group and no rank stands out. It names a weight of the block. For a run that is *meant* to be in bf16,
# it first measures how far bf16 is from fp32 on one process, and allows a layout a small part of that.
#
# ## Try
#
# - Tensor parallelism. In which dtype are hidden states summed?
#   `forge trace learn.toml --nproc 2 -p tp -s parallel.tp=2 -s train.precision=bf16 --json`
# - `forge verify learn.toml --against precision=bf16`: how far is bf16 from fp32?
