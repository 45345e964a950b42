# %% [markdown]
# # Checkpoints and resharding: save on one layout, load on another
#
# With FSDP2 no rank has the whole of any weight, and there are two states of AdamW beside each. Gathering all of that
# on one rank to write one file would need the memory that sharding saves. So each rank writes *its own shards*, and
# says where they belong.
#
# ![Two ranks save rows of a weight; ranks of another layout read what overlaps with their part](checkpoints.svg)
#
# To load, a rank looks up which parts of which files overlap with what it holds now, and reads these alone. The
# number of ranks, and the way in which weights are split, may be others than before.

# %% setup

# %% [markdown]
# ## A real checkpoint
#
# Three steps on two ranks, and a checkpoint after the second.

# %%
train = "train learn.toml -s train.steps=3 -s checkpoint.every=2"
two = forge(f"{train} --nproc 2 -p fsdp2 --name two")
checkpoint = Path("runs/two/checkpoints/step-00000002")
print(two["outcome"], sorted(path.name for path in checkpoint.iterdir()))

tensors = json.loads((checkpoint / "tensors.json").read_text())
for where, (file, _) in tensors["model.layers.0.attention.o.weight"]["shards"].items():
    print(f"{where:12} in {file}")

# %% [markdown]
# Files are in the safetensors format; `tensors.json` is the index. See [the format of a
# checkpoint](../checkpoint-format.md). Nothing in it says `fsdp2`: it knows tensors and their parts, not techniques.
#
# ## The formula
#
# Weights, and two states of AdamW for each weight, all in fp32. Each rank writes half.

# %%
weights = 2 * VOCABULARY * DIM + LAYERS * (16 * DIM**2 + 2 * DIM) + DIM
held = {}
for tensor in tensors.values():
    for where, (file, _) in tensor["shards"].items():
        spans = [part.split(":") for part in where.strip("[]").split(",") if part]
        size = 1
        for begin, end in spans:
            size *= int(end) - int(begin)
        if spans and tensor["dtype"] == "float32":  # no random states, and no counts of steps
            held[file] = held.get(file, 0) + size * FP32
assert all(size == 3 * weights * FP32 // 2 for size in held.values())
print(*(f"{file}: {size:,} B" for file, size in sorted(held.items())), sep="\n")

# %% [markdown]
# ## Another layout
#
# Now the last step on *tensor-parallel* ranks, from the checkpoint of the sharded ones: `o` is split by columns
# there. The result should be that of the first run, up to rounding.

# %%
other = forge(f"train --resume {checkpoint} --nproc 2 -p tp -s parallel.tp=2 -s train.steps=3")
print(other["outcome"], f"at step {other['step']}")
assert abs(other["loss"] - two["loss"]) < 1e-5

# %% [markdown]
# ## Break it
#
# A checkpoint must hold everything that the next step depends on: also what a plugin remembers. This one halves every
# second gradient, and counts steps in an attribute that no checkpoint knows.

# %%
Path("broken.py").write_text('''
from forge_train import Plugin, hookimpl


class Broken(Plugin):
    """Halves every second gradient."""

    steps = 0

    @hookimpl
    def on_gradients(self, update):
        self.steps += 1
        if self.steps % 2 == 0:
            update.scale(0.5)
''')
judge(forge("verify learn.toml --nproc 2 -p fsdp2 -p ./broken.py --steps 4"))

# %% [markdown]
# Every number agrees with one process, as long as nobody stops. After a resume the count begins at zero. A plugin
# that remembers something gives it away by `state_dict` and takes it back by `load_state_dict`, and Forge saves it.
#
# ## Try
#
# - `forge checkpoint diff` with two checkpoints of different layouts: how large are the differences?
# - `forge checkpoint export runs/two two-hf`: one file for other programs, whatever the layout was.
