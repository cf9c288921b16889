"""CODER by a module that scores lists: the objective, then training, export, validation and ranking by it."""

from pathlib import Path

import numpy as np
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
from retrieval.jobs.index import Index, IndexConfig, VectorIndexSettings
from retrieval.jobs.rerank import Rerank, RerankConfig
from retrieval.jobs.search import Search, SearchConfig
from tests.unit.small_run import make
from tests.unit.trainers.candidate_batches import candidate_batch, document_values, store_vectors, tiny_coder
from tests.unit.trainers.tiny import tiny_settings
from tests.unit.trainers.validation.made_up import encoder_settings, load
from tests.unit.trainers.validation.stages import embedded, evaluated, searched_by_words
from trainers.engine.loop import train
from trainers.engine.settings import OptimizerSettings
from trainers.objectives.coder.objective import load_coder
from trainers.objectives.coder.settings import CoderSettings
from trainers.run_settings import RunSettings
from trainers.training_run import run_training
from trainers.validation.retrieval import build_validation
from trainers.validation.settings import RetrievalValidationSettings

TRANSFORMER = {"kind": "transformer", "layers": 1, "heads": 2, "dropout": 0.0}
MEASURES = ["nDCG@10", "RR@10", "AP"]


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    return store_vectors(tmp_path_factory.mktemp("documents"))


def coder_with_scorer(stored, seed=5, **settings):
    """In float64, with a module that adds something to the inner products."""
    objective = tiny_coder(stored, scoring=TRANSFORMER | settings.pop("scoring", {}), **settings).double()
    with torch.no_grad():
        out = objective.list_scorer.out
        out += torch.randn(out.shape, generator=torch.Generator().manual_seed(seed))
    return objective


@pytest.mark.parametrize("cut", [{}, {"chunk_size": 2, "gradient_cache": True}], ids=str)
def test_the_loss_is_that_of_the_modules_scores(stored, cut):
    rows, documents = candidate_batch(5), torch.from_numpy(document_values()).double()
    objective = coder_with_scorer(stored, temperature=0.7, **cut)
    encoder, losses = objective.encoder("query"), []
    for row in rows.to_pylist():
        query = encoder(encoder.tokenize([row["query"]], "query"))
        found = torch.cat([documents[row["candidate_rows"]], torch.zeros(1, 6)])
        scores = objective.list_scorer(query, found, torch.arange(len(found) - 1)[None])[0] / 0.7
        grades = torch.tensor([-torch.inf if not g else float(g) for g in row["candidate_relevance"]])
        if grades.isfinite().any():
            target = grades.softmax(0)
            terms = target[target > 0] * (target[target > 0].log() - scores.log_softmax(0)[target > 0])
            losses.append(terms.sum().item())
    outcome = objective(objective.collate(rows))
    assert outcome.loss.item() == pytest.approx(np.mean(losses), rel=1e-6)  # labels are softmaxed in float32 here
    plain = tiny_coder(stored, temperature=0.7)
    assert abs(plain(plain.collate(rows)).loss.item() - outcome.loss.item()) > 1e-3


def test_an_untrained_module_changes_no_loss(stored):
    rows = candidate_batch(5)
    plain, scored = tiny_coder(stored), tiny_coder(stored, scoring=TRANSFORMER).double()
    assert plain.list_scorer is None
    losses = [objective(objective.collate(rows)).loss.item() for objective in (plain, scored)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-12)


def test_encoder_and_module_learn_and_unlabelled_queries_teach_nothing(stored):
    objective, rows = coder_with_scorer(stored), candidate_batch(2)
    objective(objective.collate(rows.slice(2, 1))).loss.backward()
    assert all(not parameter.grad.any() for parameter in objective.parameters())
    objective(objective.collate(rows)).loss.backward()
    assert all(parameter.grad.any() for parameter in objective.parameters() if parameter.ndim > 1)


def test_a_query_does_not_depend_on_those_beside_it(stored):
    objective, rows = coder_with_scorer(stored), candidate_batch(2, size=6, longest=20)
    whole = objective(objective.collate(rows)).loss.item()
    alone = [objective(objective.collate(rows.slice(place, 1))).loss.item() for place in range(6)]
    assert whole == pytest.approx(sum(alone) / 5, rel=1e-12)


def test_lists_of_none_and_of_one_candidate(stored):
    rows = candidate_batch(2, size=2).to_pylist()
    rows[0] |= {"candidate_rows": [], "candidate_relevance": []}
    rows[1] |= {"candidate_rows": [4], "candidate_relevance": [1]}
    table = candidate_batch(2).schema.empty_table().from_pylist(rows, schema=candidate_batch(2).schema)
    for loss in ("list_net", "info_nce", "max_margin"):
        objective = coder_with_scorer(stored, loss=loss)
        loss = objective(objective.collate(table)).loss
        loss.backward()
        assert loss.item() == pytest.approx(0, abs=1e-12)
        assert all(parameter.grad.isfinite().all() for parameter in objective.parameters())


def test_a_frozen_query_encoder_stays_as_it_is(stored):
    objective = coder_with_scorer(stored, scoring={"query_encoder": "frozen", "dropout": 0.5})
    objective.train()
    assert not objective.query_encoder.training
    assert objective.list_scorer.training
    trained = {name for name, parameter in objective.named_parameters() if parameter.requires_grad}
    assert trained
    assert all("list_scorer" in name for name in trained)
    objective(objective.collate(candidate_batch(2))).loss.backward()
    assert all(parameter.grad is None for parameter in objective.query_encoder.parameters())
    assert objective.list_scorer.out.grad.any()


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"similarity": "cosine"}, "set similarity to inner_product"),
        ({"scoring": {"kind": "similarity", "query_encoder": "frozen"}}, "query_encoder"),
        ({"scoring": {"kind": "recurrent"}}, "'similarity', 'transformer'"),
    ],
)
def test_settings_that_do_not_fit_are_refused(settings, match):
    with pytest.raises(ValidationError, match=match):
        CoderSettings(documents="vectors", **({"scoring": {"kind": "transformer"}} | settings))


@pytest.fixture(scope="module")
def runs(tmp_path_factory, collection):
    """What BM25 finds, of the queries to train on and of dev."""
    return {
        split: searched_by_words(collection, tmp_path_factory.mktemp(split), split, top_k=30)
        for split in ("train", "dev")
    }


@pytest.fixture(scope="module")
def batches(tmp_path_factory, collection, runs):
    folder = tmp_path_factory.mktemp("batches")
    mining = MineConfig(run=runs["train"], collection=collection, form="labelled_lists", output=str(folder / "mined"))
    config = ListsConfig(
        candidates=make(Mine(mining)), collection=collection, batch_size=3, epochs=4, output=str(folder / "lists")
    )
    return make(Lists(config))


def run_settings(base, vectors, batches, validation, **scoring):
    return RunSettings.model_validate(
        {
            "batches": batches,
            "encoder": encoder_settings(base).model_dump(),
            "objective": {
                "kind": "coder",
                "documents": vectors,
                "temperature": 0.1,
                "scoring": TRANSFORMER | {"dropout": 0.1} | scoring,
            },
            "training": tiny_settings(
                epochs=4, batches_per_step=1, checkpoint_every=2, optimizer=OptimizerSettings(learning_rate=3e-3)
            ).model_dump(),
            "validation": validation,
        }
    )


def dev(collection, run, **settings):
    measures = {"measure": MEASURES[0], "others": MEASURES[1:]}
    return {"kind": "retrieval", "collection": collection, "run": run, "every": 4} | measures | settings


@pytest.fixture(scope="module")
def trained(tmp_path_factory, collection, base, vectors, batches, runs):
    """A trained objective, its folder, and what validation said of it with all candidates and with some."""
    folder, torch_seed = tmp_path_factory.mktemp("trained"), 0
    torch.manual_seed(torch_seed)
    settings = CoderSettings(documents=vectors, temperature=0.1, scoring=TRANSFORMER)
    objective = load_coder(load(encoder_settings(base)), settings)
    train(objective, BatchReader(batches), tiny_settings(epochs=4, optimizer=OptimizerSettings(learning_rate=1e-2)))
    objective.eval()
    objective.export(folder / "model")
    measured = [
        build_validation(
            RetrievalValidationSettings(**dev(collection, runs["dev"], candidates=count)), bf16=False, epoch_ends=[8]
        ).measure(objective)
        for count in (None, 12)
    ]
    return objective, folder / "model", measured


@pytest.fixture(scope="module")
def queries(tmp_path_factory, trained, collection):
    return embedded(collection, encoder_settings(trained[1]), tmp_path_factory.mktemp("q"), parts=("queries",))


def reranked(collection, run, vectors, output, **settings):
    config = RerankConfig(run=run, vectors=vectors, collection=collection, output=str(output), **settings)
    return make(Rerank(config))


def test_validation_and_ranking_by_the_exported_module_agree(trained, collection, vectors, queries, runs, tmp_path):
    objective, model, measured = trained
    assert objective.list_scorer.out.abs().max() > 1e-3
    for name, depth, expected in (("all", 30, measured[0]), ("some", 12, measured[1])):
        settings = {"query_vectors": queries, "scoring": str(model), "depth": depth, "queries_per_shard": 4}
        run = reranked(collection, runs["dev"], vectors, tmp_path / name, **settings)
        found = evaluated(collection, run, tmp_path / f"of-{name}", "dev", MEASURES)
        assert found == pytest.approx(expected, abs=1e-6)
    loaded = load_list_scorer(model)
    for name, value in objective.list_scorer.named_parameters():
        assert torch.equal(value, dict(loaded.named_parameters())[name])
    base = reranked(collection, runs["dev"], vectors, tmp_path / "base", depth=30)
    assert evaluated(collection, base, tmp_path / "of-base", "dev", MEASURES) != pytest.approx(measured[0], abs=1e-3)


def test_its_queries_search_no_index_and_are_not_ranked_by_inner_products(collection, vectors, queries, runs, tmp_path):
    index = make(Index(IndexConfig(index=VectorIndexSettings(vectors=vectors), output=str(tmp_path / "index"))))
    with pytest.raises(UserError, match=r"trained with a scoring module \(transformer over lists, 1 layers.*'scoring'"):
        make(
            Search(
                SearchConfig(
                    index=index, collection=collection, vectors=queries, split="dev", output=str(tmp_path / "run")
                )
            )
        )
    with pytest.raises(UserError, match="'raytriever rerank' with 'scoring'"):
        reranked(collection, runs["dev"], vectors, tmp_path / "r", query_vectors=queries)


def test_a_module_that_is_absent_or_of_another_encoder_is_refused(
    trained, base, collection, vectors, queries, runs, tmp_path
):
    with pytest.raises(UserError, match="holds no scoring module"):
        reranked(collection, runs["dev"], vectors, tmp_path / "a", query_vectors=queries, scoring=str(base))
    with pytest.raises(UserError, match="are of other encoders"):
        reranked(collection, runs["dev"], vectors, tmp_path / "b", scoring=str(trained[1]))
    others = embedded(collection, encoder_settings(base, normalize=False), tmp_path / "others")
    with pytest.raises(UserError, match="was trained for documents of another encoder"):
        reranked(collection, runs["dev"], others, tmp_path / "c", query_vectors=queries, scoring=str(trained[1]))


def test_a_search_of_the_collection_can_not_validate_it(trained, base, collection, vectors, batches):
    searching = dev(collection, None)
    with pytest.raises(ValidationError, match=r"can't search a collection.*validation.run"):
        run_settings(base, vectors, batches, searching)
    validation = build_validation(RetrievalValidationSettings(**searching), bf16=False, epoch_ends=[8])
    with pytest.raises(UserError, match="can't search a collection"):
        validation.measure(trained[0])


def test_lists_with_positives_that_no_search_found_can_not_validate(base, vectors, batches):
    with pytest.raises(ValidationError, match=r"every positive was put.*Take kind 'retrieval'"):
        run_settings(base, vectors, batches, {"kind": "batches", "batches": batches, "every": 4})


@pytest.mark.parametrize("query_encoder", ["trained", "frozen"])
def test_a_run_resumes_as_if_it_had_not_stopped(query_encoder, base, collection, vectors, batches, runs, tmp_path):
    settings = run_settings(
        base, vectors, batches, dev(collection, runs["dev"]), query_encoder=query_encoder, dropout=0.2
    )
    located = {"encoder": locate_model(str(base))}

    def run(folder: Path, **changes):
        training = settings.training.model_copy(update=changes)
        objective, done = run_training(
            settings.model_copy(update={"training": training}),
            located,
            str(folder),
            torch.device("cpu"),
        )
        return dict(objective.named_parameters()), done

    before = dict(load(encoder_settings(base)).named_parameters())
    whole, done = run(tmp_path / "whole")
    run(tmp_path / "resumed", max_steps=3)
    resumed, again = run(tmp_path / "resumed")
    assert done.state.evaluations[-1].measures == again.state.evaluations[-1].measures
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)
    same = [torch.equal(value, whole[f"query_encoder.{name}"]) for name, value in before.items()]
    assert all(same) == (query_encoder == "frozen")


def test_nothing_fresh_is_frozen(base, vectors):
    settings = CoderSettings(documents=vectors, other_encoder=True, scoring=TRANSFORMER | {"query_encoder": "frozen"})
    adapted = load(encoder_settings(base))
    add_adapter(adapted.transformer, LoraSettings(rank=2), 0)
    with pytest.raises(UserError, match="lora adds weights to it, which would never be trained"):
        load_coder(adapted, settings)
