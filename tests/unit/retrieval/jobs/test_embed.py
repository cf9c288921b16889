"""The embedding job without Ray: what is stored, under which contract, what it refuses to mix and before it loads."""

import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from threading import Barrier
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from pydantic import ValidationError

from raytriever.artifacts.artifact import TIMES, Artifact, ShardRecord
from raytriever.errors import UserError
from raytriever.stages.recipe_run import run_stage
from raytriever.stages.stage import Resources
from retrieval.collections.collection import DOCUMENTS as SCHEMA
from retrieval.collections.collection import StoredCollection
from retrieval.embedding import encode_texts
from retrieval.encoders import specification
from retrieval.encoders.multi_vector import MultiVectorEncoder, VectorForm
from retrieval.encoders.specification import EncoderSettings
from retrieval.jobs import embed
from retrieval.jobs.embed import Embed, EmbedConfig
from retrieval.jobs.index import Index, IndexConfig, LexicalIndexSettings, VectorIndexSettings
from retrieval.jobs.rerank import Rerank, RerankConfig
from retrieval.jobs.search import Search, SearchConfig
from retrieval.rankings import StoredRanking
from retrieval.vectors import StoredVectors
from tests.unit.pipelines.jobs.made_up import store
from tests.unit.retrieval.encoders.test_adapter import save_adapter
from tests.unit.retrieval.encoders.tiny_models import POSITIONS, SENTENCES, edited, load_tiny, tiny_model
from tests.unit.retrieval.made_up import beir_collection
from tests.unit.small_run import make

pytestmark = pytest.mark.usefixtures("one_thread")
DOCUMENTS = [(f"d{number}", f"Title {number}", f"{SENTENCES[number % 4]} {number // 8}") for number in range(23)]
QUERIES = [(f"q{number}", f"which page is {number}") for number in range(5)]


class Alone(Embed):
    """Makes its shards in this process, last first; stops after ``stop_after`` of them."""

    stop_after = 1_000

    def execute(self, pending: Any, session: Any, progress: Any) -> Iterator[ShardRecord]:  # noqa: ARG002
        self.load()
        for number, shard in enumerate(reversed(pending)):
            if number == self.stop_after:
                raise KeyboardInterrupt
            yield self.make_shard(shard)


@pytest.fixture
def model() -> Path:
    return tiny_model("qwen2")


@pytest.fixture(scope="module")
def collection(tmp_path_factory: pytest.TempPathFactory) -> str:
    return beir_collection(tmp_path_factory.mktemp("collection"), DOCUMENTS, QUERIES, [("q0", "d0")])


def stage(collection: str, model: Path, output: Path, encoder: dict[str, Any] | None = None, **settings: Any) -> Alone:
    wanted = {"pooling": "last_token", "dtype": "float32", "query_prompt": "query: "} | (encoder or {})
    config = {"encoder": EncoderSettings(model=str(model), **wanted), "texts_per_shard": 7} | settings
    return Alone(EmbedConfig(collection=collection, output=str(output), **config))


def run(job: Alone) -> Artifact:
    return run_stage(job, None)  # type: ignore[arg-type]


def contents(folder: Path) -> dict[str, bytes]:
    files = [path for path in folder.rglob("*") if path.is_file() and path.name not in TIMES]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory, collection: str) -> Path:
    """What the job makes of the collection without further settings."""
    folder = tmp_path_factory.mktemp("plain")
    run(stage(collection, tiny_model("qwen2"), folder))
    return folder


@pytest.mark.parametrize("with_title", [True, False])
def test_the_vectors_of_every_text_are_stored_in_order(collection, model, tmp_path, with_title):
    artifact = run(stage(collection, model, tmp_path / "out", with_title=with_title))
    vectors = StoredVectors(str(tmp_path / "out"))
    encoder = load_tiny(model, pooling="last_token", query_prompt="query: ")
    stored = StoredCollection(collection)
    for part, ids in (("documents", [name for name, *_ in DOCUMENTS]), ("queries", [name for name, _ in QUERIES])):
        rows = vectors.part(part)
        assert [str(name) for name in rows.ids()] == ids
        texts = stored.texts(part, np.arange(len(ids)), with_title=with_title)
        assert ("Title 0" in texts[0]) == (with_title and part == "documents")
        expected = encode_texts(encoder, texts, "query" if part == "queries" else "document")
        np.testing.assert_allclose(rows.range(0, len(ids)), expected, atol=2e-3, rtol=1e-3)
    assert artifact.manifest["facts"]["with_title"] is with_title
    assert vectors.contract == encoder.contract
    assert vectors.contract.append_eos
    assert np.load(tmp_path / "out" / "documents" / "00000.npy").dtype == np.float16
    assert [record.rows for record in artifact.shards] == [7, 7, 7, 2, 5]


@pytest.mark.parametrize("reduction", ["none", "average"])
def test_documents_have_the_vectors_of_the_form_and_queries_one(collection, model, plain, tmp_path, reduction):
    form = VectorForm.model_validate({"kind": "layers", "layers": [1, 2], "reduction": reduction})
    run(stage(collection, model, tmp_path, {"form": form}))
    vectors, expected = StoredVectors(str(tmp_path)), StoredVectors(str(plain))
    documents = vectors.part("documents")
    encoder = MultiVectorEncoder(load_tiny(model, pooling="last_token"), form).eval()
    texts = StoredCollection(collection).texts("documents", np.arange(len(DOCUMENTS)), with_title=True)
    found = documents.range(0, len(DOCUMENTS))
    np.testing.assert_allclose(found, encode_texts(encoder, texts, "document"), atol=2e-3, rtol=1e-3)
    if reduction == "none":
        assert documents.vectors_per_text == 2
        np.testing.assert_array_equal(found[:, 1], expected.part("documents").range(0, len(DOCUMENTS)))
    np.testing.assert_array_equal(*(each.part("queries").range(0, len(QUERIES)) for each in (vectors, expected)))
    assert vectors.contract.form == str(form)
    assert max(shard.rows for shard in vectors.shards) == 7
    with pytest.raises(UserError, match=f"form '{form}' against 'single'"):
        vectors.contract.require_same(expected.contract, "one", "two")


def test_a_vector_for_every_token_is_stored_and_searched(collection: str, tmp_path: Path) -> None:
    encoder = {"form": VectorForm(kind="all_tokens"), "pooling": "cls", "max_length": 24}
    artifact = run(stage(collection, tiny_model("bert"), tmp_path / "out", encoder, texts_per_shard=32))
    stored = StoredVectors(artifact.uri)
    assert stored.part("documents").vectors_per_text == 24
    rows = {shard.name.partition("/")[0].partition("-")[0]: shard.rows for shard in artifact.shards[::-1]}
    assert rows == {"documents": 2, "queries": len(QUERIES)}  # a sixteenth, of documents alone
    index = make(Index(IndexConfig(index=VectorIndexSettings(vectors=artifact.uri), output=str(tmp_path / "index"))))
    settings = {"index": index, "collection": collection, "vectors": artifact.uri, "split": None, "top_k": 5}
    ranking = StoredRanking(make(Search(SearchConfig(output=str(tmp_path / "run"), **settings))))
    assert ranking.system["form"] == "all tokens"
    found = ranking.ranking()
    queries = stored.part("queries").range(0, len(QUERIES)).astype(np.float32)
    vectors = stored.part("documents").range(0, len(DOCUMENTS)).astype(np.float32)
    scores = np.einsum("qd,nmd->qnm", queries, vectors).max(axis=2)
    np.testing.assert_allclose(found.scores, -np.sort(-scores, axis=1)[:, :5], rtol=1e-5)
    np.testing.assert_allclose(np.take_along_axis(scores, found.rows, axis=1), found.scores, rtol=1e-5)


def test_a_rankings_texts_alone_rank_it_as_all_texts_do(collection: str, model: Path, tmp_path: Path) -> None:
    index = make(Index(IndexConfig(index=LexicalIndexSettings(collection=collection), output=str(tmp_path / "index"))))
    first = make(Search(SearchConfig(index=index, collection=collection, split=None, output=str(tmp_path / "first"))))
    rankings = []
    for name, chosen in (("all", {}), ("few", {"run": first, "depth": 3, "texts_per_shard": 2})):
        run(stage(collection, model, tmp_path / name, **chosen))
        config = {"run": first, "collection": collection, "vectors": str(tmp_path / name), "depth": 3}
        uri = make(Rerank(RerankConfig(output=str(tmp_path / f"{name}-run"), **config)))
        rankings.append(StoredRanking(uri).ranking())
    everything, few = rankings
    embedded = StoredVectors(str(tmp_path / "few")).part("documents")
    assert embedded.ids().to_pylist() != [name for name, *_ in DOCUMENTS]
    found = StoredRanking(first).ranking().rows
    few_rows, all_rows = (np.count_nonzero(np.unique(rows) >= 0) for rows in (found[:, :3], found))
    assert len(embedded) == few_rows < all_rows
    np.testing.assert_array_equal(few.rows, everything.rows)
    np.testing.assert_allclose(few.scores, everything.scores, atol=5e-3)
    settings = VectorIndexSettings(vectors=str(tmp_path / "few"))
    with pytest.raises(UserError, match="holds only vectors of a ranking's texts"):
        make(Index(IndexConfig(index=settings, output=str(tmp_path / "no"))))


def test_queries_of_some_splits_are_embedded_alone(collection: str, model: Path, plain: Path, tmp_path: Path) -> None:
    run(stage(collection, model, tmp_path, splits=["test"]))
    everything, few = (StoredVectors(str(folder)) for folder in (plain, tmp_path))
    assert few.part("queries").ids().to_pylist() == ["q0"]  # the one that the split judges
    np.testing.assert_allclose(*(each.part("queries").gather(np.array([0])) for each in (few, everything)), atol=5e-3)
    np.testing.assert_array_equal(*(each.part("documents").range(0, 23) for each in (few, everything)))
    with pytest.raises(UserError, match=r"no vector of row 3 .* or for other splits"):
        few.part("queries").gather(np.array([3]))


def test_what_leaves_no_text_or_chooses_queries_twice_is_refused(collection, model, tmp_path) -> None:
    row = {"id": "d", "title": "", "text": "word", "domain": ""}
    without = store(tmp_path / "without", [pa.Table.from_pylist([row], SCHEMA)], [], [])
    with pytest.raises(UserError, match=r"has no queries to embed\. Leave them out of parts"):
        stage(without, model, tmp_path / "out").plan()
    with pytest.raises(ValidationError, match="run and splits both say which queries to embed"):
        stage(collection, model, tmp_path / "out", run="any", splits=["test"])


def test_a_restart_continues_and_ends_in_the_same_bytes(collection, model, plain, tmp_path) -> None:
    interrupted = stage(collection, model, tmp_path)
    interrupted.stop_after = 2
    with pytest.raises(KeyboardInterrupt):
        run(interrupted)
    kept = contents(tmp_path)
    assert "queries/00000.npy" in kept
    assert not {"documents/00000.npy", "manifest.json"} & kept.keys()
    again = stage(collection, model, tmp_path)
    again.stop_after = 3  # what is left, and no shard more
    run(again)
    assert contents(tmp_path) == contents(plain)


def test_shards_are_encoded_while_others_are_written(collection, model, plain, tmp_path, monkeypatch):
    """Nothing is written before the vectors of three shards are there, in threads as of one worker."""
    job, save, encoded = stage(collection, model, tmp_path), np.save, Barrier(3, timeout=30)

    def wait(*arguments: Any) -> None:
        encoded.wait()
        save(*arguments)

    monkeypatch.setattr(np, "save", wait)
    job.load()
    with ThreadPoolExecutor(job.shards_at_once) as pool:
        records = list(pool.map(job.make_shard, job.plan()[:3]))
    for file in (file for record in records for file in record.files):
        assert (tmp_path / file.name).read_bytes() == (plain / file.name).read_bytes()
    assert job.measured["texts"] == 21


@pytest.mark.parametrize(("change", "named"), [
    ({"encoder": {"dtype": "bfloat16"}}, "dtype"),
    ({"encoder": {"form": {"kind": "layers", "layers": [1, 2]}}}, "form"),
    ({"model": 1}, "encoder.model"),  # the seed of another one
])  # fmt: skip
@pytest.mark.parametrize("unfinished", [True, False])
def test_vectors_of_another_encoder_are_not_added(collection, tmp_path, change, named, unfinished):
    first = stage(collection, tiny_model("qwen2"), tmp_path / "out")
    if unfinished:
        first.stop_after = 1
    with pytest.raises(KeyboardInterrupt) if unfinished else nullcontext():
        run(first)
    other = tiny_model("qwen2", change.get("model", 0))
    settings = {name: value for name, value in change.items() if name != "model"}
    with pytest.raises(UserError, match=rf"holds a different (unfinished )?vectors artifact: .*{named}"):
        run(stage(collection, other, tmp_path / "out", **settings))


def test_a_model_that_is_nowhere_is_named_by_its_setting(collection: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"^encoder\.model: Encoder '/nowhere' is no folder"):
        stage(collection, Path("/nowhere"), tmp_path / "out").check_inputs({"encoder.model"})


def test_auto_is_settled_once_by_the_processor_of_workers(collection, model, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(specification, "has_bfloat16", lambda **_: True)
    job = stage(collection, model, tmp_path / "out", {"dtype": "auto"}, texts_per_shard=0)
    monkeypatch.setattr(specification, "has_bfloat16", lambda **_: False)
    assert job.for_workers().config.encoder.dtype == "bfloat16"
    assert job.resolved()["encoder"]["dtype"] == "bfloat16"
    assert (job.resolved()["texts_per_shard"], job.resolved()["token_budget"]) == (1_024, 2_048)
    with pytest.raises(UserError, match=r"The job runs in bfloat16, but the CPU of .* has no instructions for it"):
        job.load()
    monkeypatch.setattr(specification, "has_bfloat16", lambda *, gpu: gpu)
    settings = {"texts_per_shard": 0, "token_budget": 500, "resources": Resources(gpus_per_worker=1)}
    job = stage(collection, model, tmp_path / "out", {"dtype": "auto"}, **settings)
    assert job.config.encoder.dtype == "bfloat16"
    assert (job.config.texts_per_shard, job.config.token_budget) == (16_384, 500)
    assert stage(collection, model, tmp_path / "out", {"dtype": "auto"}).config.encoder.dtype == "float32"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert job.placement() == (torch.device("cuda"), torch.bfloat16)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UserError, match=r"gpus_per_worker is 1.0, but torch finds no GPU on"):
        job.load()


def test_a_static_encoder_is_told_with_the_precision_that_it_has(collection, tiny_encoder, tmp_path, logged) -> None:
    load_tiny(tiny_encoder, static=True, max_length=20).save(tmp_path / "static")
    encoder = {"pooling": "auto", "dtype": "bfloat16"}
    stage(collection, tmp_path / "static", tmp_path / "out", encoder).plan()
    assert [line.endswith(", float32") for line in logged] == [True]


def test_shards_grow_where_there_would_be_too_many(collection, model, tmp_path, monkeypatch):
    monkeypatch.setattr(embed, "MOST_SHARDS", 3)
    shards = stage(collection, model, tmp_path / "out").plan()
    documents = [(shard.task.begin, shard.task.end) for shard in shards if shard.task.part == "documents"]
    assert documents == [(0, 8), (8, 16), (16, 23)]
    assert [(shard.task.begin, shard.task.end) for shard in shards[3:]] == [(0, 5)]  # seven texts, as asked for


@pytest.mark.parametrize(("gpus", "waiting", "warned"), [(1, 2.0, True), (1, 0.1, False), (0, 2.0, False)])
def test_encoders_that_waited_for_texts_say_what_to_set(collection, model, tmp_path, logged, gpus, waiting, warned):
    job = stage(collection, model, tmp_path / "out", resources=Resources(gpus_per_worker=gpus))
    job.measured.update(texts=1_000, tokenizing=500_000_000, encoding=8_000_000_000, waiting=int(waiting * 1e9))
    job.log_speed()
    (line,) = logged
    assert "a worker encodes 125 texts/s and a thread tokenizes 2,000; " in line
    assert ("more resources.cpus_per_worker tokenize faster" in line) == warned


def test_bfloat16_is_what_is_computed_in(collection: str, model: Path, tmp_path: Path) -> None:
    if not specification.has_bfloat16():
        pytest.skip("this processor has no bfloat16 instructions")
    exact = run(stage(collection, model, tmp_path / "exact", {"normalize": True})).uri
    near = run(stage(collection, model, tmp_path / "near", {"normalize": True, "dtype": "bfloat16"})).uri
    one, two = (StoredVectors(uri).part("documents").range(0, len(DOCUMENTS)) for uri in (exact, near))
    assert (one * two).sum(axis=1).min() > 0.999
    assert not np.array_equal(one, two)
    assert StoredVectors(near).contract.dtype == "bfloat16"
    with pytest.raises(UserError, match="dtype 'float32' against 'bfloat16'"):
        StoredVectors(exact).contract.require_same(StoredVectors(near).contract, exact, near)


def test_a_text_whose_vector_is_no_number_is_named(collection, model, tmp_path, monkeypatch):
    def broken(*arguments: Any, **settings: Any) -> Any:
        vectors = encode_texts(*arguments, **settings)
        vectors[1, 0] = 70_000.0  # more than half precision holds
        return vectors

    monkeypatch.setattr(embed, "encode_texts", broken)
    with pytest.raises(UserError, match="beyond half precision for 1 texts, the first with id 'd22'"):
        run(stage(collection, model, tmp_path / "out", parts=("documents",)))
    assert not list((tmp_path / "out").rglob("*.npy"))


def without_tokenizer(folder: Path) -> None:
    for file in folder.glob("tokenizer*"):
        file.unlink()


def meaningless(folder: Path) -> None:
    edited(folder / "config.json", lambda config: config.update(hidden_size="many"))  # whoever loads it says so


def check(model: Path, said: str | None, **encoder: Any) -> Embed:
    for weights in model.glob("*.safetensors"):
        weights.write_bytes(b"")  # none are read
    encoder = {"model": str(model), "dtype": "float32", "pooling": "mean"} | encoder
    stage = Embed(EmbedConfig.model_validate({"collection": "absent", "encoder": encoder, "output": "absent"}))
    with nullcontext() if said is None else pytest.raises(UserError, match=said):
        stage.check_inputs({f"encoder.{key}" for key in ("model", "tokenizer") if key in encoder})
    return stage


def pickled(folder: Path) -> None:
    for weights in folder.glob("*.safetensors"):
        weights.rename(weights.with_name("pytorch_model.bin"))


TOO_LONG = f"max_length is {POSITIONS + 1}, .* {POSITIONS} tokens"


@pytest.mark.parametrize(("name", "damage", "encoder", "said"), [
    ("bert", without_tokenizer, {}, "model holds no tokenizer"),
    ("bert", None, {"pooling": "auto"}, r"^encoder\.pooling: .* is a plain transformer without pooling settings"),
    ("bert", pickled, {}, "pickle"),
    ("roberta", None, {"max_length": POSITIONS + 1}, TOO_LONG),
    ("bert", None, {"form": {"kind": "layers", "layers": [1]}}, r"encoder\.form\.layers is \[1\]\. It must end in 2"),
    ("qwen2", None, {"max_length": POSITIONS + 1}, TOO_LONG),
    ("bert", meaningless, {"max_length": POSITIONS}, None),
    ("t5", None, {"max_length": 1000}, None),
    ("roberta", None, {"max_length": POSITIONS}, None),
])  # fmt: skip
def test_an_encoder(tmp_path, name, damage, encoder, said):
    folder = Path(shutil.copytree(tiny_model(name), tmp_path / "model"))
    if damage:
        damage(folder)
    check(folder, said, **encoder)


def test_an_encoder_with_the_tokenizer_of_another(tmp_path: Path) -> None:
    folder, other = (Path(shutil.copytree(tiny_model("bert"), tmp_path / name)) for name in ("model", "other"))
    without_tokenizer(folder)
    stage = check(folder, None, tokenizer=str(other))
    stage.check_inputs({"encoder.model"})  # the tokenizer is of a stage that has not run: nothing is looked at
    without_tokenizer(other)
    check(folder, "other holds no tokenizer", tokenizer=str(other))


def test_the_base_of_an_adapter(tmp_path: Path) -> None:
    base = Path(shutil.copytree(tiny_model("qwen2"), tmp_path / "base"))
    adapter = save_adapter(base, tmp_path / "adapter")
    check(adapter, TOO_LONG, max_length=POSITIONS + 1)
    check(adapter, None, max_length=POSITIONS)
    without_tokenizer(base)
    check(adapter, "base holds no tokenizer")
