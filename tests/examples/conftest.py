"""The system of random weights that the tests of this folder share."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten

from examples.small_model import parameters
from mlx_ds4.model.dspark import Drafter
from mlx_ds4.model.engram import engram_constants
from mlx_ds4.model.model import Model
from tests.examples.tools import MemoryRows, tiny


@pytest.fixture(scope="module")
def system():
    """Config, named weights, biases, a Model and a Drafter with these weights, and the hashes."""
    config, token_map = tiny()
    named, biases = {}, {}
    for seed, layout in enumerate((parameters.backbone(config), parameters.drafter(config))):
        flat = layout.initial(seed)
        # Clear choices and strong effects, as in a trained model.
        flat = {name: v * (1.0 if name in ("VECTORS", "F32") else 1.5) for name, v in flat.items()}
        named |= layout.named(flat)
        rng = np.random.default_rng(seed)
        biases |= {w.name: mx.array(rng.standard_normal(w.shape).astype(np.float32) * 0.1) for w in layout.biases}
    model, drafter = Model(config), Drafter(config)
    for module, prefix in ((model, ("layers.", "embed.", "norm.", "head.")), (drafter, ("mtp.",))):
        places = {name for name, _ in tree_flatten(module.parameters())}
        values = {n: v for n, v in {**named, **biases}.items() if n.startswith(prefix) and "engram.embed" not in n}
        assert places == set(values)
        module.load_weights(list(values.items()))
        for part in module.modules():
            if isinstance(getattr(type(part), "rounds_input", None), property):
                part.rounds_input = True
    hashes = engram_constants(config)
    tables = [MemoryRows(named[f"layers.{i}.engram.embed.weight"]) for i in config.engram_layer_ids]
    model.set_engram(token_map, hashes, tables)
    return config, named, biases, model, drafter, token_map, hashes
