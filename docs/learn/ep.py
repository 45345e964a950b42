# %% [markdown]
# # Expert parallelism: every rank has some of the experts
#
# In a mixture of experts, a *router* sends each token to a few of many feed-forward blocks, the experts. Most weights
# of such a model are experts, and each token uses few of them. Gathering them all, as FSDP2 does, would move many
# bytes for little work. So the experts stay where they are, and the *tokens* travel.
#
# ![Tokens go to the ranks of their experts by an all-to-all, and come back by another](ep.svg)
#
# An **all-to-all** gives each rank a different piece of what each other rank has. A layer needs two in the forward
# pass, *dispatch* and *combine*, and two in the backward pass, which take the gradients the same ways back.

# %% setup

# %% [markdown]
# ## A real step
#
# Four experts on two ranks, two for each token.

# %%
EXPERTS, HIDDEN, TOP_K = 4, 32, 2
layout = f"-p moe -p ep -s parallel.ep=2 -s moe.experts={EXPERTS} -s moe.hidden={HIDDEN} -s moe.top_k={TOP_K}"
step = forge(f"trace learn.toml --nproc 2 {layout}")
first, second = ([call for call in step["calls"] if call["rank"] == rank] for rank in (0, 1))
show(first)

# %% [markdown]
# - **all_to_all, 32 B**: how many tokens go to each expert. A rank must know how much it is about to receive.
# - **all_to_all in the forward pass**: the tokens themselves, there and back; in the backward pass their gradients.
#   The routed tokens of rank 0 and rank 1 are not equally many, and differ from layer to layer: the router decides.
# - **fsdp2**: the other weights are sharded as in [FSDP2](fsdp2.md), and so is the router. Experts are in no gather
#   and no reduction: two ranks and two groups of experts leave no rank with which to share them.
#
# The axis is called `dp_shard`: experts are spread over the ranks that have different rows. `ep` takes no ranks of
# its own.
#
# ## The formula
#
# Each rank has two rows of tokens, and sends each token to two experts. A call's bytes are of what goes in or comes
# out, whichever is more. So at least one of two ranks shows what a rank sends, and the other one what the busier rank
# receives.

# %%
tokens = ROWS // 2 * SEQUENCE
routed = tokens * TOP_K * DIM * FP32
pairs = [
    (one, other)
    for one, other in zip(first, second, strict=True)
    if one["kind"] == "all_to_all" and one["dtype"] == "float32"
]
assert len(pairs) == 4 * LAYERS
for one, other in pairs:
    assert min(one["bytes"], other["bytes"]) == routed
    excess = abs(one["bytes"] - other["bytes"]) // (DIM * FP32)
    where = f"{one['phase']:8} {one['module'][:8]}"
    print(f"{where}  each rank sends {routed:,} B; the busier one computes {excess} tokens more")

layer = (4 * DIM**2 + 2 * DIM + EXPERTS * DIM) * FP32  # attention, two norms, and the router
gathered = [call["bytes"] for call in first if call["kind"] == "all_gather" and call["module"].startswith("layers.")]
assert gathered[:LAYERS] == [layer] * LAYERS
experts = 3 * DIM * HIDDEN * EXPERTS * FP32
print(f"a layer gathers {layer:,} B; its experts, {experts:,} B, stay where they are")

# %% [markdown]
# All ranks wait for the busiest one. How routers are taught to spread tokens evenly is the subject of
# [experts](../how-to/experts.md).
#
# ## Break it
#
# Gradients of the other weights are averaged over the ranks. Those of an expert are complete on its own rank, because
# the tokens of all ranks came there. So the plugin `ep` divides them after the backward pass; leave that out, and
# experts learn from gradients twice as large as those of everything else.

# %%
Path("broken.py").write_text('''
from forge_train import Plugin, hookimpl


class Broken(Plugin):
    """Leaves gradients unfinished."""

    @hookimpl
    def on_start(self, model):
        model.after_backward = lambda: None
''')
judge(forge(f"verify learn.toml --nproc 2 {layout} -p ./broken.py --steps 2"))

# %% [markdown]
# With AdamW the loss hardly changes, because it divides by the size of the gradients. That is why such a fault can
# live for months.
#
# ## Try
#
# - `-s moe.top_k=1`: which bytes halve?
# - `--nproc 4`: with `ep` 2 on four ranks, two ranks share the same experts. Which collective appears, and between
#   which ranks?
