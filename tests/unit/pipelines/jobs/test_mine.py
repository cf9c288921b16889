"""The job on a small collection against a literal miner, and what it refuses."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from pipelines.jobs.mine import Mine, MineConfig
from pipelines.mining.candidates import StoredCandidates
from raytriever.errors import UserError
from retrieval.collections.collection import StoredCollection
from tests.unit.pipelines.jobs.batch_inputs import make_vectors
from tests.unit.pipelines.jobs.made_up import made_by, store
from tests.unit.pipelines.mining.test_rules import Case, literal_rule
from tests.unit.retrieval.evaluation.test_answers import has_answer
from tests.unit.retrieval.mined_lists import MinedList, mined_lists
from tests.unit.small_run import make_artifact

DOCUMENTS, QUERIES, DEPTH = 24, 12, 16
IN_RUN = [3, 1, 2, 0, 4, 5, 6, 7, 9, 10, 11]  # rows of the run's queries, in its order
WORDS = ["river", "Bank", "money", "boat", "1984", "U.S."]


def key(text: str) -> str:
    return " ".join(text.casefold().split())


def text_of(document: dict[str, str], with_title: bool) -> str:
    return f"{document['title']} {document['text']}".strip() if with_title else document["text"]


class World:
    """A collection and a run as artifacts, and the same as Python values."""

    def __init__(self, folder: Path) -> None:
        generator = np.random.default_rng(3)

        def words(number: int) -> str:
            return " ".join(generator.choice(WORDS, size=number))

        documents = [{"_id": f"d{n}", "title": words(1) if n % 3 else "", "text": words(3)} for n in range(DOCUMENTS)]
        documents[5] = {"_id": "d5", "title": "", "text": f" {text_of(documents[4], True).upper()}\n"}  # d4 again
        documents[7]["_id"] = "q3"
        documents[10]["title"] = "Nowhere"  # the answer is in the title alone
        queries: list[dict[str, Any]] = [{"_id": f"q{n}", "text": f"{words(2)} {n}?"} for n in range(QUERIES)]
        queries[2]["text"] = text_of(documents[9], True).lower()
        for number in range(0, QUERIES, 2):
            queries[number]["metadata"] = {"answers": [words(2), "nowhere"]}
        self.documents, self.queries = documents, queries
        self.grades: dict[str, dict[str, int]] = {}
        for query in queries[:-1]:
            chosen = generator.choice(DOCUMENTS, size=4, replace=False)
            self.grades[query["_id"]] = {documents[n]["_id"]: int(generator.integers(-1, 4)) for n in chosen}
        self.grades["q1"]["d4"] = 2  # so d5 is the copy of a positive
        self.grades["q6"] = {"d0": 0, "d1": -1}  # no positive
        self.collection = collected(folder, documents, queries, {"train": self.grades, "test": {"q11": {"d1": 1}}})
        rows = np.array([generator.permutation(DOCUMENTS)[:DEPTH] for _ in IN_RUN], dtype=np.int64)
        scores = -np.sort(-generator.normal(size=rows.shape).astype(np.float32), axis=1)
        rows[4, 3:], scores[4, 3:] = -1, -np.inf
        asked = [queries[row]["_id"] for row in IN_RUN]
        self.run = make_run(folder / "run", self.collection, asked, documents, rows, scores)
        self.results = {
            query: [(documents[d]["_id"], score) for d, score in zip(*pair, strict=True) if d >= 0]
            for query, *pair in zip(asked, rows.tolist(), scores.tolist(), strict=True)
        }
        vectors = [generator.normal(size=(n, 6)).astype(np.float16) for n in (QUERIES, DOCUMENTS)]
        self.vectors = make_vectors(folder / "v", self.collection, *vectors)
        self.products = vectors[0].astype(np.float64) @ vectors[1].T.astype(np.float64)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tmp_path_factory.mktemp("mine"))


def collected(folder: Path, documents: list[Any], queries: list[Any], splits: dict[str, Any]) -> str:
    """A collection of these records and, in each split, grades by query and document."""
    rows = [{"id": row["_id"], "title": row["title"], "text": row["text"], "domain": ""} for row in documents]
    asked = [(row["_id"], row["text"], "", row.get("metadata", {}).get("answers", [])) for row in queries]
    judged = [
        (query, document, grade, split)
        for split, grades in splits.items()
        for query, found in grades.items()
        for document, grade in found.items()
    ]
    return store(folder / "collection", [pa.Table.from_pylist(rows)], asked, judged)


def make_run(
    folder: Path,
    collection: str,
    query_ids: list[str],
    documents: list[Any],
    rows: np.ndarray,
    scores: np.ndarray,
    **origins: str,
) -> str:
    ids = pa.table({"id": [document["_id"] for document in documents]})
    files = {"rows.npy": rows, "scores.npy": scores, "queries.parquet": pa.table({"id": query_ids}), "run.trec": ""}
    inputs = {"collection": StoredCollection(collection).fingerprint}
    facts = {"system": {"index": "made up"}, "origins": origins}
    return make_artifact(folder, "run", inputs, facts, {**files, "documents.parquet": ids}, len(query_ids))


def mine(world: World, folder: Path, **settings: Any) -> StoredCandidates:
    values = {"run": world.run, "collection": world.collection, "output": str(folder), **settings}
    return StoredCandidates(made_by(Mine, values))


class LiteralQuery:
    """One query as the rules see it, and what a literal reading of them mines."""

    def __init__(self, world: World, config: MineConfig, number: int) -> None:
        self.config, self.number, rules = config, number, config.rules
        query, self.rows = world.queries[number], {row["_id"]: place for place, row in enumerate(world.documents)}
        self.id, self.grades = query["_id"], world.grades.get(query["_id"], {})
        relevant = [name for name, grade in self.grades.items() if grade >= rules.minimum_relevance]
        self.positives = sorted(relevant, key=self.rows.__getitem__)
        self.results = [document for document, _ in world.results[self.id]]
        self.scores = dict(world.results[self.id])
        if config.vectors:
            self.scores = {name: float(world.products[number, row]) for name, row in self.rows.items()}
        texts = [text_of(document, rules.with_title) for document in world.documents]
        answers = query.get("metadata", {}).get("answers", [])
        kind = "string" if rules.answers == "ignore" else rules.answers
        self.case = Case(
            rows=[[self.rows[document] for document in self.results]],
            scores=[[self.scores[document] for document in self.results]],
            grades=[{self.rows[document]: grade for document, grade in self.grades.items()}],
            positive_scores=[{self.rows[document]: score for document, score in self.scores.items()}],
            texts=[key(text) for text in texts], query_texts=[key(query["text"])],
            own_rows=[self.rows.get(self.id, -1)],
            with_answer={(0, row) for row, text in enumerate(texts) if has_answer(text, answers, kind)},
        )  # fmt: skip

    def mine(self) -> tuple[MinedList, dict[str, list[str]]]:
        """The list, and of each rule the documents that it drops."""
        left: list[str] = []
        dropped: dict[str, list[str]] = {}
        for place, document in enumerate(self.results[: self.config.rules.depth]):
            rule = literal_rule(self.config.rules, self.case, 0, place)
            (left if rule is None else dropped.setdefault(rule, [])).append(document)
        chosen = left[: self.config.number]
        if self.config.form == "labelled_lists":
            chosen = sorted(self.positives, key=lambda name: (-self.grades[name], self.rows[name])) + chosen
        ranks = {document: rank for rank, document in enumerate(self.results, 1)}
        columns = [[table.get(name) for name in chosen] for table in (self.rows, self.scores, ranks, self.grades)]
        return MinedList(self.id, self.number, chosen, *columns), dropped


SETTINGS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "some": {"number": 3, "rules": {"judged_negatives": "drop", "skip_first": 2, "depth": 12}},
    "margins": {"rules": {"absolute_margin": 0.2, "relative_margin": 0.1}},
    "unknown": {"rules": {"relative_margin": 0.5, "minimum_relevance": 3}},
    "score": {"rules": {"maximum_score": 0.5, "answers": "ignore", "with_title": False}},
    "texts alone": {"rules": {"with_title": False}},
    "regex": {"rules": {"answers": "regex"}},
    "vectors": {"vectors": True, "rules": {"absolute_margin": 0.1, "maximum_score": 3.0, "depth": 10}},
    "lists": {"form": "labelled_lists", "number": 5},
    "lists without judged negatives": {"form": "labelled_lists", "rules": {"judged_negatives": "drop"}},
    "lists by vectors": {"form": "labelled_lists", "vectors": True},
}


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_what_is_mined_is_what_a_literal_miner_finds(world: World, tmp_path: Path, settings: dict[str, Any]) -> None:
    chosen = settings | ({"vectors": world.vectors} if "vectors" in settings else {}) | {"candidates_per_shard": 40}
    stored = mine(world, tmp_path / "mined", **chosen)
    config = MineConfig(run="", collection="", output="", **chosen)
    queries = [LiteralQuery(world, config, number) for number in IN_RUN]
    mined = [query.mine() for query in queries if query.positives]
    for made, (wanted, _) in zip(mined_lists(stored), mined, strict=True):
        assert made._replace(scores=[]) == wanted._replace(scores=[])
        assert [score is None for score in made.scores] == [score is None for score in wanted.scores]
        found, expected = ([score for score in one.scores if score is not None] for one in (made, wanted))
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
    dropped: dict[str, list[tuple[str, str]]] = {}
    for wanted, of_query in mined:
        for name, documents in of_query.items():
            dropped.setdefault(name, []).extend((wanted.query_id, document) for document in documents)
    assert {name: count for name, count in stored.manifest["dropped"].items() if count} == {
        name: len(pairs) for name, pairs in dropped.items() if (config.form, name) != ("labelled_lists", "positive")
    }
    check_audit(world, stored, config, dropped)


def check_audit(world: World, stored: StoredCandidates, config: MineConfig, dropped: dict[str, list[Any]]) -> None:
    audit, texts = (
        stored.read_json("audit.json"),
        {document["_id"]: text_of(document, True) for document in world.documents},
    )
    query_texts = {query["_id"]: query["text"] for query in world.queries}
    assert set(audit["rules"]) == set(config.rules.active())
    for name, group in audit["rules"].items():
        pairs = dropped.get(name, [])
        best = dict(reversed(pairs))  # of each query the first, as pairs are in rank order
        assert (group["candidates"], group["queries"]) == (len(pairs), len(best))
        assert {example["query_id"]: example["document_id"] for example in group["examples"]} == best
    for example in [example for group in (*audit["rules"].values(), audit["chosen"]) for example in group["examples"]]:
        assert example["query"] == query_texts[example["query_id"]]
        assert example["document"] == texts[example["document_id"]]
        document, score = world.results[example["query_id"]][example["rank"] - 1]
        assert document == example["document_id"]
        assert config.vectors or example["score"] == pytest.approx(score, abs=1e-6)
    counts = audit["counts"]
    assert (counts["queries_without_answers"] == 0) == (config.rules.answers == "ignore")
    assert counts["queries"] == len(stored) == len(IN_RUN) - counts["queries_without_positive"]
    assert counts["candidates"] == counts["eligible"] + sum(map(len, dropped.values()))
    if config.form == "hard_negatives":
        assert audit["chosen"]["candidates"] == sum(len(made.document_ids) for made in mined_lists(stored))


def test_shards_change_nothing_and_a_sample_is_of_what_is_left(world: World, tmp_path: Path) -> None:
    asked = {"rules": {"relative_margin": 0.1}}
    stored = [mine(world, tmp_path / f"{size}", **asked, candidates_per_shard=size) for size in (1, 33, 10_000)]
    assert [len(one.names("candidates/")) for one in stored] == [11, 6, 1]
    lists = [list(mined_lists(one)) for one in stored]
    assert lists[0] == lists[1] == lists[2]
    audits = [one.path("audit.json").read_bytes() for one in stored]
    assert audits[0] == audits[1] == audits[2]
    again = mine(world, tmp_path / "again", **asked, candidates_per_shard=33)
    assert again.fingerprint == stored[1].fingerprint
    everything = {made.query_id: made.document_ids for made in mined_lists(mine(world, tmp_path / "all"))}
    few = {made.query_id: made.document_ids for made in mined_lists(mine(world, tmp_path / "few", number=3))}
    assert few == {query: documents[:3] for query, documents in everything.items()}


def test_what_the_user_is_told(world: World, tmp_path: Path) -> None:
    stored = mine(world, tmp_path / "mined", number=10, rules={"absolute_margin": 0.0, "minimum_relevance": 3})
    lines = Mine(MineConfig(run="", collection="", output="")).announce(stored)
    text = "\n".join(lines)
    assert [line.split()[0] for line in lines if "%" in line] == [
        "positive", "self", "duplicate", "absolute_margin", "answer", "chosen",
    ]  # fmt: skip
    assert "queries left out, having none" in text
    assert "queries with fewer candidates than asked for" in text
    assert "queries that have no answers to match" in text
    assert stored.manifest["facts"]["system"] == {"index": "made up"}


@pytest.mark.parametrize(("settings", "message"), [
    ({"split": "dev"}, r"no judgments of split 'dev'. Splits there: test, train"),
    ({"rules": {"minimum_relevance": 9}}, r"has a document of relevance 9 or more in split 'train'"),
    ({"rules": {"skip_first": 16}}, r"skip_first is 16, but only the first 16 ranks"),
    ({"rules": {"skip_first": 4, "depth": 4}}, r"skip_first is 4, but only the first 4 ranks"),
    ({"number": 15, "rules": {"skip_first": 2}}, r"number is 15, but at most 14 candidates .* ranks 3 to 16"),
    ({"rules": {"skip_frist": 1}}, r"'rules.skip_frist' is not a setting. Did you mean 'skip_first'"),
    ({"form": "triples"}, r"'form': .*'hard_negatives' or 'labelled_lists'"),
])  # fmt: skip
def test_bad_settings_are_refused(world: World, tmp_path: Path, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        mine(world, tmp_path / "mined", **settings)


def test_inputs_that_don_t_belong_together_are_refused(world: World, tmp_path: Path) -> None:
    other = collected(tmp_path, world.documents, world.queries[:3], {"train": {"q0": {"d0": 1}}})
    queries, documents = np.zeros((QUERIES, 2, 6)), np.zeros((DOCUMENTS, 6))
    foreign = make_vectors(tmp_path / "v", other, queries[:3, 0], documents)
    queries_only = make_vectors(tmp_path / "q", world.collection, queries[:, 0], None)
    several = make_vectors(tmp_path / "m", world.collection, queries, documents)
    some = make_vectors(tmp_path / "s", world.collection, queries[:, 0], documents, some=True)
    found = world.documents, np.array([[1, 2]]), np.array([[2, 1]], np.float32)
    asked_elsewhere = make_run(tmp_path / "r", world.collection, ["q0"], *found, queries="0" * 64)
    unknown = make_run(tmp_path / "u", world.collection, ["q99"], *found)
    for number, (settings, message) in enumerate([
        ({"collection": other}, "don't come from the same collection"),
        ({"vectors": foreign}, "don't come from the same collection"),
        ({"vectors": queries_only}, "holds no vectors of documents"),
        ({"vectors": several}, "vectors for each of its queries, and one of each is needed"),
        ({"vectors": some}, "holds only vectors of a ranking's texts"),
        ({"run": asked_elsewhere}, "answers the queries of another collection"),
        ({"run": unknown}, "1 of 1 queries are not in .*, such as 'q99'"),
        ({"run": world.vectors}, "of kind 'vectors', one of kind 'run' is needed"),
    ]):  # fmt: skip
        with pytest.raises(UserError, match=message):
            mine(world, tmp_path / f"{number}", **settings)


def test_an_answer_that_is_no_expression_is_named(world: World, tmp_path: Path) -> None:
    queries = [{"_id": "q0", "text": "?", "metadata": {"answers": ["(1984"]}}]
    collection = collected(tmp_path, world.documents, queries, {"train": {"q0": {"d0": 1}}})
    scores = np.array([[2, 1]], np.float32)
    run = make_run(tmp_path / "r", collection, ["q0"], world.documents, np.array([[1, 2]]), scores)
    with pytest.raises(UserError, match=r"'\(1984' is no regular expression"):
        mine(world, tmp_path / "mined", collection=collection, run=run, rules={"answers": "regex"})
