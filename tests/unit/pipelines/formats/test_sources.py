"""Several sources as one collection: ids that tell them apart, a domain each, and what each left out."""

import json
from pathlib import Path
from typing import Any

import pytest

from pipelines.formats.sources import JoinedSources
from pipelines.jobs.collect import Collect, CollectConfig
from raytriever.errors import UserError
from raytriever.settings.configuration import input_paths, map_inputs, validate, without_inputs
from retrieval.collections.collection import StoredCollection
from tests.unit.pipelines.formats.files import lines
from tests.unit.pipelines.jobs.made_up import made_by, stored_rows
from tests.unit.retrieval.collections.packed_files import write_files


def settings(folder: Path) -> dict[str, Any]:
    """Three sources, of three kinds, two of which use the same ids."""
    write_files(str(folder), {
        "wiki/docs.jsonl": lines({"id": 1, "text": "one"}, {"id": 2, "text": "two"}, {"id": 3, "text": ""}),
        "code/lib/a.py": "x = 1\n",
        "code/b.py": "y = 2\n",
        "code/c.py": "",
        "beir/corpus.jsonl": lines({"_id": "1", "title": "", "text": "judged", "metadata": {"site": "s.org"}}),
        "beir/queries.jsonl": lines({"_id": "1", "text": "what", "metadata": {}}),
        "beir/qrels/test.tsv": "query-id\tcorpus-id\tscore\n1\t1\t2\n",
    })  # fmt: skip
    return {
        "wiki": {
            "kind": "columns", "path": f"{folder}/wiki", "documents": {"table": "docs.jsonl"}, "empty_documents": "drop"
        },
        "code": {"kind": "source_tree", "path": f"{folder}/code"},
        "asked": {"kind": "beir", "path": f"{folder}/beir", "domain_key": "site"},
    }  # fmt: skip


def collected(sources: dict[str, Any], output: Path) -> StoredCollection:
    config = {"source": {"kind": "sources", "sources": sources}, "output": str(output), "bytes_per_shard": 1}
    return StoredCollection(made_by(Collect, config))


def test_sources_by_name_with_their_domains_and_pieces(tmp_path: Path) -> None:
    given = settings(tmp_path)
    stored = collected(given, tmp_path / "out")
    found = stored_rows(stored.uri)
    assert found.documents == [
        ("asked/1", "", "judged", "s.org"), ("code/b.py", "b.py", "y = 2\n", "code"),
        ("code/lib/a.py", "lib/a.py", "x = 1\n", "lib"), ("wiki/1", "", "one", "wiki"), ("wiki/2", "", "two", "wiki"),
    ]  # fmt: skip
    assert found.queries == [("asked/1", "what", "asked", [])]
    assert found.judgments == [("asked/1", "asked/1", 2, "test")]
    assert stored.manifest["dropped"] == {"code/empty_files": 1, "wiki/empty_documents": 1}
    assert stored.manifest["counts"] == {part: len(getattr(found, part)) for part in found._fields}
    assert stored.names("queries/asked/") == [f"queries/asked/{number:05d}.parquet" for number in (0, 75)]
    assert stored.names("documents/code/") == ["documents/code/00000.parquet"]
    other = collected(dict(reversed(given.items())), tmp_path / "other")
    assert other.fingerprint == stored.fingerprint  # the order of the settings changes nothing


def test_what_is_read_is_named(tmp_path: Path) -> None:
    sources = settings(tmp_path)

    def reads(source: dict[str, Any]) -> str:
        return Collect(validate(CollectConfig, {"source": source, "output": "any"}, "collect")).reads()

    assert reads(sources["wiki"]) == "docs.jsonl"
    assert reads(sources["asked"]) == "corpus.jsonl and 2 more files"
    assert reads({"kind": "python_functions"}) == ""


def test_paths_are_inputs_and_no_part_of_what_is_recorded(tmp_path: Path) -> None:
    source = {"kind": "sources", "sources": settings(tmp_path)}
    config = CollectConfig.model_validate({"source": source, "output": str(tmp_path / "out")})
    paths = {f"source.sources.{name}.path": f"{tmp_path}/{name}" for name in ("wiki", "code")}
    assert input_paths(config) == paths | {"source.sources.asked.path": f"{tmp_path}/beir"}
    moved = map_inputs(config, lambda _, value: value.replace(str(tmp_path), "/elsewhere"))
    assert isinstance(moved.source, JoinedSources)
    assert moved.source.sources["code"].path == "/elsewhere/code"  # type: ignore[union-attr]
    assert without_inputs(moved)["source"] == without_inputs(config)["source"]
    assert str(tmp_path) not in json.dumps(Collect(config).resolved())


@pytest.mark.parametrize(("sources", "message"), [
    ({}, r"'sources'"),
    ({"a/b": {"kind": "beir", "path": "x"}}, r"sources.*String should match pattern"),
    ({"a": {"kind": "bier", "path": "x"}}, r"'sources\.a\.kind' can't be 'bier'\. Did you mean 'beir'"),
    ({"a": {"kind": "beir", "path": "x", "domain": "y"}}, r"'sources\.a\.domain' is not a setting\. Did you mean"),
    ({"a": {"kind": "sources", "sources": {}}}, r"'sources\.a\.kind' can't be 'sources'"),
    ({"a": {"kind": "beir"}}, r"'sources\.a\.path' is missing"),
])  # fmt: skip
def test_wrong_settings_are_named(sources: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        validate(JoinedSources, {"kind": "sources", "sources": sources}, "Source")
