"""Engram row numbers: exact, for the released tables and the golden model, whole or cut into steps."""

from __future__ import annotations

import dataclasses
import json

import mlx.core as mx
import numpy as np
import pytest

from mlx_ds4.model.engram import DEAD, EngramHash, engram_constants
from tests.golden_tools import GOLDEN, golden, manifest


@pytest.fixture(scope="module")
def released(nano):
    """The hashes of the released configuration, derived from its numbers."""
    config = dataclasses.replace(
        nano.config,
        engram_layer_ids=(1, 14),
        engram_num_embeddings=(384006168, 384016682),
        num_hidden_layers=40,
        compress_ratios=(0,) * 43,
        engram_vocab_size=16_000_000,
        engram_n_heads=8,
        engram_compressed_vocab_size=99_092,
    )
    return engram_constants(config)


@pytest.fixture(scope="module")
def real():
    return {k: np.array(v) for k, v in mx.load(str(GOLDEN / "real" / "engram_rows.safetensors")).items()}


def test_released_constants(released):
    want = json.loads((GOLDEN / "real" / "engram_constants.json").read_text())
    assert [h.multipliers.tolist() for h in released] == want["multipliers"]
    assert [h.primes.reshape(3, 8).tolist() for h in released] == want["primes"]
    assert [int(h.primes.sum()) for h in released] == [384006168, 384016682]


@pytest.mark.parametrize("name", ["uniform", "low", "special", "repeat", "dead"])
def test_released_rows(released, real, name):
    mapped = real["uniform.mapped" if name == "dead" else f"{name}.mapped"].astype(np.int64)
    text = np.ones(len(mapped), dtype=bool)
    if name == "dead":
        text = real["dead.mask"].astype(bool)
        mapped = np.where(text, mapped, DEAD)
    for table, hashing in enumerate(released):
        got = hashing.row_numbers(mapped[None], len(mapped))[0]
        np.testing.assert_array_equal(got[text], real[f"{name}.rows"][text, table])


def test_vectors_of_the_specification(released):
    rows = [h.row_numbers(np.array([[0, 42, 1000, 42]]), 4)[0] for h in released]
    assert rows[0][0, :3].tolist() == [5702652, 24393184, 39183301] and rows[0][0, 23] == 380066193
    assert rows[1][3, :2].tolist() == [11222432, 25792162] and rows[1][3, 23] == 368744481
    largest = released[0].row_numbers(np.full((1, 4), 99091), 4)[0, 3]
    assert (largest[0], largest[23]) == (12193612, 375130424)
    sticky = released[0].row_numbers(np.array([[5, DEAD, 7, 8]]), 4)[0, 3]
    assert sticky[:2].tolist() == [11754974, 24210124] and sticky[23] == 370975480


@pytest.mark.parametrize("cuts", [[1] * 12, [5, 1, 6], [2, 10]])
def test_history_makes_steps_equal_the_whole(released, cuts):
    ids = np.random.default_rng(0).integers(0, 99092, (2, 12))
    whole = released[0].row_numbers(ids, 12)
    parts, start = [], 0
    for cut in cuts:
        before = ids[:, max(0, start - 3) : start]
        parts.append(released[0].row_numbers(np.concatenate([before, ids[:, start : start + cut]], axis=1), cut))
        start += cut
    np.testing.assert_array_equal(np.concatenate(parts, axis=1), whole)


def test_golden_model_rows(nano):
    data = {k: np.array(v) for k, v in golden("nano", "engram").items()}
    hashes = engram_constants(nano.config)
    for table, hashing in enumerate(hashes):
        assert hashing.multipliers.tolist() == data["multipliers"][table].tolist()
        assert hashing.primes.tolist() == data["primes"][table].reshape(-1).tolist()
    sequences = manifest("nano")["sequences"]
    cases = {name: sequences[name[0]][: data[f"{name}.rows"].shape[0]] for name in ("A1", "B2", "B40", "A97")}
    for name, ids in [*cases.items(), ("random", data["random.ids"])]:
        mapped = data["token_map"][np.array(ids)].astype(np.int64)
        for table, hashing in enumerate(hashes):
            got = hashing.row_numbers(mapped[None], len(mapped))[0]
            np.testing.assert_array_equal(got, data[f"{name}.rows"][:, table], err_msg=name)


def test_excluded_positions_block_what_lies_behind_them():
    hashing = EngramHash(np.array([3, 5, 7, 9]), np.array([101, 103, 107, 109, 113, 127]), pad_id=2)
    blocked = hashing.row_numbers(np.array([[11, 12, DEAD, 13, 14]]), 5)[0]
    padded = hashing.row_numbers(np.array([[2, 2, 2, 13, 14]]), 5)[0]
    np.testing.assert_array_equal(blocked[3:], padded[3:])
