"""Embed, search, mine, make lists, train the query encoder, and use it on the index there was before."""

from pathlib import Path

import pytest
import torch

from pipelines.batches import BatchReader
from pipelines.jobs.mine import Mine, MineConfig
from pipelines.jobs.row_batches import Lists, ListsConfig
from raytriever.errors import UserError
from retrieval.encoders.pretrained import locate_model
from retrieval.jobs.index import Index, IndexConfig, VectorIndexSettings
from retrieval.jobs.rerank import Rerank, RerankConfig
from retrieval.jobs.search import Search, SearchConfig
from retrieval.vectors import StoredVectors
from tests.unit.small_run import make
from tests.unit.trainers.tiny import tiny_settings
from tests.unit.trainers.validation.made_up import DOCUMENTS, encoder_settings, load, make_collection
from tests.unit.trainers.validation.stages import embedded, evaluated, searched_by_words
from trainers.engine.loop import train
from trainers.engine.settings import OptimizerSettings
from trainers.objectives.coder.objective import fit_to_documents, load_coder
from trainers.objectives.coder.settings import CoderSettings, SmoothingSettings
from trainers.run_settings import RunSettings
from trainers.training_run import run_training
from trainers.validation.retrieval import build_validation
from trainers.validation.settings import RetrievalValidationSettings

MEASURES = ["nDCG@10", "RR@10", "AP"]


@pytest.fixture(scope="module")
def index(tmp_path_factory, vectors):
    config = IndexConfig(index=VectorIndexSettings(vectors=vectors, shards=2), output=str(tmp_path_factory.mktemp("i")))
    return make(Index(config))


def search(collection, index, vectors, output: Path, split: str) -> str:
    config = SearchConfig(
        index=index, collection=collection, vectors=vectors, split=split, top_k=30 if split == "train" else DOCUMENTS,
        output=str(output / f"run-{split}"),
    )  # fmt: skip
    return make(Search(config))


@pytest.fixture(scope="module")
def batches(tmp_path_factory, collection, index, vectors):
    folder = tmp_path_factory.mktemp("batches")
    run = search(collection, index, vectors, folder, "train")
    mined = make(Mine(MineConfig(run=run, collection=collection, form="labelled_lists", output=str(folder / "mined"))))
    config = ListsConfig(candidates=mined, collection=collection, batch_size=3, epochs=4, output=str(folder / "lists"))
    return make(Lists(config))


def coder(base, vectors, **settings):
    return load_coder(load(encoder_settings(base)), CoderSettings(documents=vectors, temperature=0.1, **settings))


def validation(collection, **settings):
    values = {"measure": MEASURES[0], "others": MEASURES[1:], "every": 4} | settings
    return build_validation(RetrievalValidationSettings(collection=collection, **values), bf16=False, epoch_ends=[8])


@pytest.fixture(scope="module")
def trained(tmp_path_factory, collection, base, vectors, batches):
    """The trained objective's folder, and what validation said of it on dev, searched and ranked anew."""
    folder = tmp_path_factory.mktemp("trained")
    torch.manual_seed(0)
    objective = coder(base, vectors)
    settings = tiny_settings(epochs=4, optimizer=OptimizerSettings(learning_rate=1e-3))
    train(objective, BatchReader(batches), settings)
    objective.eval()
    objective.export(folder / "model")
    run = searched_by_words(collection, folder, "dev", top_k=40)
    measured = [validation(collection, **given).measure(objective) for given in ({}, {"run": run, "candidates": 25})]
    return folder / "model", run, measured


def test_the_exported_encoder_searches_the_index_there_was(trained, collection, vectors, index, tmp_path):
    model, words, (searched, anew) = trained
    queries = embedded(collection, encoder_settings(model), tmp_path, parts=("queries",))
    assert StoredVectors(queries).contract.document_model == StoredVectors(vectors).contract.fingerprint
    run = search(collection, index, queries, tmp_path, "dev")
    assert evaluated(collection, run, tmp_path / "searched", "dev", MEASURES) == pytest.approx(searched, abs=1e-6)
    before = search(collection, index, vectors, tmp_path / "before", "dev")
    assert evaluated(collection, before, tmp_path / "before", "dev", MEASURES) != pytest.approx(searched, abs=1e-3)
    config = RerankConfig(
        run=words, vectors=vectors, query_vectors=queries, collection=collection, depth=25, output=str(tmp_path / "r")
    )
    again = make(Rerank(config))
    assert evaluated(collection, again, tmp_path / "anew", "dev", MEASURES) == pytest.approx(anew, abs=1e-6)
    # an encoder that was trained for these documents trains on
    objective = coder(model, vectors)
    assert objective.encoder("query").contract.document_model == StoredVectors(vectors).contract.fingerprint


def test_it_embeds_no_documents_and_searches_no_others(trained, collection, base, tmp_path):
    model = trained[0]
    with pytest.raises(UserError, match=r"trained on queries alone.*'parts: \[queries\]'"):
        embedded(collection, encoder_settings(model), tmp_path)
    queries = embedded(collection, encoder_settings(model), tmp_path / "queries", parts=("queries",))
    others = embedded(collection, encoder_settings(base, normalize=False), tmp_path / "others")
    config = IndexConfig(index=VectorIndexSettings(vectors=others), output=str(tmp_path / "other-index"))
    with pytest.raises(UserError, match="was trained for documents of another encoder"):
        search(collection, make(Index(config)), queries, tmp_path / "other", "dev")
    with pytest.raises(UserError, match="was trained for documents of another encoder"):
        make(
            Rerank(
                RerankConfig(
                    run=trained[1], vectors=others, query_vectors=queries, collection=collection,
                    output=str(tmp_path / "reranked"),
                )
            )
        )  # fmt: skip


def test_an_encoder_that_did_not_make_the_documents_is_refused(base, tiny_encoder, vectors):
    with pytest.raises(UserError, match=r"not the one behind the documents' vectors .*normalize False against True"):
        load_coder(load(encoder_settings(base, normalize=False)), CoderSettings(documents=vectors))
    settings = CoderSettings(documents=vectors, other_encoder=True)
    objective = load_coder(load(encoder_settings(tiny_encoder)), settings)
    assert objective.encoder("query").contract.document_model == StoredVectors(vectors).contract.fingerprint


def test_another_dimension_is_refused(base, vectors):
    stored = StoredVectors(vectors)
    stored.contract = stored.contract.model_copy(update={"dimension": 48})
    with pytest.raises(UserError, match=r"have 48\. Choose an encoder of that dimension"):
        fit_to_documents(load(encoder_settings(base)), stored, other_encoder=True)


def test_a_run_from_settings_resumes_and_refuses_other_collections(base, collection, vectors, batches, tmp_path):
    located = {"encoder": locate_model(str(base))}

    def run(folder: Path, **changes):
        settings = RunSettings.model_validate(
            {
                "batches": batches,
                "encoder": encoder_settings(base).model_dump(),
                "objective": {"kind": "coder", "documents": vectors, "temperature": 0.1, "negatives": "corpus"},
                "training": {"bf16": False, "checkpoint_every": 2, "epochs": 4, "schedule": {"kind": "constant"}}
                | changes,
                "validation": {
                    "kind": "retrieval",
                    "collection": collection,
                    "measure": "AP",
                    "others": [],
                    "every": 4,
                },
            }
        )
        objective, done = run_training(settings, located, str(folder), torch.device("cpu"))
        return {name: value.detach().clone() for name, value in objective.named_parameters()}, done

    whole, done = run(tmp_path / "whole")
    run(tmp_path / "resumed", max_steps=3)
    resumed, again = run(tmp_path / "resumed")
    assert done.state.steps == again.state.steps == 8
    assert [e.measures for e in done.state.evaluations][-1] == [e.measures for e in again.state.evaluations][-1]
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)
    other = make_collection(tmp_path / "other", seed=1)
    made = embedded(other, encoder_settings(base), tmp_path / "of-other")
    with pytest.raises(UserError, match="don't come from the same collection"):
        validation(other).measure(coder(base, vectors))
    vectors = made
    with pytest.raises(UserError, match="don't come from the same collection"):
        run(tmp_path / "refused")


def test_smoothed_labels_reach_the_loss(base, vectors, batches):
    rows = BatchReader(batches).read(0, 0)
    rows = rows.append_column("epoch", [[0] * len(rows)])
    plain, smooth = coder(base, vectors), coder(base, vectors, smoothing=SmoothingSettings(depth=5, minimum=-1.0))
    hard, soft = plain.collate(rows).labels, smooth.collate(rows).labels
    for field in ("places", "documents"):
        assert torch.equal(getattr(plain.collate(rows), field), getattr(smooth.collate(rows), field))
    for before, after in zip(hard, soft, strict=True):
        assert after.isfinite().sum() == before.isfinite().sum() + 5
        positives = before.isfinite()
        assert after[positives].min() > after[after.isfinite() & ~positives].max() - 0.5
    some = coder(base, vectors, smoothing=SmoothingSettings(minimum=0.3), label_normalization="max_min")
    assert some.collate(rows).labels.isfinite().sum() < soft.isfinite().sum() + DOCUMENTS
    assert some(some.collate(rows)).loss > 0
