"""How the package's small model is made: corpus, training, export, ablations (see `docs/small-model.md`)."""
