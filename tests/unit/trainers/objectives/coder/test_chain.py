"""Embed, search, mine, make lists, train the query encoder, and use it on the index there was before.

With and without a module that scores lists of candidates.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from pipelines.batches import BatchReader
from pipelines.jobs.mine import Mine, MineConfig
from pipelines.jobs.row_batches import Lists, ListsConfig
from raytriever.errors import UserError
from retrieval.encoders.adapter import add_adapter
from retrieval.encoders.list_scorer import load_list_scorer
from retrieval.encoders.pretrained import locate_model
from retrieval.encoders.specification import LoraSettings
from retrieval.encoders.towers import Towers
from retrieval.vectors import StoredVectors
from tests.unit.small_run import make
from tests.unit.trainers.tiny import assert_same, tiny_settings, weights_of, with_columns
from tests.unit.trainers.validation.made_up import DOCUMENTS, encoder_settings, load, make_collection, spread
from tests.unit.trainers.validation.stages import embedded, evaluated, indexed, reranked, searched, searched_by_words
from trainers.engine.loop import train
from trainers.engine.settings import OptimizerSettings
from trainers.objectives.coder.objective import Coder, fit_to_documents
from trainers.objectives.coder.settings import CoderSettings, SmoothingSettings
from trainers.run_settings import RunSettings
from trainers.training_run import run_training
from trainers.validation.retrieval import build_validation
from trainers.validation.settings import RetrievalValidationSettings

TRANSFORMER = {"kind": "transformer", "layers": 1, "heads": 2, "dropout": 0.0}
MEASURES = ["nDCG@10", "RR@10", "AP"]


@pytest.fixture(scope="module")
def base(tmp_path_factory, tiny_encoder):
    return spread(tiny_encoder, tmp_path_factory.mktemp("base") / "encoder")


@pytest.fixture(scope="module")
def collection(tmp_path_factory):
    return make_collection(tmp_path_factory.mktemp("collection"))


@pytest.fixture(scope="module")
def vectors(tmp_path_factory, collection, base):
    """By that encoder, as CODER's runs start from them."""
    return embedded(collection, encoder_settings(base), tmp_path_factory.mktemp("vectors"), texts_per_shard=40)


@pytest.fixture(scope="module")
def index(tmp_path_factory, vectors):
    return indexed(vectors, tmp_path_factory.mktemp("i"), shards=2)


@pytest.fixture(scope="module")
def words(tmp_path_factory, collection):
    """What BM25 finds for the queries of dev."""
    return searched_by_words(collection, tmp_path_factory.mktemp("words"), "dev", top_k=40)


@pytest.fixture(scope="module")
def batches(tmp_path_factory, collection, index, vectors):
    folder = tmp_path_factory.mktemp("batches")
    run = searched(collection, vectors, folder, "train", index, top_k=30)
    mined = make(Mine(MineConfig(run=run, collection=collection, form="labelled_lists", output=str(folder / "mined"))))
    config = ListsConfig(candidates=mined, collection=collection, batch_size=3, epochs=4, output=str(folder / "lists"))
    return make(Lists(config))


def coder(base, vectors, **settings):
    encoder = load(encoder_settings(base))
    return Coder.build(CoderSettings(documents=vectors, temperature=0.1, **settings), Towers(encoder, encoder))


def dev(collection, **settings: Any) -> dict[str, Any]:
    values = {"measure": MEASURES[0], "others": MEASURES[1:], "every": 4}
    return {"kind": "retrieval", "collection": collection} | values | settings


def measure(objective, collection, **settings: Any) -> dict[str, float]:
    validation = RetrievalValidationSettings(**dev(collection, **settings))
    return build_validation(validation, bf16=False, epoch_ends=[8]).measure(objective)


def train_and_export(objective, batches, folder: Path, learning_rate: float) -> None:
    torch.manual_seed(0)
    settings = tiny_settings(epochs=4, optimizer=OptimizerSettings(learning_rate=learning_rate))
    train(objective, BatchReader(batches), settings)
    objective.eval()
    objective.export(folder)


@pytest.fixture(scope="module")
def trained(tmp_path_factory, collection, base, vectors, batches, words):
    """The trained objective's folder, and what validation said of it on dev, searched and ranked anew."""
    folder = tmp_path_factory.mktemp("trained") / "model"
    objective = coder(base, vectors)
    train_and_export(objective, batches, folder, learning_rate=1e-3)
    return folder, measure(objective, collection), measure(objective, collection, run=words, candidates=25)


@pytest.fixture(scope="module")
def scored(tmp_path_factory, collection, base, vectors, batches):
    """A trained objective with a module, its folder, and the vectors of its queries."""
    folder = tmp_path_factory.mktemp("scored")
    torch.manual_seed(0)
    objective = coder(base, vectors, scoring=TRANSFORMER)
    train_and_export(objective, batches, folder / "model", learning_rate=1e-2)
    queries = embedded(collection, encoder_settings(folder / "model"), folder, parts=("queries",))
    return objective, folder / "model", queries


def test_the_exported_encoder_searches_the_index_there_was(trained, collection, vectors, index, words, tmp_path):
    model, found, anew = trained
    queries = embedded(collection, encoder_settings(model), tmp_path, parts=("queries",))
    assert StoredVectors(queries).contract.document_model == StoredVectors(vectors).contract.fingerprint
    run = searched(collection, queries, tmp_path, "dev", index, top_k=DOCUMENTS)
    assert evaluated(collection, run, tmp_path / "found", "dev", MEASURES) == pytest.approx(found, abs=1e-6)
    before = searched(collection, vectors, tmp_path / "before", "dev", index, top_k=DOCUMENTS)
    assert evaluated(collection, before, tmp_path / "before", "dev", MEASURES) != pytest.approx(found, abs=1e-3)
    again = reranked(collection, words, vectors, tmp_path / "r", query_vectors=queries, depth=25)
    assert evaluated(collection, again, tmp_path / "anew", "dev", MEASURES) == pytest.approx(anew, abs=1e-6)
    # an encoder that was trained for these documents trains on
    objective = coder(model, vectors)
    assert objective.encoder("query").contract.document_model == StoredVectors(vectors).contract.fingerprint


def test_validation_and_ranking_by_the_exported_module_agree(scored, collection, vectors, words, tmp_path):
    objective, model, queries = scored
    assert objective.list_scorer.out.abs().max() > 1e-3
    for depth, candidates in ((40, None), (12, 12)):
        expected = measure(objective, collection, run=words, candidates=candidates)
        settings = {"query_vectors": queries, "scoring": str(model), "depth": depth, "queries_per_shard": 4}
        run = reranked(collection, words, vectors, tmp_path / f"{depth}", **settings)
        found = evaluated(collection, run, tmp_path / f"of-{depth}", "dev", MEASURES)
        assert found == pytest.approx(expected, abs=1e-6)
    assert_same(weights_of(load_list_scorer(model)), weights_of(objective.list_scorer))
    base = reranked(collection, words, vectors, tmp_path / "base", depth=12)
    assert evaluated(collection, base, tmp_path / "of-base", "dev", MEASURES) != pytest.approx(expected, abs=1e-3)


def test_it_embeds_no_documents_and_searches_no_others(trained, scored, collection, base, vectors, words, tmp_path):
    model = trained[0]
    with pytest.raises(UserError, match=r"trained on queries only.*'parts: \[queries\]'"):
        embedded(collection, encoder_settings(model), tmp_path)
    queries = embedded(collection, encoder_settings(model), tmp_path / "queries", parts=("queries",))
    others = embedded(collection, encoder_settings(base, normalize=False), tmp_path / "others")
    of_another = "was trained for documents of another encoder"
    with pytest.raises(UserError, match=of_another):
        searched(collection, queries, tmp_path / "other", "dev", indexed(others, tmp_path))
    with pytest.raises(UserError, match=of_another):
        reranked(collection, words, others, tmp_path / "a", query_vectors=queries)
    with pytest.raises(UserError, match=of_another):
        reranked(collection, words, others, tmp_path / "b", query_vectors=scored[2], scoring=str(scored[1]))
    with pytest.raises(UserError, match="holds no scoring module"):
        reranked(collection, words, vectors, tmp_path / "c", query_vectors=scored[2], scoring=str(base))
    with pytest.raises(UserError, match="are of other encoders"):
        reranked(collection, words, vectors, tmp_path / "d", scoring=str(scored[1]))


def test_queries_of_a_module_search_no_index_and_are_not_ranked_by_inner_products(
    scored, collection, vectors, index, words, tmp_path
):
    with pytest.raises(UserError, match=r"trained with a scoring module \(transformer over lists, 1 layers.*'scoring'"):
        searched(collection, scored[2], tmp_path, "dev", index)
    with pytest.raises(UserError, match="'raytriever rerank' with 'scoring'"):
        reranked(collection, words, vectors, tmp_path / "r", query_vectors=scored[2])
    with pytest.raises(UserError, match="can't search a collection"):
        measure(scored[0], collection)


def test_what_does_not_fit_the_encoder_is_refused(base, tiny_encoder, collection, vectors, words, tmp_path):
    other = load(encoder_settings(base, normalize=False))
    with pytest.raises(UserError, match=r"not the one behind the documents' vectors .*normalize False against True"):
        Coder.build(CoderSettings(documents=vectors), Towers(other, other))
    objective = coder(tiny_encoder, vectors, other_encoder=True)
    assert objective.encoder("query").contract.document_model == StoredVectors(vectors).contract.fingerprint
    stored = StoredVectors(vectors)
    stored.contract = stored.contract.model_copy(update={"dimension": 48})
    with pytest.raises(UserError, match=r"have 48\. Choose an encoder of that dimension"):
        fit_to_documents(load(encoder_settings(base)), stored, other_encoder=True)
    adapted = load(encoder_settings(base))
    add_adapter(adapted.transformer, LoraSettings(rank=2), 0)
    frozen = CoderSettings(documents=vectors, other_encoder=True, scoring=TRANSFORMER | {"query_encoder": "frozen"})
    with pytest.raises(UserError, match="lora adds weights to it, which would never be trained"):
        Coder.build(frozen, Towers(adapted, adapted))
    of_train = embedded(collection, encoder_settings(base), tmp_path, splits=("train",))  # of all documents
    with pytest.raises(UserError, match="vectors of a ranking's texts, or of some splits' queries"):
        coder(base, of_train, smoothing=SmoothingSettings())
    of_run = embedded(collection, encoder_settings(base), tmp_path / "run", run=words, depth=3)
    with pytest.raises(UserError, match="vectors of a ranking's texts, or of some splits' queries"):
        coder(base, of_run)


def run_settings(base, vectors, batches, validation, **objective: Any) -> RunSettings:
    optimizer = OptimizerSettings(learning_rate=3e-3)
    training = tiny_settings(epochs=4, batches_per_step=1, checkpoint_every=2, optimizer=optimizer)
    return RunSettings.model_validate(
        {
            "batches": batches,
            "encoder": encoder_settings(base).model_dump(),
            "objective": {"kind": "coder", "documents": vectors, "temperature": 0.1} | objective,
            "training": training.model_dump(),
            "validation": validation,
        }
    )


def run(settings: RunSettings, base, folder: Path, **changes: Any):
    """The weights that it ends with, and what it says of itself."""
    settings = settings.model_copy(update={"training": settings.training.model_copy(update=changes)})
    objective, done = run_training(settings, {"encoder": locate_model(str(base))}, str(folder), torch.device("cpu"))
    return weights_of(objective), done


@pytest.mark.parametrize("scoring", [None, "trained", "frozen"])
def test_a_run_resumes_as_if_it_had_not_stopped(scoring, base, collection, vectors, batches, words, tmp_path):
    validation, objective = dev(collection), {"negatives": "corpus"}
    if scoring is not None:
        validation |= {"run": words}
        objective = {"scoring": TRANSFORMER | {"dropout": 0.2, "query_encoder": scoring}}
    settings = run_settings(base, vectors, batches, validation, **objective)
    whole, done = run(settings, base, tmp_path / "whole")
    run(settings, base, tmp_path / "resumed", max_steps=3)
    resumed, again = run(settings, base, tmp_path / "resumed")
    assert done.state.steps == again.state.steps > 3
    assert done.state.evaluations[-1].measures == again.state.evaluations[-1].measures
    assert_same(resumed, whole)
    before = weights_of(load(encoder_settings(base)))
    assert all((value == whole[f"query_encoder.{name}"]).all() for name, value in before.items()) == (
        scoring == "frozen"
    )


def test_what_can_not_be_validated_on_is_refused(base, collection, vectors, batches, tmp_path):
    other = make_collection(tmp_path / "other", seed=1)
    with pytest.raises(UserError, match="don't come from the same collection"):
        measure(coder(base, vectors), other)
    others = embedded(other, encoder_settings(base), tmp_path / "of-other")
    with pytest.raises(UserError, match="don't come from the same collection"):
        run(run_settings(base, others, batches, None), base, tmp_path / "refused")
    with pytest.raises(ValidationError, match=r"can't search a collection.*validation.run"):
        run_settings(base, vectors, batches, dev(collection), scoring=TRANSFORMER)
    of_training = {"kind": "batches", "batches": batches, "every": 4}
    with pytest.raises(ValidationError, match=r"contain every positive.*Use kind 'retrieval'"):
        run_settings(base, vectors, batches, of_training, scoring=TRANSFORMER)


def test_smoothed_labels_reach_the_loss(base, vectors, batches):
    rows = BatchReader(batches).read(0, 0)
    rows = with_columns(rows, epoch=[0] * len(rows))
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
