# %% [markdown]
# # MoE balance: how routers learn to use all experts
#
# A router that is left alone soon sends most tokens to a few experts: those learn more, become better, and are chosen
# more often. The others are memory without use, and under [expert parallelism](ep.md) all ranks wait for the rank of
# the popular ones.
#
# ![Each rank counts tokens of experts, counts are summed, and every rank moves the same biases](balance.svg)
#
# - A **balancing loss** (`moe.balance`) is added to the loss. Each rank computes it for its own sequences, and its
#   gradient is averaged like any other: no collective of its own.
# - A **bias** for each expert (`moe.bias_speed`) is added to its score when experts are chosen, but not to its weight
#   in the output. After each step it goes up for experts with too few tokens and down for those with too many. For
#   that, ranks need to know the load of *all* tokens: one small **all-reduce** a step.
# - A **capacity** (`moe.capacity`) drops tokens that are too many. It needs no collective either, but those tokens
#   pass by the experts.

# %% setup

# %% [markdown]
# ## A real step

# %%
EXPERTS, MEASURES = 4, 5
layout = f"-p moe -p ep -s parallel.ep=2 -s moe.experts={EXPERTS} -s moe.hidden=32 -s moe.bias_speed=0.001"
step = forge(f"trace learn.toml --nproc 2 {layout}")
show([call for call in step["calls"] if call["rank"] == 0 and call["phase"] == "update"])

# %% [markdown]
# The first one has the loads. The other one, of 8 B, asks whether some rank was told to stop.
#
# ## The formula
#
# For each layer, the number of tokens of each expert, and five measures for the log. Unlike all other collectives of
# experts, it does not grow with tokens or features.

# %%
loads = [call for call in step["calls"] if call["phase"] == "update" and call["plugin"] == "moe"]
assert [call["bytes"] for call in loads] == 2 * [LAYERS * (EXPERTS + MEASURES) * FP32]
print(f"{loads[0]['bytes']} B on each rank, once a step")

# %% [markdown]
# ## Break it
#
# This plugin has each rank move its biases by the load of *its own* tokens.

# %%
Path("broken.py").write_text('''
import torch

from forge_train import Plugin, hookimpl
from forge_train_plugins.experts._moe.watch import Watch


class Broken(Plugin):
    """Counts the tokens of one rank only."""

    @hookimpl
    def on_start(self, job, model):
        if job.dist.world > 1:
            Watch._counted = lambda self: torch.stack([layer.statistics for layer in self.layers.values()])
''')
broken = forge(f"trace learn.toml --nproc 2 {layout} -p ./broken.py")
print(sum(call["phase"] == "update" and call["plugin"] == "moe" for call in broken["calls"]), "all-reduces of loads")

# %%
judge(forge(f"verify learn.toml --nproc 2 {layout} -p ./broken.py --steps 2"))

# %% [markdown]
# The trace has one collective too few. `forge verify` sees its effect: biases are buffers that should be equal on all
# ranks, and the same token is now sent to other experts depending on the rank that it is on.
#
# ## Try
#
# - `-s moe.bias_speed=0 -s moe.balance=0.01`: is the all-reduce gone?
# - `-s moe.router=expert_choice`: experts choose tokens. What happens to the sizes of the all-to-alls?
