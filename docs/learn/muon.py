# %% [markdown]
# # Muon under sharding: an optimizer that needs whole matrices
#
# AdamW looks at one number at a time: a rank that keeps half of a weight can update that half alone. Muon
# *orthogonalizes* the update of a matrix by a few matrix products, and for that it needs the whole matrix. But FSDP2
# leaves half of its rows on each rank.
#
# ![Shards of one matrix go to rank 0, those of another to rank 1, and results come back](muon.svg)
#
# To gather every matrix on every rank would have all ranks do the same work. Instead the matrices are dealt out:
#
# - an **all-to-all** sends the shards of each matrix to *one* rank. It orthogonalizes that matrix while other ranks
#   work on others;
# - a second **all-to-all** brings each rank its rows of all results.

# %% setup

# %% [markdown]
# ## A real step

# %%
step = forge("trace learn.toml --nproc 2 -p fsdp2 -p muon")
show([call for call in step["calls"] if call["rank"] == 0 and call["plugin"] == "muon"])

# %% [markdown]
# Four rounds of two calls: in a round, a rank gathers no more numbers than the largest matrix has, so that memory
# stays bounded. Everything else is as with [FSDP2](fsdp2.md). Embedding, head and norms are no hidden matrices, and
# Muon leaves them to AdamW.
#
# ## The formula
#
# What is sent is the momentum in bf16, two bytes a number, because the iteration computes in bf16. Each rank puts in
# its half of every matrix, and gets its half of every result.

# %%
matrices = LAYERS * (4 * DIM**2 + 3 * DIM * 4 * DIM)  # numbers in all hidden matrices
exchanged = sum(call["bytes"] for call in step["calls"] if call["rank"] == 0 and call["plugin"] == "muon")
assert exchanged == 2 * (matrices // 2) * 2
print(f"{matrices:,} numbers; {exchanged:,} B there and back")

# %% [markdown]
# With *n* ranks, each sends 2 (n − 1)/n² of the matrices' bytes in bf16, which becomes *less* with more ranks.
# FSDP2's own collectives send three times the weights in the same step. So Muon is not the expensive part, although
# it needs whole matrices.
#
# ## Break it
#
# What if each rank orthogonalized the rows that it has? Nothing fails, and the loss falls, but it is another
# optimizer. This plugin has Muon take each half of a matrix for a matrix.

# %%
Path("broken.py").write_text('''
from unittest.mock import patch

from forge_train import hookimpl
from forge_train_plugins.optimizers.muon import Muon


class Broken(Muon):
    """Takes each half of a matrix for a matrix of its own."""

    @hookimpl
    def optimizer(self, model, job):
        halves = {id(one): (one.shape[0] // 2,) * 2 for one in model.parameters() if one.ndim == 2}
        with patch("forge_train_kit.optim.fused_rows", lambda model: halves if job.dist.world > 1 else {}):
            return super().optimizer(model, job)
''')
broken = forge("trace learn.toml --nproc 2 -p fsdp2 -p ./broken.py")
print(sum(call["kind"] == "all_to_all" for call in broken["calls"]), "all-to-alls")
judge(forge("verify learn.toml --nproc 2 -p fsdp2 -p ./broken.py --steps 2"))

# %% [markdown]
# Gradients agree, because the layout is right; *updates* do not. `forge verify` gives one process the layout's
# gradients and compares how far each weight moved, so an optimizer is judged apart from everything before it.
#
# ## Try
#
# - Matrices in fp32. How many bytes are exchanged?
#   `forge trace learn.toml --nproc 2 -p fsdp2 -p muon -s muon.dtype=fp32 --json`
# - Tensor parallelism instead of `fsdp2`. Are the matrices exchanged too?
#   `forge trace learn.toml --nproc 2 -p tp -p muon -s parallel.tp=2 --json`
