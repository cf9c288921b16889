"""Every setting of every objective changes a step's gradients or is refused, but for those listed with the reason."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from raytriever.errors import UserError
from tests.gpu.objectives import KINDS, make_objective, make_rows, settings_of
from tests.unit.test_every_setting import OTHERS, changes
from trainers.engine.order import Order
from trainers.engine.settings import OptimizerSettings, TrainingSettings
from trainers.engine.step import compute_gradients

UNCHANGED = {
    "chunk_tokens": "how much is encoded at once",
    "chunk_size": "as chunk_tokens",
    "gradient_cache": "the same gradients, a chunk at a time",
    "prompts_by_domain=DomainPrompts": "names no prompt",
    "language_model.activation_checkpointing": "the same gradients, computed again",
    "language_model.model": "found by the run",
    "language_model.base_model": "found by the run",
    "language_model.revision": "found by the run",
}
OF_THE_RUN = ("first_stage.", "first_stage=")  # loaded by it: contextual/test_contextual.py
VALUES = {
    "query_max_length": 4, "document_max_length": 3, "context_max_length": 3, "max_length": 4, "sequence_dropout": 0.9,
    "dropout": 0.5, "trust": 0.5, "mix": 0.2, "depth": 2, "heads": 4, "width": 16, "targets": "all_linear",
}  # fmt: skip
"""What a setting is changed to where the next value would be refused, or is too near."""
PIECES = 2

pytestmark = pytest.mark.usefixtures("one_thread")


def rows_of(name: str, number: int) -> pa.Table:
    """A stored batch with all that the loop adds, of the domain that ``changes`` sets prompts of."""
    rows = make_rows(name, number)
    added = {"batch": pa.array([number] * len(rows), pa.int32()), "epoch": pa.array([0] * len(rows), pa.int32())}
    kept = rows.drop_columns([column for column in ("batch", "epoch", "domain") if column in rows.column_names])
    columns = dict(zip(kept.column_names, kept.columns, strict=True))
    return pa.table(columns | added | {"domain": pa.array(["one"] * len(rows))})


def step(name: str, encoder: Path, settings: Any) -> dict[str, Tensor]:
    """Loss and gradients of one step, in training mode, by an objective of these settings."""
    objective = make_objective(name, encoder, settings=settings, query_prompt="return ").train()
    order = Order([PIECES], PIECES, seed=0, joined=objective.joins_step)
    training = TrainingSettings(batches_per_step=PIECES, bf16=False, optimizer=OptimizerSettings(max_grad_norm=None))
    first = next(iter(order.steps()))
    collated = [
        objective.collate(pa.concat_tables(rows_of(name, number) for number in piece.batches)) for piece in first.pieces
    ]
    found = compute_gradients(objective, first, collated, order, training, "made up")
    gradients = {key: weight.grad for key, weight in objective.named_parameters() if weight.grad is not None}
    return gradients | {"loss": torch.tensor(found["loss"])}


def differ(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    if one.keys() != other.keys() or any(one[key].shape != other[key].shape for key in one):
        return True
    apart, size = (
        torch.cat([each.flatten() for each in found]).norm()
        for found in ([one[key] - other[key] for key in one], one.values())
    )
    return float(apart) > 1e-4 * float(size)


def attempt(name: str, encoder: Path, settings: Any) -> dict[str, Tensor] | None:
    """The step, None where it is refused."""
    try:
        return step(name, encoder, type(settings).model_validate(settings.model_dump()))
    except (UserError, ValidationError):
        return None


@pytest.mark.parametrize("kind", sorted({settings["kind"] for settings, *_ in KINDS.values()}))
def test_every_setting_changes_a_step(kind: str, tiny_encoder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for setting, value in VALUES.items():
        monkeypatch.setitem(OTHERS, setting, value)
    unchanged, changing = set[str](), set[str]()
    for name in (name for name, (settings, *_) in KINDS.items() if settings["kind"] == kind):
        taken = dict[str, dict[str, Tensor] | None]()
        for key, before, after in changes(settings_of(name)):
            if key in changing or key.startswith(OF_THE_RUN):
                continue
            for each in (before, after):
                if each.model_dump_json() not in taken:
                    taken[each.model_dump_json()] = attempt(name, tiny_encoder, each)
            one, other = (taken[each.model_dump_json()] for each in (before, after))
            if one is not None and other is not None:
                (changing if differ(one, other) else unchanged).add(key)
    assert unchanged - changing <= UNCHANGED.keys()
    assert len(changing) >= 5
