"""Validation by retrieval says what the stages say, encodes every text once, and leaves nothing behind."""

import os
import random
import tracemalloc
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

from raytriever.artifacts.artifact import Artifact
from raytriever.errors import UserError
from retrieval.collections.collection import StoredCollection
from retrieval.encoders.multi_vector import MultiVectorEncoder
from retrieval.encoders.specification import VectorForm
from retrieval.rankings import StoredRanking, read_ranking_file
from tests.unit.trainers.validation.made_up import (
    DOCUMENTS,
    PairObjective,
    collect,
    encoder_settings,
    load,
    make_collection,
    write_source,
)
from tests.unit.trainers.validation.stages import embedded, evaluated, reranked, searched, searched_by_words
from trainers.validation import retrieval
from trainers.validation.retrieval import build_validation
from trainers.validation.settings import RetrievalValidationSettings
from trainers.validation.texts import SharedTexts

MEASURES = ["nDCG@10", "RR@10", "R@100", "AP", "Success@1"]


@pytest.fixture(scope="module")
def collection(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_collection(tmp_path_factory.mktemp("validated"))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, collection: str) -> str:
    """What BM25 finds for the queries of dev."""
    return searched_by_words(collection, tmp_path_factory.mktemp("words"), "dev", top_k=50)


def opened(collection: str, bf16: bool = False, **settings):
    values = {"measure": MEASURES[0], "others": MEASURES[1:], "every": 2} | settings
    return build_validation(RetrievalValidationSettings(collection=collection, **values), bf16=bf16, epoch_ends=[10])


def test_the_loop_is_told_when_to_measure_and_when_to_stop(collection):
    validation = opened(collection, every=7, patience=3)
    assert (validation.every, validation.patience) == (7, 3)


@pytest.mark.parametrize("normalize", [True, False])
def test_a_search_has_the_numbers_of_the_stages_in_blocks_of_any_size(
    collection, spread_encoder, tmp_path, monkeypatch, normalize
):
    settings = encoder_settings(spread_encoder, normalize=normalize)
    vectors = embedded(collection, settings, tmp_path)
    run = searched(collection, vectors, tmp_path, "dev")
    expected = evaluated(collection, run, tmp_path, "dev", MEASURES)
    objective = PairObjective(load(settings))
    found = opened(collection).measure(objective)
    assert list(found) == MEASURES
    assert found == pytest.approx(expected, abs=1e-12)
    assert 0 < found["AP"] < 1
    monkeypatch.setattr(retrieval, "_VECTORS_AT_ONCE", 7)
    assert opened(collection, token_budget=64).measure(objective) == pytest.approx(found, abs=1e-12)


def test_a_run_and_a_file_of_another_tool_are_ranked_anew_as_by_the_stages(
    collection, run, spread_encoder, objective, tmp_path, monkeypatch
):
    lines = (Path(run) / "run.trec").read_text().splitlines(keepends=True)
    file = tmp_path / "official.trec"
    file.write_text("".join(random.Random(0).sample(lines, len(lines))))  # tools sort by the score
    by_artifact, by_file = tmp_path / "a", tmp_path / "f"
    vectors = embedded(collection, encoder_settings(spread_encoder), by_artifact, run=run, depth=25)
    again = reranked(collection, run, vectors, by_artifact, depth=25)
    of_file = embedded(collection, encoder_settings(spread_encoder), by_file, run=str(file), depth=25)
    official = reranked(collection, str(file), of_file, by_file, depth=25)
    assert sorted(text(again)) == sorted(text(official))  # queries come in the order of the file
    validation = opened(collection, run=run, candidates=25, token_budget=128)
    found = validation.measure(objective)
    assert found == pytest.approx(evaluated(collection, again, tmp_path, "dev", MEASURES), abs=1e-6)
    assert len(set(objective.encoded)) < DOCUMENTS
    assert "25 candidates of each" in validation.notes[0]
    monkeypatch.setattr(retrieval, "_VECTORS_AT_ONCE", 1)
    alone = opened(collection, run=str(file), candidates=25, token_budget=1)  # each document is a block
    assert alone.measure(objective) == pytest.approx(found, abs=1e-9)
    for change, named in (("d1", "documents are not in"), ("q1", "queries are not in")):
        file.write_text("".join(line.replace(f"{change} ", f"{change}x ") for line in lines))
        message = rf"ranking .*official.trec is of other texts: .* {named}"
        with pytest.raises(UserError, match=message):
            opened(collection, run=str(file))
        with pytest.raises(UserError, match=message):
            reranked(collection, str(file), vectors, tmp_path / change, depth=5)
    with pytest.raises(UserError, match=r"run is '.*absent.trec', which is not a run artifact or a run file"):
        reranked(collection, str(tmp_path / "absent.trec"), vectors, tmp_path / "absent", depth=5)


def text(run: str) -> list[str]:
    return (Path(run) / "run.trec").read_text().splitlines()


def test_conventions_are_those_of_the_tool_that_is_named(spread_encoder, objective, tmp_path):
    judged = {"q0": {"d1": 1}, "q1": {"d2": 1, "d3": 0}, "q2": {"d4": 0}}
    collection = make_collection(tmp_path, dev=judged)
    run = searched(collection, embedded(collection, encoder_settings(spread_encoder), tmp_path), tmp_path, "dev")
    for like in ("trec", "beir"):
        expected = evaluated(collection, run, tmp_path / like, "dev", MEASURES, like=like)
        assert opened(collection, like=like).measure(objective) == pytest.approx(expected, abs=1e-12)


def test_each_distinct_text_is_encoded_once_an_evaluation_and_tokenised_once_a_run(collection, objective, monkeypatch):
    tokenised = []
    encoder = objective.text_encoder
    tokenize_ids = encoder.tokenize_ids

    def counting(texts, role, max_length=None):
        tokenised.extend((role, text) for text in texts)
        return tokenize_ids(texts, role, max_length)

    monkeypatch.setattr(encoder, "tokenize_ids", counting)
    stored = StoredCollection(collection)
    documents = set(stored.texts("documents", np.arange(DOCUMENTS)))
    dev = set(stored.judgments("dev")["query_id"].to_pylist())
    queries = stored.require("queries", sorted(dev))
    expected = [("document", text) for text in documents] + [
        ("query", text) for text in set(stored.texts("queries", queries))
    ]
    assert len(documents) < DOCUMENTS
    validation = opened(collection, token_budget=200)
    before = validation.measure(objective)
    assert Counter(tokenised) == Counter(expected)
    first = Counter(objective.encoded)
    assert first == Counter(tuple(tokenize_ids([text], role)[0]) for role, text in expected)
    objective.encoded.clear()
    validation.measure(objective)
    assert Counter(tokenised) == Counter(expected)
    assert Counter(objective.encoded) == first
    with torch.no_grad():  # what is measured is the encoder as it is now, not as it was when texts were tokenised
        for parameter in objective.parameters():
            parameter += 0.3 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0))
    assert validation.measure(objective) != before


def test_padding_stays_within_the_budget_and_lengths_cut_texts(collection, objective):
    shapes = []
    objective.text_encoder.register_forward_pre_hook(lambda _, given: shapes.append(given[0]["input_ids"].shape))
    opened(collection, token_budget=100).measure(objective)
    assert max(rows * width for rows, width in shapes if rows > 1) <= 100
    assert len(shapes) > 10
    objective.encoded.clear()
    prompt = tuple(objective.text_encoder.tokenize_ids([""], "query")[0][:-1])
    opened(collection, query_max_length=len(prompt) + 2, document_max_length=9).measure(objective)
    queries = {text for text in objective.encoded if text[: len(prompt)] == prompt}
    assert max(map(len, queries)) == len(prompt) + 2
    assert max(map(len, set(objective.encoded) - queries)) == 9


def test_documents_are_read_with_their_titles_unless_told_otherwise(objective, tmp_path):
    source = write_source(tmp_path / "source")
    corpus = (source / "corpus.jsonl").read_text()
    (source / "corpus.jsonl").write_text(corpus.replace('"text"', '"title": "yield", "text"'))
    collection = collect(source, tmp_path / "collection")
    for with_title in (True, False):
        texts = StoredCollection(collection).texts("documents", np.arange(DOCUMENTS), with_title=with_title)
        objective.encoded.clear()
        opened(collection, with_title=with_title).measure(objective)
        assert set(map(tuple, objective.text_encoder.tokenize_ids(texts, "document"))) <= set(objective.encoded)
        assert all(text.startswith("yield ") for text in texts) == with_title


def test_an_evaluation_leaves_no_trace(collection, objective):
    for parameter in objective.parameters():
        parameter.grad = torch.ones_like(parameter)
    objective.batch_group = "the ranks of a batch"  # never used: an evaluation is each rank's own
    modes = [module.training for module in objective.modules()]
    assert set(modes) == {True, False}
    weights = {name: value.clone() for name, value in objective.state_dict().items()}
    validation = opened(collection)
    found = validation.measure(objective)
    assert found == validation.measure(objective)
    assert objective.batch_group == "the ranks of a batch"
    assert all(torch.equal(parameter.grad, torch.ones_like(parameter)) for parameter in objective.parameters())
    assert all(torch.equal(value, weights[name]) for name, value in objective.state_dict().items())
    for fails in (False, True):
        if fails:
            objective.text_encoder.forward = lambda features: features["no such thing"]
            with pytest.raises(KeyError):
                validation.measure(objective)
        assert [module.training for module in objective.modules()] == modes
        assert torch.is_grad_enabled()


def test_bf16_is_that_of_the_training_unless_said(collection, objective):
    kinds = []
    linear = next(module for module in objective.modules() if isinstance(module, torch.nn.Linear))
    linear.register_forward_hook(lambda _module, _given, output: kinds.append(output.dtype))
    for training, validation, expected in [(True, None, torch.bfloat16), (True, False, torch.float32)]:
        kinds.clear()
        settings = RetrievalValidationSettings(collection=collection, bf16=validation)
        build_validation(settings, bf16=training, epoch_ends=[10]).measure(objective)
        assert set(kinds) == {expected}


FORMS = {
    "layers": VectorForm(kind="layers", layers=[1, 2]),
    "tokens": VectorForm(kind="first_tokens", tokens=4),
    "all tokens": VectorForm(kind="all_tokens"),
}


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("rerank", [False, True], ids=["search", "run"])
def test_the_best_vector_of_a_document_counts(collection, run, spread_encoder, form, rerank):
    encoder = load(encoder_settings(spread_encoder, pooling="cls"))
    several = MultiVectorEncoder(encoder, form)
    objective = PairObjective(several)
    objective.encoder = lambda role: encoder if role == "query" else several
    stored = StoredCollection(collection)
    what = {"run": run} if rerank else {"top_k": DOCUMENTS + 10}
    found = opened(collection, token_budget=150, **what).measure(objective)

    several.eval()
    qrels = {}
    for row in stored.judgments("dev").to_pylist():
        qrels.setdefault(row["query_id"], {})[row["document_id"]] = row["relevance"]
    texts = stored.texts("documents", np.arange(DOCUMENTS))
    with torch.no_grad():
        vectors = [several(several.tokenize([text], "document")).half()[0] for text in texts]
    found_by_words = read_ranking_file(StoredRanking(run).path("run.trec")) if rerank else {}
    reciprocal = []
    for query, grades in qrels.items():
        with torch.no_grad():
            asked = stored.texts("queries", stored.require("queries", [query]))
            sought = encoder(encoder.tokenize(asked, "query")).half()
        scores = [float((each.double() @ sought[0].double()).max()) for each in vectors]
        of_id = {f"d{row}": score for row, score in enumerate(scores)}
        if rerank:
            of_id = {name: of_id[name] for name in found_by_words.get(query, ())}
        ranked = sorted(sorted(of_id, reverse=True), key=lambda name: -of_id[name])
        ranks = [place for place, name in enumerate(ranked[:10], 1) if grades.get(name, 0) > 0]
        reciprocal.append(1 / ranks[0] if ranks else 0)
    assert found["RR@10"] == pytest.approx(np.mean(reciprocal), abs=1e-6)


def test_accuracy_looks_for_answers_and_a_query_that_a_run_lacks_counts_as_in_evaluate(tmp_path, objective):
    source = write_source(tmp_path / "source", dev={"q0": {"d0": 1}, "q1": {"d1": 1}})
    answers = '"metadata": {"answers": ["import"]}'
    settings = encoder_settings(objective.text_encoder.tokenizer.name_or_path)
    (source / "queries.jsonl").write_text(f'{{"_id": "q0", "text": "x", {answers}}}\n{{"_id": "q1", "text": "y"}}\n')
    collection = collect(source, tmp_path / "collection")
    measures = ["Accuracy@1", "Accuracy@5", "nDCG@10"]
    vectors = embedded(collection, settings, tmp_path)
    expected = evaluated(collection, searched(collection, vectors, tmp_path, "dev"), tmp_path, "dev", measures)
    found = opened(collection, measure="Accuracy@1", others=measures[1:]).measure(objective)
    assert found == pytest.approx(expected, abs=1e-6)

    (source / "queries.jsonl").write_text("\n".join(f'{{"_id": "q{n}", "text": "x", {answers}}}' for n in range(2)))
    folder, run = tmp_path / "lacking", tmp_path / "run.trec"
    collection = collect(source, folder / "collection")
    run.write_text("q0 Q0 d0 1 2 x\nq0 Q0 d1 2 1 x\n")
    measures = ["Accuracy@1", "Accuracy@2"]
    vectors = embedded(collection, settings, folder, run=str(run), depth=2)
    expected = evaluated(collection, reranked(collection, str(run), vectors, folder, depth=2), folder, "dev", measures)
    found = opened(collection, run=str(run), measure="Accuracy@1", others=measures[1:]).measure(objective)
    assert found == pytest.approx(expected, abs=1e-6)
    assert expected["Accuracy@2"] == 0.5


def test_a_block_is_ranked_by_its_own_documents_and_candidates_alone():
    rows, candidates = np.array([0, 3, 4, 7, 9]), np.array([[9, 3, 1, -1], [0, 4, 8, 7], [0, 1, -1, -1], [10, 2, 1, 5]])
    generator = np.random.default_rng(0)
    queries, several = (generator.normal(size=shape).astype(np.float16) for shape in ((4, 6), (5, 2, 6)))
    for vectors in (several, several[:, 0]):
        scores = (
            np.einsum("qd,n...d->qn...", queries.astype(float), vectors.astype(float)).reshape(4, 5, -1).max(axis=2)
        )
        found = retrieval.search_block(queries, rows, vectors, 7, torch.device("cpu"))
        with torch.autocast("cpu", torch.bfloat16):  # as the encoder computes
            same = retrieval.search_block(queries, rows, vectors, 7, torch.device("cpu"))
        assert same.scores.tobytes() == found.scores.tobytes()
        assert found.rows.tolist() == [[*rows[np.argsort(-of_query)].tolist(), -1, -1] for of_query in scores]
        again = retrieval.rerank_block(queries, rows, vectors, candidates, 4).rows.tolist()
        for ranked, asked, of_query in zip(again, candidates, scores, strict=True):
            best = rows[np.argsort(-of_query)]
            expected = best[np.isin(best, asked)].tolist()
            assert ranked == expected + [-1] * (4 - len(expected))


def test_samples_are_the_same_every_time(collection):
    validation = opened(collection, queries=3)
    assert validation._selected.query_ids == ["q3", "q4", "q5"]  # as earlier runs drew them
    others = [opened(collection, queries=3, seed=seed)._selected for seed in range(1, 5)]
    assert len({tuple(selected.query_ids) for selected in others}) > 1
    assert all(len(selected.qrels) == 3 for selected in others)
    assert "3 of the 6 queries of split 'dev' are a sample" in validation.notes
    assert [len(opened(collection, queries=count).notes) for count in (6, 600)] == [1, 1]


def test_queries_of_the_test_split_do_not_select(tmp_path):
    dev = {f"q{number}": {f"d{number}": 1} for number in range(8)}
    collection = make_collection(
        tmp_path, dev=dev, test={"q9": {"d9": 1}, "q1": dev["q1"], "q2": dev["q2"], "q5": dev["q5"]}
    )
    selected = opened(collection, exclude_split="test")._selected
    assert selected.query_ids == ["q0", "q3", "q4", "q6", "q7"]
    assert "3 of the 8 queries of split 'dev' are left out, as split 'test' judges them" in selected.notes
    for seed in range(5):  # they are left out before a sample is drawn
        sample = opened(collection, exclude_split="test", queries=4, seed=seed)._selected
        assert len(sample.query_ids) == 4
        assert {*sample.query_ids} <= {*selected.query_ids}
    with pytest.raises(UserError, match="no judgments of split 'tets'"):
        opened(collection, exclude_split="tets")
    whole = make_collection(tmp_path / "whole", dev=dev, test=dev)
    with pytest.raises(UserError, match=r"No judgment of split 'dev'.*above 0 for the 0 queries"):
        opened(whole, exclude_split="test")


@pytest.mark.parametrize(("dev", "settings", "named"), [
    ({"q0": {"d0": 1}}, {"split": "deev"}, "no judgments of split 'deev'. Splits there: dev"),
    ({"q0": {"d0": 0}, "q1": {"d3": -1}}, {}, "No judgment of split 'dev'.*every encoder would score 0"),
    ({"q0": {"d0": 1}}, {"measure": "Accuracy@5"}, "no query with answers"),
    ({"q0": {"d0": 1}}, {"measure": "Accuracy@5", "split": "deev"}, "no query with answers"),
])  # fmt: skip
def test_splits_that_can_not_be_measured(tmp_path, dev, settings, named):
    collection = make_collection(tmp_path, dev=dev)
    with pytest.raises(UserError, match=named):
        opened(collection, **settings)


def test_runs_that_do_not_fit(collection, run, tmp_path):
    other = make_collection(tmp_path / "other", seed=5)
    of_other = searched_by_words(other, tmp_path / "other", "dev", 20)
    with pytest.raises(UserError, match="don't come from the same collection"):
        opened(collection, run=of_other)
    of_training = searched_by_words(collection, tmp_path, "train", 20)
    with pytest.raises(UserError, match="answers none of the 6 queries of split 'dev'"):
        opened(collection, run=of_training)
    for measure, depth, settings in (("R@50", 50, {}), ("Judged", 50, {}), ("R@10", 10, {"candidates": 10})):
        with pytest.raises(UserError, match=rf"is {measure}, but {depth} candidates.*so the encoder can't change it"):
            opened(collection, run=run, measure=measure, **settings)
    for measure in ("R@10", "nDCG@50"):  # the order of all candidates decides
        assert len(opened(collection, run=run, measure=measure).notes) == 1
    fewer = tmp_path / "fewer.trec"
    lines = [line for line in text(run) if not line.startswith("q1 ")]
    fewer.write_text("\n".join(lines))
    lacking = 6 - len({line.split()[0] for line in lines})
    assert f"{lacking} of the split's queries are not in {fewer}" in opened(collection, run=str(fewer)).notes


def test_texts_that_are_all_empty(objective, monkeypatch):
    blocks = [(np.arange(2), ["", ""]), (np.array([5]), [""])]
    with pytest.raises(UserError, match="All 3 documents of there are empty texts"):
        SharedTexts(objective.text_encoder, "document", lambda: blocks, "3 documents of there")
    blocks[1] = (np.array([5]), ["a word"])
    most = objective.text_encoder.contract.max_length
    message = rf"validation\.document_max_length is {most + 1}, but the encoder reads {most} tokens"
    with pytest.raises(UserError, match=message):
        SharedTexts(objective.text_encoder, "document", lambda: blocks, "3 documents of there", max_length=most + 1)
    texts = SharedTexts(objective.text_encoder.eval(), "document", lambda: blocks, "3 documents of there")
    with torch.no_grad():
        ((rows, vectors),) = list(texts.encode(objective.text_encoder))
    assert rows.tolist() == [0, 1, 5]
    np.testing.assert_array_equal(vectors[0], vectors[1])
    assert (vectors[2] != vectors[1]).any()
    monkeypatch.setattr(objective.text_encoder, "tokenize_ids", lambda texts, *_: [[250_000]] * len(texts))
    (piece,) = SharedTexts(objective.text_encoder, "document", lambda: blocks, "3 documents of there").pieces
    assert [ids.tolist() for batch in piece.batches for ids in batch] == [[250_000]] * 2


def test_vectors_that_are_not_finite_name_a_text(collection, objective):
    weight = next(module for module in objective.modules() if isinstance(module, torch.nn.Embedding)).weight
    with torch.no_grad():
        weight.fill_(torch.nan)
    with pytest.raises(UserError, match="NaN or numbers beyond half precision for queries, such as the one with id 'q"):
        opened(collection).measure(objective)
    assert objective.training


def test_memory_does_not_grow_with_the_documents_vectors(tmp_path, objective, monkeypatch):
    monkeypatch.setattr(retrieval, "_VECTORS_AT_ONCE", 128)
    encoder, width = objective.text_encoder, 1280
    encoder.contract = encoder.contract.model_copy(update={"dimension": width})
    inner = encoder.forward
    encoder.forward = lambda features: inner(features).repeat(1, width // 32)
    peaks = {}
    for documents in (400, 1600):
        collection = make_collection(tmp_path / str(documents), documents=documents)
        validation = opened(collection, document_max_length=6, token_budget=120)
        validation.measure(objective)
        tracemalloc.start()
        validation.measure(objective)
        peaks[documents] = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peaks[1600] - peaks[400] < 0.1 * 1200 * width * np.float16().nbytes


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("bf16", [False, True])
def test_a_search_on_a_gpu_is_as_on_the_cpu(spread_encoder: Path, tmp_path: Path, bf16: bool) -> None:
    settings = RetrievalValidationSettings(collection=make_collection(tmp_path), others=("RR@10", "AP"))
    expected = build_validation(settings, bf16=False, epoch_ends=[1]).measure(
        PairObjective(load(encoder_settings(spread_encoder)))
    )
    objective = PairObjective(load(encoder_settings(spread_encoder))).to("cuda").train()
    torch.cuda.manual_seed(1)
    drawn = torch.rand(3, device="cuda")
    validation = build_validation(settings, bf16=bf16, epoch_ends=[1])
    torch.cuda.manual_seed(1)
    found = validation.measure(objective)
    assert torch.equal(torch.rand(3, device="cuda"), drawn)
    assert found == validation.measure(objective)
    assert list(found) == list(expected)
    if not bf16:  # rounding differs, so that two neighbours may change places
        assert found == pytest.approx(expected, abs=0.02)


on_real_data = pytest.mark.skipif(
    "RAYTRIEVER_TEST_DATA" not in os.environ,
    reason="RAYTRIEVER_TEST_DATA does not name the folder of real collections",
)
OF_REAL_DATA = ["nDCG@10", "RR@10", "R@100", "AP"]
SETTINGS = {"split": "dev", "measure": OF_REAL_DATA[0], "others": OF_REAL_DATA[1:]}


@on_real_data
@pytest.mark.parametrize("name", ["nq_qed", pytest.param("cosqa", marks=pytest.mark.slow)])
def test_on_real_data_a_search_has_the_numbers_of_the_stages(name, spread_encoder, tmp_path):
    """The encoder has random weights and is small; on nq_qed it still finds some documents by their words."""
    collection = collect(Path(os.environ["RAYTRIEVER_TEST_DATA"]) / name, tmp_path / "collection")
    objective = PairObjective(load(encoder_settings(spread_encoder))).train()
    settings = RetrievalValidationSettings(collection=collection, **SETTINGS)
    found = build_validation(settings, bf16=False, epoch_ends=[1]).measure(objective)
    objective.text_encoder.save(tmp_path / "export")
    vectors = embedded(collection, encoder_settings(tmp_path / "export"), tmp_path)
    run = searched(collection, vectors, tmp_path, "dev")
    expected = evaluated(collection, run, tmp_path, "dev", OF_REAL_DATA)
    assert found == pytest.approx(expected, abs=1e-6)
    assert found["R@100"] > 0
    if name == "cosqa":
        assert len(Artifact(collection).names("documents/")) == 1


@on_real_data
@pytest.mark.slow
def test_an_encoder_of_use_and_a_run_of_bm25(tmp_path):
    """Texts are cut at 16 tokens to save time: the numbers compared are of the same encoder."""
    collection = collect(Path(os.environ["RAYTRIEVER_TEST_DATA"]) / "nq_qed", tmp_path / "collection")
    model = encoder_settings("sentence-transformers/all-MiniLM-L6-v2", query_prompt="", max_length=16)
    run = searched_by_words(collection, tmp_path, "dev", top_k=5)
    vectors = embedded(collection, model, tmp_path, run=run, depth=5)
    again = reranked(collection, run, vectors, tmp_path, depth=5)
    expected = evaluated(collection, again, tmp_path, "dev", OF_REAL_DATA)
    settings = RetrievalValidationSettings(collection=collection, run=run, **SETTINGS)
    found = build_validation(settings, bf16=False, epoch_ends=[1]).measure(PairObjective(load(model)).train())
    assert found == pytest.approx(expected, abs=1e-6)
    assert found["nDCG@10"] > 0.5
