"""Stored batches in sentence-transformers' trainer: replayed exactly, the loss ours, broken batches refused."""

import inspect
import re
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pytest
import torch
from accelerate.data_loader import prepare_data_loader, skip_first_batches
from datasets import Dataset, load_dataset
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer, SentenceTransformerTrainingArguments
from sentence_transformers.sentence_transformer.modules import StaticEmbedding
from tokenizers import Tokenizer
from torch.utils.data import DataLoader

import trainers.sentence_transformers as ours
from pipelines.batches import BatchReader, epoch_permutation
from pipelines.jobs.export import Export, ExportConfig
from raytriever.errors import UserError
from tests.unit.retrieval.encoders.tiny_models import load_tiny, save_tiny_model
from tests.unit.small_run import make
from tests.unit.trainers.pair_batches import store_epochs
from trainers.objectives.contrastive import Contrastive
from trainers.objectives.pair_settings import ContrastiveSettings
from trainers.sentence_transformers import (
    CachedMaskedContrastiveLoss,
    MaskedContrastiveLoss,
    StoredBatchSampler,
    stored_mask,
    stored_scores,
    training_columns,
)

SIZE, COUNT, BATCHES = 8, 48, 6
Place = tuple[int, int]


@pytest.fixture(scope="module")
def batches(tmp_path_factory: pytest.TempPathFactory) -> BatchReader:
    """Two epochs with two hard negatives a row; every third row masks a document, every fifth a hard negative."""
    epochs = []
    for epoch in range(2):
        pairs = np.random.default_rng(epoch).permutation(COUNT).reshape(BATCHES, SIZE)
        epochs.append([[row_of(int(pair), row) for row, pair in enumerate(batch)] for batch in pairs])
    return BatchReader(store_epochs(tmp_path_factory.mktemp("stored") / "batches", epochs))


def row_of(pair: int, row: int) -> dict[str, Any]:
    others = [(pair + step) % COUNT for step in (2, 3)]
    masked = [(row + 1) % SIZE] * (pair % 3 == 0) + [SIZE + 2 * ((row + 3) % SIZE)] * (pair % 5 == 0)
    return {
        "query_id": f"q{pair}",
        "query": f"which of {pair % 5} is {pair}",
        "document_id": f"d{pair}",
        "document": f"it is number {pair}, that is {pair * pair}",
        "hard_negative_ids": [f"d{other}" for other in others],
        "hard_negatives": [f"it is number {other}, that is {other * other}" for other in others],
        "masked": masked,
    }


@pytest.fixture(scope="module")
def scored(tmp_path_factory: pytest.TempPathFactory, batches: BatchReader) -> BatchReader:
    """The first epoch's batches, with surrogate scores."""
    scores = np.random.default_rng(1).standard_normal((BATCHES, SIZE, SIZE)).tolist()
    rows = [
        [
            row | {"surrogate_scores": of_row}
            for row, of_row in zip(batches.read(0, number).to_pylist(), own, strict=True)
        ]
        for number, own in enumerate(scores)
    ]
    facts = {"surrogate_scores": True}
    return BatchReader(store_epochs(tmp_path_factory.mktemp("scored") / "batches", [rows], facts=facts))


@pytest.fixture(scope="module")
def columns(batches: BatchReader) -> Dataset:
    found: Dataset = training_columns(batches)
    return found


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    plain = save_tiny_model("bert", folder / "bert")
    SentenceTransformer(str(plain), device="cpu").save(str(folder / "model"))  # with its own mean pooling
    return folder / "model"


def features(model: SentenceTransformer, rows: dict[str, list[Any]]) -> tuple[list[Any], torch.Tensor]:
    tokenize = model.preprocess if hasattr(model, "preprocess") else model.tokenize  # the name before 5.4
    texts = [tokenize(rows[name]) for name in rows if name != "label"]
    return texts, torch.tensor(rows["label"])


def in_order(seed: int, epoch: int) -> list[Place]:
    return [(epoch, int(batch)) for batch in epoch_permutation(seed, epoch, BATCHES)]


@pytest.mark.parametrize(
    ("directions", "distillation"), [("query_to_document", 0.0), ("all", 0.0), ("query_to_document", 0.3), ("all", 1.0)]
)
def test_loss_and_gradients_are_ours(
    scored: BatchReader, model: Path, directions: Literal["query_to_document", "all"], distillation: float
) -> None:
    batches, columns = scored, training_columns(scored)

    def masks_hard_negatives(batch: int) -> bool:
        return any(column >= SIZE for masked in batches.read(0, batch)["masked"].to_pylist() for column in masked)

    number = next(batch for batch in range(BATCHES) if masks_hard_negatives(batch))
    encoder = load_tiny(model, dtype="float32")
    settings = ContrastiveSettings(
        similarity_temperature=0.07, directions=directions, distillation=distillation, teacher_temperature=0.4
    )
    objective = Contrastive(encoder, settings)
    ours = objective(objective.collate(batches.read(0, number))).loss
    how = directions, distillation, 0.4
    ours.backward()
    expected = {name.replace("transformer.", "0.model."): weight.grad for name, weight in encoder.named_parameters()}
    rows = columns[number * SIZE : (number + 1) * SIZE]
    for loss_of in (
        lambda trained: MaskedContrastiveLoss(trained, 0.07, *how),
        lambda trained: CachedMaskedContrastiveLoss(trained, 0.07, 3, *how),
    ):
        trained = SentenceTransformer(str(model), device="cpu").eval()
        loss = loss_of(trained)(*features(trained, rows))
        loss.backward()
        assert loss.item() == pytest.approx(ours.item(), abs=1e-5)
        found = {name.replace(".auto_model.", ".model."): weight.grad for name, weight in trained.named_parameters()}
        assert found.keys() == expected.keys()
        for name, gradient in expected.items():
            if gradient is None:
                assert found[name] is None
            else:
                torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-5)


def test_the_label_holds_the_stored_mask(batches: BatchReader, columns: Dataset) -> None:
    assert StoredBatchSampler(columns, SIZE, generator=torch.Generator(), seed=5).seed == 5  # a generator as it comes
    for number in range(2 * BATCHES):
        labels = torch.tensor(columns[number * SIZE : (number + 1) * SIZE]["label"])
        assert stored_mask(labels, 3).tolist() == batches[number]["masked"].tolist()


def test_the_label_holds_the_stored_scores(scored: BatchReader, columns: Dataset, model: Path) -> None:
    found = training_columns(scored)
    for number in range(BATCHES):
        labels = torch.tensor(found[number * SIZE : (number + 1) * SIZE]["label"])
        assert stored_scores(labels, 3).tolist() == scored.read(0, number)["surrogate_scores"].to_pylist()
        assert stored_mask(labels, 3).tolist() == scored[number]["masked"].tolist()
        with pytest.raises(UserError, match="labels are for 3 columns of documents, but the loss got 2"):
            stored_mask(labels, 2)
    trained = SentenceTransformer(str(model), device="cpu")
    with pytest.raises(UserError, match="no surrogate scores to distil"):
        MaskedContrastiveLoss(trained, distillation=0.5)(*features(trained, columns[:SIZE]))


def test_columns_are_made_by_stretches_and_anew_by_another_version(
    scored: BatchReader, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scored.to_dataset().to_parquet(str(tmp_path / "stored" / "rows.parquet"))

    def labels() -> list[list[int]]:
        rows = load_dataset(str(tmp_path / "stored"), split="train", cache_dir=str(tmp_path / "cache"))
        found: list[list[int]] = training_columns(rows)["label"][:]
        return found

    expected = training_columns(scored)["label"][:]
    assert labels() == expected
    monkeypatch.setattr(ours, "_ROWS_AT_ONCE", 5)  # stretches end within batches
    assert labels() == expected
    columns_of = ours._columns

    def _columns(*arguments: Any, **settings: Any) -> pa.Table:
        return columns_of(*arguments, **settings).set_column(4, "label", pa.array([[1]] * len(arguments[0])))

    _columns.__module__, _columns.__qualname__ = columns_of.__module__, columns_of.__qualname__
    monkeypatch.setattr(ours, "_columns", _columns)
    assert labels()[0] == [1]


def test_defaults_are_those_of_our_objective() -> None:
    settings = ContrastiveSettings()
    for loss in (MaskedContrastiveLoss, CachedMaskedContrastiveLoss):
        of_loss = inspect.signature(loss).parameters
        for name in ("directions", "distillation", "teacher_temperature"):
            assert of_loss[name].default == getattr(settings, name)


def test_a_static_encoder_needs_no_gradient_cache(model: Path) -> None:
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    static = SentenceTransformer(modules=[StaticEmbedding(tokenizer, embedding_dim=8)], device="cpu")
    with pytest.raises(UserError, match="take MaskedContrastiveLoss"):
        CachedMaskedContrastiveLoss(static)


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[Place]:
    """Of each step epoch and number of the batch that the loss saw, whole and in order."""
    found: list[Place] = []
    forward = CachedMaskedContrastiveLoss.forward

    def recorded(self: Any, sentence_features: Any, labels: Any) -> Any:
        result = forward(self, sentence_features, labels)
        found.append((int(labels[0, 0]), int(labels[0, 1])))
        return result

    monkeypatch.setattr(CachedMaskedContrastiveLoss, "forward", recorded)
    return found


def trainer(model: Path, columns: Dataset, folder: Path, **settings: Any) -> SentenceTransformerTrainer:
    trained = SentenceTransformer(str(model), device="cpu")
    arguments: dict[str, Any] = {
        "batch_sampler": StoredBatchSampler, "per_device_train_batch_size": SIZE, "num_train_epochs": 3, "seed": 5,
        "save_steps": 8, "report_to": "none", "use_cpu": True, "disable_tqdm": True,
    }  # fmt: skip
    args = SentenceTransformerTrainingArguments(str(folder), **(arguments | settings))
    loss = CachedMaskedContrastiveLoss(trained, mini_batch_size=4)
    return SentenceTransformerTrainer(trained, args, columns, loss=loss)


def test_a_training_replays_the_stored_epochs_and_so_does_a_resumed_one(
    model: Path, columns: Dataset, tmp_path: Path, seen: list[Place]
) -> None:
    trainer(model, columns, tmp_path).train()
    third = [(0, int(batch)) for batch in epoch_permutation(5, 2, BATCHES)]  # the first epoch's batches again
    assert seen == in_order(5, 0) + in_order(5, 1) + third
    before = seen.copy()
    seen.clear()
    trainer(model, columns, tmp_path).train(resume_from_checkpoint=str(tmp_path / "checkpoint-8"))
    assert seen == before[8:]


@pytest.mark.parametrize("skipped", [0, 2])
def test_processes_take_whole_batches_in_turn_in_any_epoch(columns: Dataset, skipped: int) -> None:
    """As the trainer wraps the sampler for several processes, and again where it resumes within an epoch."""
    found: list[list[Place]] = []
    for process in range(2):
        sampler = StoredBatchSampler(columns, SIZE, seed=1)
        loader = DataLoader(columns, batch_sampler=sampler, collate_fn=lambda rows: [row["label"] for row in rows])
        prepared = prepare_data_loader(loader, num_processes=2, process_index=process, put_on_device=False)
        if skipped:
            prepared = skip_first_batches(prepared, skipped)
        prepared.set_epoch(1)
        under = getattr(prepared.batch_sampler, "batch_sampler", None)
        if hasattr(under, "set_epoch"):  # as transformers does
            under.set_epoch(1)
        labels = [torch.tensor(batch) for batch in prepared]
        assert all(stored_mask(each, 3).shape == (SIZE, 3 * SIZE) for each in labels)
        found.append([(int(each[0, 0]), int(each[0, 1])) for each in labels])
    both = [place for pair in zip(*found, strict=True) for place in pair]
    assert both == in_order(1, 1)[2 * skipped :]


BREAKS: dict[str, tuple[Callable[[Dataset], Dataset], dict[str, Any], str]] = {
    "shuffles": (
        lambda columns: columns,
        {"batch_sampler": "batch_sampler"},
        r"rows of \d stored batches at once \(.*\), because the trainer shuffles. Set batch_sampler=StoredBatchSam",
    ),
    "another size": (
        lambda columns: columns,
        {"per_device_train_batch_size": 4},
        "The batch size is 4, but stored batches have 8 rows",
    ),
    "cut": (lambda columns: columns.select(range(COUNT - 3)), {}, "shuffled or cut after training_columns"),
    "moved": (lambda columns: columns.select(range(3, 3 + 2 * SIZE)), {}, "shuffled or cut after training_columns"),
    "without labels": (lambda columns: columns.remove_columns("label"), {}, "no column 'label' of training_columns"),
}


@pytest.mark.parametrize("break_", BREAKS)
def test_a_trainer_that_breaks_batches_is_refused(model: Path, columns: Dataset, tmp_path: Path, break_: str) -> None:
    change, settings, message = BREAKS[break_]
    with pytest.raises(UserError, match=message):
        trainer(model, change(columns), tmp_path, **settings).train()


def broken(batches: BatchReader) -> Iterator[tuple[Any, str]]:
    rows = batches.to_dataset()
    yield rows.shuffle(seed=0), "are not contiguous"
    yield rows.select(range(3, COUNT)), "some are missing"
    yield rows.select([*range(2 * SIZE), *range(SIZE)]), "are not contiguous"
    yield rows.remove_columns("masked"), "no column masked, so they are no stored batches"
    yield {"query": ["a"]}, "no column epoch, batch"
    table = rows.with_format("arrow")[:]
    lists = table["hard_negatives"].to_pylist()
    ragged = pa.array([lists[0][:1], *lists[1:]], pa.list_(pa.string()))
    places = table.schema.get_field_index("hard_negatives")
    yield (
        Dataset(table.set_column(places, "hard_negatives", ragged)),
        "Row 1 has another number of hard negatives than the first, 1",
    )


def test_rows_that_are_no_whole_batches_are_refused(batches: BatchReader) -> None:
    for data, message in broken(batches):
        with pytest.raises(UserError, match=message):
            training_columns(data)


def test_labels_of_no_whole_batch_are_refused(columns: Dataset) -> None:
    short = Dataset.from_dict({"label": [[1]]})
    for data in ([{"label": [0] * 9}], columns.to_iterable_dataset(), columns.select([]), short):
        with pytest.raises(UserError, match="Give training_columns"):
            StoredBatchSampler(data, SIZE)
    labels, mixed = torch.tensor(columns[:SIZE]["label"]), torch.tensor(columns[: 3 * SIZE : SIZE]["label"])
    for wrong, number, message in (
        (labels.flip(0), 3, "8 rows of stored batch 0, which has 8, or in another order"),
        (mixed[:2], 3, r"rows of 2 stored batches at once \(0 of epoch 0 and 1 of epoch 0\)"),
        (mixed, 3, r"rows of 3 stored batches at once \(0 of epoch 0 and 1 of epoch 0\)"),
        (labels[:5], 3, "5 rows of stored batch 0, which has 8"),
        (labels, 9, "for 3 columns of documents, but the loss got 9"),
        (torch.zeros(SIZE), 3, "other labels than those of training_columns"),
    ):
        with pytest.raises(UserError, match=message):
            stored_mask(wrong, number)


def test_the_program_of_the_documentation_trains_on_published_batches(
    batches: BatchReader, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seen: list[Place]
) -> None:
    page = (Path(__file__).parents[3] / "docs" / "reference" / "batches.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    [program] = [block for block in blocks if "CachedMaskedContrastiveLoss(" in block]
    assert len([line for line in program.splitlines() if line.strip()]) <= 15
    settings = {"batches": batches.uri, "format": "hugging_face", "license": "mit", "output": str(tmp_path / "out")}
    published = make(Export(ExportConfig.model_validate(settings)))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    program = program.replace("org/name", str(model)).replace("runs/mine/exported", published)
    module = types.ModuleType("program")
    monkeypatch.setitem(sys.modules, "program", module)  # the trainer stores its arguments by name
    exec(program.replace("_batch_size=64", f"_batch_size={SIZE}"), module.__dict__)
    assert seen == in_order(42, 0) + in_order(42, 1)  # the trainer's own seed
    trained, before = (SentenceTransformer(str(folder), device="cpu") for folder in (tmp_path / "trained/final", model))
    assert not np.allclose(trained.encode("which of 3"), before.encode("which of 3"), atol=1e-6)
    assert load_dataset(published, split="train").num_rows == 2 * COUNT


def test_published_batches_keep_their_scores(
    scored: BatchReader, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"batches": scored.uri, "format": "hugging_face", "license": "mit", "output": str(tmp_path / "out")}
    published = make(Export(ExportConfig.model_validate(settings)))
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    found, expected = training_columns(load_dataset(published, split="train")), training_columns(scored)
    of = {tuple(row["label"][:2]): [] for row in found}
    for row in found:
        of[tuple(row["label"][:2])].append(row)
    assert sorted(of) == [(0, number) for number in range(BATCHES)]
    assert [row for _, rows in sorted(of.items()) for row in rows] == list(expected)


@pytest.mark.parametrize("with_negatives", [False, True])
def test_the_program_of_the_guide_trains_on_a_table(
    with_negatives: bool, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = (Path(__file__).parents[3] / "docs/guide/batches_in_my_script.md").read_text(encoding="utf-8")
    program = re.findall(r"```python\n(.*?)```", page, re.DOTALL)[0]
    assert len(program.splitlines()) <= 15
    monkeypatch.chdir(tmp_path)
    pairs = {
        "query": [f"which of {pair % 5} is {pair}" for pair in range(COUNT)],
        "document": [f"it is number {pair}, that is {pair * pair}" for pair in range(COUNT)],
    }
    if with_negatives:
        pairs["negative"] = [f"it is number {pair + 1}, that is {pair * pair}" for pair in range(COUNT)]
    Dataset.from_dict(pairs).to_csv("pairs.csv")
    assert "sentence-transformers/all-MiniLM-L6-v2" in program
    assert "batch_size=64" in program
    program = program.replace("sentence-transformers/all-MiniLM-L6-v2", str(model))
    program = program.replace("batch_size=64", f"batch_size={SIZE}")
    before = SentenceTransformer(str(model)).encode(["which is it"])
    values: dict[str, Any] = {}
    exec(program, values)
    assert ("negative_1" in training_columns(values["batches"].to_dataset()).column_names) == with_negatives
    assert np.abs(SentenceTransformer("trained/final").encode(["which is it"]) - before).max() > 1e-6
