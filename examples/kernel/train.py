"""Trains the plugin in toy.py with the kernel alone: no kit, tools, built-in plugin or command line."""

from pathlib import Path

from forge_train.config.tree import Tree
from forge_train.engine import train
from forge_train.registry.setup import make_setup

toy = str(Path(__file__).with_name("toy.py"))
setup = make_setup(Tree.of({"train": {"steps": 40, "global_batch": 4, "sequence": 16}}), plugins=[toy])
print(train(setup).loss)
