"""Readers of model files: named tensors behind hard limits."""
