"""Validation on what a run is trained on: refused where it is the same, told where it is known."""

from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter

from pipelines.batches import BatchReader
from raytriever.artifacts.artifact import Artifact
from raytriever.errors import UserError
from raytriever.settings.configuration import validate
from tests.unit.trainers.pair_batches import pair, store_pairs
from tests.unit.trainers.validation.made_up import make_collection
from trainers.jobs.train import Train, TrainConfig
from trainers.jobs.train_checks import training_set_warnings
from trainers.validation.settings import ValidationSettings


def validation(**values: Any) -> Any:
    return TypeAdapter(ValidationSettings).validate_python(values)


def rows(*numbers: int) -> list[list[dict]]:
    return [[pair(number) for number in numbers]]


def test_a_split_that_the_batches_have_queries_of_is_told(tmp_path: Path) -> None:
    collection = make_collection(tmp_path / "corpus")  # q0 to q5 are judged by dev, q6 to q11 by train
    inputs = {"collection": Artifact(collection).fingerprint}
    trained = BatchReader(store_pairs(tmp_path / "batches", rows(6, 7, 5), inputs))
    of_train = validation(kind="retrieval", collection=collection, split="train")
    (warning,) = training_set_warnings(of_train, trained)
    assert "2 of 3 queries in batches of" in warning
    assert "such as 'q6', are of split 'train'" in warning
    (warning,) = training_set_warnings(of_train.model_copy(update={"split": "dev"}), trained)
    assert "1 of 3 queries" in warning
    apart = BatchReader(store_pairs(tmp_path / "apart", rows(6, 7, 8), inputs))
    assert training_set_warnings(of_train.model_copy(update={"split": "dev"}), apart) == []
    elsewhere = BatchReader(store_pairs(tmp_path / "elsewhere", rows(6, 7, 8), {"collection": "f" * 64}))
    assert training_set_warnings(of_train, elsewhere) == []  # its q6 is another query


def test_a_training_says_so_before_it_begins(tmp_path: Path, tiny_encoder: Path, logged: list[str]) -> None:
    collection = make_collection(tmp_path / "corpus")
    batches = store_pairs(tmp_path / "batches", rows(6, 7), {"collection": Artifact(collection).fingerprint})

    def plan(**of_validation: Any) -> None:
        values = {
            "batches": batches, "output": str(tmp_path / "model"), "encoder": {"model": str(tiny_encoder)},
            "objective": {"kind": "contrastive"}, "training": {"bf16": False}, "validation": of_validation,
        }  # fmt: skip
        Train(validate(TrainConfig, values, "model")).plan()

    plan(kind="retrieval", collection=collection, split="train")
    assert len([line for line in logged if line.startswith("  Warning: the dev set is trained on")]) == 1
    with pytest.raises(UserError, match=f"validation.batches is {batches}, the very batches that are trained on"):
        plan(kind="batches", batches=batches)
