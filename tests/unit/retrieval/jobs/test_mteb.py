"""Encoders as models of MTEB, and its job, on tasks made here: sentence-transformers and MTEB are the oracles."""

import json
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from raytriever.artifacts.artifact import Artifact
from raytriever.artifacts.writer import ArtifactWriter
from raytriever.errors import UserError
from raytriever.settings.configuration import validate
from raytriever.settings.recipe import load_recipe
from raytriever.stages.recipe_run import recipe_stages
from retrieval import mteb_encoder
from retrieval.jobs.mteb import Mteb, MtebConfig
from retrieval.mteb_encoder import RaytrieverEncoder
from retrieval.mteb_tasks import result_name
from tests.unit.retrieval.encoders.contextual.made_up import contextual
from tests.unit.retrieval.encoders.tiny_models import load_tiny, tiny_model
from tests.unit.small_run import make

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    mteb = pytest.importorskip("mteb", reason="MTEB is not installed")
    from tests.unit.retrieval.mteb_made_up import DOCUMENTS, Flight, FlightReranking, FlightSimilarity, FlightTopics

pytestmark = pytest.mark.usefixtures("one_thread", "made_up_tasks")

TASKS = {"Flight": Flight, "FlightTopics": FlightTopics, "FlightSimilarity": FlightSimilarity}
BENCHMARK = "Made up (eng, v1)"
OF_ROLES = {"query_prompt": "the index of ", "document_prompt": "return "}
OF_TASKS = {"prompts": {"classification": "class ", "other": "with "}}


@pytest.fixture
def made_up_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    def get_benchmark(name: str) -> Any:
        if name != BENCHMARK:
            raise KeyError(name)
        return SimpleNamespace(tasks=[kind() for kind in TASKS.values()])

    monkeypatch.setattr(mteb, "get_benchmark", get_benchmark)
    monkeypatch.setattr(mteb, "get_benchmarks", lambda: [SimpleNamespace(name=BENCHMARK)])


def saved_encoder(folder: Path, **prompts: Any) -> str:
    load_tiny(tiny_model("bert"), pooling="mean", normalize=True, **prompts).save(folder / "tiny")
    return str(folder / "tiny")


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return saved_encoder(tmp_path_factory.mktemp("encoder"), **OF_ROLES, **OF_TASKS)


@pytest.fixture(scope="module")
def contextual_encoder(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("contextual")
    contextual(dtype=torch.float32, context_documents=8, normalize=True, document_prompt="return ").save(folder)
    return str(folder)


def job(output: Path, model: str, **changes: Any) -> Mteb:
    values = {"output": str(output), "encoder": {"model": model, "dtype": "float32"}, "benchmark": BENCHMARK}
    return Mteb(validate(MtebConfig, values | changes, "mteb"))


def look_ahead(output: Path, model: str, **changes: Any) -> None:
    stage = job(output, model, **changes)
    stage.check_settings({"mteb": stage})
    stage.check_inputs({"encoder.model"})


QUIET = {"cache": None, "co2_tracker": False, "show_progress_bar": False}


def scores(encoder: RaytrieverEncoder, *kinds: Any) -> dict[str, float]:
    tasks = [kind() for kind in kinds or TASKS.values()]
    encoder.use_tasks(tasks)
    return {result.task_name: result.get_score() for result in mteb.evaluate(encoder, tasks, **QUIET).task_results}


def recorded_prompts(monkeypatch: pytest.MonkeyPatch) -> dict[tuple[str, str | None], str | None]:
    """What the encoder's tokenizer is given, by the task whose texts they are and their role."""
    prompts: dict[tuple[str, str | None], str | None] = {}
    asked: list[tuple[str, str | None]] = []
    encode, encode_texts = RaytrieverEncoder.encode, mteb_encoder.encode_texts

    def noted(encoder: RaytrieverEncoder, inputs: Any, *, task_metadata: Any, **named: Any) -> Any:
        role = named.get("prompt_type")
        asked.append((task_metadata.name, role and role.value))
        return encode(encoder, inputs, task_metadata=task_metadata, **named)

    def with_prompt(*given: Any, prompt: str | None = None, **more: Any) -> Any:
        prompts[asked[-1]] = prompt
        return encode_texts(*given, prompt=prompt, **more)

    monkeypatch.setattr(RaytrieverEncoder, "encode", noted)
    monkeypatch.setattr(mteb_encoder, "encode_texts", with_prompt)
    return prompts


def test_as_many_tokens_are_encoded_at_once_as_are_given(encoder: str, tmp_path: Path) -> None:
    assert job(tmp_path, encoder, token_budget=77)._encoder._token_budget == 77


def test_scores_are_mtebs_own(encoder: str, tmp_path: Path) -> None:
    uri = make(job(tmp_path / "run", encoder))
    expected = scores(RaytrieverEncoder(encoder, device="cpu", dtype="float32"))
    results = Artifact(uri).read_json("results.json")
    found = {name: task["main_score"] for name, task in results["tasks"].items()}
    assert found == pytest.approx(expected, abs=1e-6)
    assert results["mean"] == pytest.approx(sum(expected.values()) / 3)
    assert results["categories"]["STS"] == {"tasks": 1, "mean": pytest.approx(expected["FlightSimilarity"])}
    assert Artifact(uri).manifest["config"]["mteb_version"] == mteb.__version__
    lines = job(tmp_path / "run", encoder, published="contextual/2/cde-small-v1 contextual").announce(Artifact(uri))
    table = [line.split() for line in lines]
    assert ["MTEB", "Classification", "Retrieval", "STS", "mean"] in table
    assert ["contextual,", "table", "2:", "cde-small-v1", "contextual", "0.8170", "0.5330", "0.8160", "0.6500"] in table


def test_mteb_loads_its_files_which_are_the_same_each_time_and_where_a_run_was_killed(encoder, tmp_path, monkeypatch):
    first, second = (make(job(tmp_path / name, encoder, name="our/name")) for name in ("a", "b"))
    assert Artifact(first).fingerprint == Artifact(second).fingerprint
    loaded = mteb.ResultCache(Path(first) / "mteb").load_results(include_remote=False)
    (model,) = loaded.model_results
    assert model.model_name == "our/name"
    results = {name: task["main_score"] for name, task in Artifact(first).read_json("results.json")["tasks"].items()}
    assert {task.task_name: task.get_score() for task in model.task_results} == pytest.approx(results, abs=1e-5)

    stage = job(tmp_path / "run", encoder, name="our/name")
    writer = ArtifactWriter(stage.config.output, stage.derivation())
    writer.begin()
    one, *others, last = stage.plan()
    assert (one.name, last.name, last.phase) == ("task-00000", "results", 1)
    made = [stage.make_shard(one)]
    again = job(tmp_path / "run", encoder, name="our/name")  # another process, which makes what is left
    monkeypatch.setattr(Flight, "load_data", lambda *_, **__: pytest.fail("made again"))
    made += [again.make_shard(shard) for shard in [*others, last]]
    finished = writer.finish(made, again.facts(made), {"seconds": 1.0})
    assert Artifact(finished.uri).fingerprint == Artifact(first).fingerprint


@pytest.mark.parametrize("chosen", [{}, {"STS": "other", "Flight-query": "classification"}], ids=["usual", "chosen"])
def test_texts_have_the_prompt_of_their_type_of_task(encoder, tmp_path, monkeypatch, chosen):
    prompts = recorded_prompts(monkeypatch)
    make(job(tmp_path / "run", encoder, task_prompts=chosen))
    assert prompts == {
        ("Flight", "query"): "class " if chosen else "the index of ",
        ("Flight", "document"): "return ",
        ("FlightTopics", None): "class ",
        ("FlightSimilarity", None): "with " if chosen else "class ",
    }


def test_a_contextual_encoder_reads_a_context_of_each_task(contextual_encoder, tmp_path, monkeypatch):
    from retrieval.encoders.contextual.encoder import ContextualEncoder

    read: list[tuple[list[str], str | None]] = []
    embed = ContextualEncoder.embed_context

    def embed_context(self: Any, texts: list[str], prompt: str | None = None) -> Any:
        read.append((list(texts), prompt))
        return embed(self, texts, prompt)

    monkeypatch.setattr(ContextualEncoder, "embed_context", embed_context)
    uri = make(job(tmp_path / "run", contextual_encoder, context_documents=6, seed=3))
    assert [len(texts) for texts, _ in read] == [6, 6, 6]
    assert {prompt for _, prompt in read} == {"return "}
    flight, topics, similarity = Flight(), FlightTopics(), FlightSimilarity()
    for task in (flight, topics, similarity):
        task.load_data()
    corpus = flight.dataset["default"]["test"]["corpus"]
    assert set(read[0][0]) <= {f"{row['title']} {row['text']}".strip() for row in corpus}
    assert set(read[1][0]) <= set(topics.dataset["train"]["text"])
    assert set(read[2][0]) <= set(similarity.dataset["test"]["sentence1"])
    results = Artifact(uri).read_json("results.json")["tasks"]
    of = {"device": "cpu", "dtype": "float32"}
    same = RaytrieverEncoder(contextual_encoder, context_documents=6, context_seed=3, **of)
    assert {name: task["main_score"] for name, task in results.items()} == pytest.approx(scores(same), abs=1e-6)
    assert read[3:] == read[:3]
    scores(RaytrieverEncoder(contextual_encoder, context_documents=6, **of))
    assert all(other != drawn for other, drawn in zip(read[6:], read[:3], strict=True))  # by another seed
    more = RaytrieverEncoder(contextual_encoder, context_documents=DOCUMENTS, **of)
    assert scores(more, Flight)["Flight"] != results["Flight"]["main_score"]
    assert len(read[-1][0]) == DOCUMENTS - 2  # two are empty
    assert more.mteb_model_meta.experiment_name != same.mteb_model_meta.experiment_name


@pytest.mark.parametrize(("changes", "message"), [
    ({"benchmark": "Made up (eng, v2)"}, r"MTEB doesn't have\. Did you mean 'Made up \(eng, v1\)'\?"),
    ({"tasks": ["Fligt"]}, r"tasks names 'Fligt', which Made up \(eng, v1\) doesn't have\. Did you mean 'Flight'"),
    ({"benchmark": None, "tasks": ["NFCorpu"]}, r"which MTEB doesn't have\. Did you mean 'NFCorpus'"),
    ({"task_prompts": {"Clustering": "other"}}, r"task_prompts\.Clustering names neither a task here"),
    ({"task_prompts": {"STS": "othr"}}, r"task_prompts\.STS is 'othr', .* It has classification, document, other"),
    ({"published": "contextual/1/x"}, "contextual/1/x"),
    ({"published": "revela/1/BM25"}, r"none of\s+MTEB's scores on these tasks"),
    ({"encoder": {"model": "", "form": {"kind": "layers", "layers": [1, 2]}}}, "has layers 1, 2, which MTEB"),
    ({"encoder": {"model": "", "max_length": 99}}, r"encoder\.max_length is 99, over the limit of"),
    ({"context_documents": 3}, "reads no context. Leave out context_documents"),
    ({"encoder": {"model": "", "query_prompt_name": "no"}}, "query_prompt_name is 'no', but the encoder has no"),
    ({"benchmark": None}, "neither tasks nor a benchmark is named"),
    ({"tasks": ["Flight", "Flight"]}, "tasks names one twice"),
    ({"name": "plain"}, "of the form organization/model"),
])  # fmt: skip
def test_what_can_not_be_evaluated_is_refused_before_it_is(encoder, tmp_path, changes, message):
    if "encoder" in changes:
        changes = {"encoder": changes["encoder"] | {"model": encoder}}
    with pytest.raises(UserError, match=message):
        look_ahead(tmp_path / "run", encoder, **changes)


def test_without_mteb_the_extra_is_named(encoder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from importlib.metadata import PackageNotFoundError

    def version(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr("retrieval.mteb_tasks.version", version)
    with pytest.raises(UserError, match=r"pip install 'raytriever\[mteb\]'"):
        look_ahead(tmp_path / "run", encoder)


def test_a_task_of_images_is_named(encoder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Flight, "metadata", Flight.metadata.model_copy(update={"modalities": ["text", "image"]}))
    with pytest.raises(UserError, match="Task Flight is of text, image; leave it out"):
        look_ahead(tmp_path / "run", encoder)


def test_data_that_can_not_be_had_are_named(encoder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def load_data(*_: Any, **__: Any) -> None:
        raise ConnectionError("no route")

    monkeypatch.setattr(FlightTopics, "load_data", load_data)
    with pytest.raises(UserError, match=r"task FlightTopics \(nowhere/at-all at 0{40}\) can't be loaded: no route"):
        make(job(tmp_path / "run", encoder, tasks=["FlightTopics"]))


def test_the_recipe_names_all_tasks_of_the_benchmark(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()  # the benchmark is MTEB's own
    ((name, stage),) = recipe_stages(load_recipe("suites/mteb_english", [])).items()
    whole = [task.metadata.name for task in mteb.get_benchmark("MTEB(eng, v1)").tasks]
    assert sorted(stage.config.tasks) == sorted(whole)
    assert len(whole) == 56
    stage.check_settings({name: stage})


def evaluated(model: Any, task: Any, folder: Path | None = None) -> dict[str, float]:
    """Scores of the test split; ``folder``: where MTEB writes the rankings."""
    done = mteb.evaluate(model, task, **QUIET, prediction_folder=folder, encode_kwargs={"batch_size": 16})
    return done.task_results[0].scores["test"][0]


def predictions(folder: Path, name: str) -> dict[str, dict[str, float]]:
    found = json.loads((folder / f"{name}_predictions.json").read_text())
    of_split: dict[str, dict[str, float]] = found["default"]["test"]
    return of_split


@pytest.mark.parametrize("task", [Flight(), FlightReranking()], ids=["retrieval", "re-ranking"])
def test_the_same_as_the_exported_encoder(tmp_path: Path, task: Any) -> None:
    from sentence_transformers import SentenceTransformer

    encoder = saved_encoder(tmp_path, **OF_ROLES)
    models = {
        "encoder": RaytrieverEncoder(encoder, device="cpu", dtype="float32"),
        "exported": SentenceTransformer(encoder, device="cpu"),
    }
    scores = {name: evaluated(model, task, tmp_path / name) for name, model in models.items()}
    assert 0.05 < scores["encoder"]["ndcg_at_10"] < 1
    assert scores["exported"]["ndcg_at_10"] == pytest.approx(scores["encoder"]["ndcg_at_10"], abs=1e-6)
    found = predictions(tmp_path / "exported", task.metadata.name)
    for query, documents in predictions(tmp_path / "encoder", task.metadata.name).items():
        assert found[query] == pytest.approx(documents, abs=1e-5)


def test_what_mteb_is_told_of_the_model(encoder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    meta = RaytrieverEncoder(encoder).mteb_model_meta
    assert meta.name == "raytriever/tiny"
    assert (meta.embed_dim, meta.max_tokens, meta.similarity_fn_name.value) == (32, 48, "cosine")
    stored = (Path(encoder) / "model.safetensors").stat().st_size
    assert (4 * meta.n_parameters, meta.memory_usage_mb) == pytest.approx((stored, stored / 1024**2), rel=0.1)
    assert len(meta.revision) == 40
    assert not {"model", "revision", "dimension"} & meta.experiment_kwargs.keys()
    assert meta.use_instructions
    assert meta.training_datasets is None
    assert meta.experiment_kwargs["query_prompt"] == "the index of "
    other = RaytrieverEncoder(encoder, name="our/name", query_prompt="another ").mteb_model_meta
    assert other.name == "our/name"
    assert other.experiment_name != meta.experiment_name  # MTEB keeps their results apart
    assert result_name("org/name") == "org/name"
    with pytest.raises(UserError, match="name is 'plain'"):
        RaytrieverEncoder(encoder, name="plain")
    with pytest.raises(UserError, match=r"task_prompts\.STS is 'othr'"):
        RaytrieverEncoder(encoder, task_prompts={"STS": "othr"})
    with pytest.raises(UserError, match="has layers 1, 2, which MTEB's own search doesn't support"):
        RaytrieverEncoder(encoder, form={"kind": "layers", "layers": [1, 2]})
    monkeypatch.setattr(mteb_encoder, "resolve_dtype", lambda *_, **__: "bfloat16")
    resolved = RaytrieverEncoder(encoder, device="cpu")  # the dtype is auto: as it is on this machine
    assert resolved.mteb_model_meta.experiment_kwargs["dtype"] == "bfloat16"
    assert next(resolved._towers.parameters()).dtype == torch.bfloat16


def test_a_text_without_a_role_has_no_prompt(encoder: str) -> None:
    from mteb.types import PromptType
    from sentence_transformers import SentenceTransformer

    ours = RaytrieverEncoder(encoder, device="cpu", dtype="float32")
    exported = SentenceTransformer(encoder, device="cpu")
    texts = ["the wing of a plane", "heat"]
    for role, prompt in ((None, None), (PromptType.query, "query"), (PromptType.document, "document")):
        task = {"task_metadata": Flight.metadata, "hf_split": "test", "hf_subset": "default"}
        found = ours.encode([{"text": texts[:1]}, {"text": texts[1:]}], prompt_type=role, **task)
        expected = exported.encode(texts, prompt_name=prompt, prompt=None if prompt else "")
        np.testing.assert_allclose(found, expected, atol=1e-6)
    similar = ours.similarity(found, found).diagonal()
    np.testing.assert_allclose(similar, ours.similarity_pairwise(found, found), rtol=1e-6)
    with pytest.raises(UserError, match="precision 'int8' is not supported"):
        ours.encode([], prompt_type=None, precision="int8", **task)


def test_a_contextual_encoder_wants_to_know_the_tasks_and_texts_to_draw(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    contextual(dtype=torch.float32, context_documents=8, query_prompt="flight ").save(tmp_path / "contextual")
    encoder = RaytrieverEncoder(str(tmp_path / "contextual"), device="cpu", dtype="float32")
    with pytest.raises(UserError, match=r"doesn't know where those of Flight are.*tasks=tasks"):
        evaluated(encoder, Flight())
    with pytest.raises(UserError, match=r"tasks holds 'Flight'\. Give tasks of MTEB"):
        encoder.use_tasks(["Flight"])
    monkeypatch.setattr(mteb_encoder, "_drawn_texts", lambda *_: [])
    encoder.use_tasks([Flight()])
    with pytest.raises(UserError, match=r"texts drawn from Flight are empty.* another context_seed\."):
        evaluated(encoder, Flight())
