"""Parts switched off for the ablation table: each changes what it names, and leaves the model as it was."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from examples import ablations
from examples.small_model import interventions
from tests.examples.tools import ids_of, row_error
from tests.golden_tools import GOLDEN, TINY


@pytest.fixture
def passed(system):
    config, _, _, model, *_ = system
    ids = mx.array(ids_of(config, 1, 79))
    return model, ids, model(ids)


@pytest.mark.parametrize("part", [name for name, _ in ablations.PARTS[1:]])
def test_a_part_is_off_and_then_on_again(passed, part):
    model, ids, before = passed
    switched = dict(ablations.PARTS)[part]
    with switched(model):
        off = model(ids)
    assert row_error(off, before) > 0.03, part
    assert mx.array_equal(model(ids), before)


def test_few_rows_are_all_selected_anyway(passed):
    """And their list is no longer than the rows, whatever the number that may be selected."""
    model, ids, _ = passed
    few = ids[:, :8]
    want = model(few)
    with interventions.all_rows_selected(model):
        assert max(part.shape[-1] for name, part in model.trace(few).items() if name.endswith("topk")) <= 4096
        assert mx.array_equal(model(few), want)


def test_without_compressed_rows_only_the_window_is_seen(passed):
    """The first token reaches the last rows through compressed rows alone: six windows of 8 are fewer than 79."""
    model, ids, before = passed
    other = mx.array(np.array(ids))
    other[0, 0] = (ids[0, 0] + 1) % 50
    with interventions.compressed_rows_off(model):
        assert mx.array_equal(model(other)[:, 60:], model(ids)[:, 60:])
    assert not mx.array_equal(model(other)[:, 60:], before[:, 60:])


def test_first_layers_of_the_table_stay_equal(passed):
    """Candidates act in the last index source only, so layers before it do not change."""
    model, ids, _ = passed
    before = model.trace(ids)
    with interventions.candidates_off(model):
        after = model.trace(ids)
    assert mx.array_equal(after["L4.h_out"], before["L4.h_out"])
    assert not mx.array_equal(after["L5.topk"], before["L5.topk"])


def test_drafts_with_parts_off(system):
    config, _, _, model, drafter, *_ = system
    model.tap(drafter.target_layer_ids)
    cache = model.make_cache()
    ids = mx.array(ids_of(config, 1, 20))
    drafter.observe(cache, model.forward(ids, cache)[1])
    before = drafter.propose(model, cache, 3)
    for switched in (
        interventions.markov_off(drafter),
        *(interventions.stage_off(drafter, stage) for stage in range(3)),
    ):
        with switched:
            off = drafter.propose(model, cache, 3)
        assert off != before
    assert drafter.propose(model, cache, 3) == before


def test_the_tables(system):
    config, _, _, model, drafter, *_ = system
    model.tap(drafter.target_layer_ids)
    ids = {"code": ids_of(config, 1, 60)[0].tolist()}
    lines = list(ablations.parts_table(model, ids, 0, 64))
    assert len(lines) == 2 + len(ablations.PARTS) and lines[2].endswith("| +0.0% |")
    lines = list(ablations.drafts_table(model, drafter, {"code": ids["code"] * 3}, 0, 1, 6))
    assert len(lines) == 2 + 5
    assert all(1 <= float(line.split("|")[2]) <= 6 for line in lines[2:])


@pytest.mark.slow
def test_the_page_without_and_with_a_drafter(capsys):
    """A model without a drafter beside it has the first table alone; a named one that is not there ends the command."""
    sizes = ["--tokens", "24", "--sequence-length", "24", "--prompts", "1", "--continue", "2"]
    assert ablations.main(["--model", str(TINY), *sizes]) == 0
    page = capsys.readouterr().out
    assert "| everything |" in page and "No drafts: " in page and "| drafter |" not in page
    assert ablations.main(["--model", str(GOLDEN / "nano" / "model"), *sizes]) == 0
    page = capsys.readouterr().out
    assert "| everything |" in page and "| all stages |" in page and "No drafts" not in page
    assert ablations.main(["--draft-model", "absent.gguf", *sizes]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1
