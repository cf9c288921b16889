"""The collection made of the standard library: what is read, how it is split, that it never changes."""

import hashlib
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from pipelines.formats.python_functions import (
    PythonFunctions,
    PythonFunctionsFormat,
    is_held_out,
    library_modules,
    query_id,
)
from raytriever.errors import UserError
from retrieval.collections.collection import DOCUMENTS, JUDGMENTS, QUERIES
from retrieval.collections.records import Policies, Source
from tests.unit.retrieval.collections.contents import contents, counts, dropped

Rows = list[dict[str, Any]]


def read(source: Source) -> tuple[Rows, Rows, Rows]:
    documents, queries, judgments = (
        [dict(zip(schema.names, row, strict=True)) for row in rows]
        for rows, schema in zip(contents(source), (DOCUMENTS, QUERIES, JUDGMENTS), strict=True)
    )
    return documents, queries, judgments


def opened(config: PythonFunctions, folder: Path) -> Source:
    return Source(PythonFunctionsFormat(config, folder), Policies())


def library(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return folder


def function(name: str, docstring: str, body: str = "return 1") -> str:
    return f'def {name}():\n    """{docstring}"""\n    {body}\n\n'


def held_out_and_other_name(share: float) -> tuple[str, str]:
    names = [f"module{number}" for number in range(100)]
    return next(n for n in names if is_held_out(n, share)), next(n for n in names if not is_held_out(n, share))


def test_modules_are_library_code_only_by_name(tmp_path: Path) -> None:
    names = ["b.py", "a/__init__.py", "a/c.py", "a.py", "__phello__/spam.py", "_sysconfigdata__linux.py"]
    names += ["test/test_b.py", "a/tests/x.py", "x/idle_test/y.py", "site-packages/numpy.py", "config-3.11/z.py"]
    names += ["__pycache__/b.py", "not-a-module.py", "data.txt", "turtledemo/clock.py"]
    modules = library_modules(library(tmp_path, dict.fromkeys(names, "")))
    assert [name for name, _ in modules] == ["__phello__.spam", "a", "a", "a.c", "b"]


def test_documents_queries_and_judgments(tmp_path: Path) -> None:
    files = {
        "pack/__init__.py": function("first", "Return the number one.") + function("brief", "Too short."),
        "pack/deep.py": function("again", "Return the  number\n    one.\n\n    Always.", "return 1 + 0"),
        "zoo.py": function("feed", "Feed all the animals.", "return food"),
    }
    source = opened(PythonFunctions(held_out=0), library(tmp_path, files))
    documents, queries, judgments = read(source)
    assert documents == [
        {"id": "pack.first", "title": "", "text": "def first():\n    return 1", "domain": "pack"},
        {"id": "pack.deep.again", "title": "", "text": "def again():\n    return 1 + 0", "domain": "pack"},
        {"id": "zoo.feed", "title": "", "text": "def feed():\n    return food", "domain": "zoo"},
    ]
    one, feed = "Return the number one.", "Feed all the animals."
    ids = [hashlib.sha256(text.encode()).hexdigest()[:16] for text in (one, feed)]
    assert queries == [
        {"id": ids[0], "text": one, "domain": "pack", "answers": []},
        {"id": ids[1], "text": feed, "domain": "zoo", "answers": []},
    ]
    assert [tuple(row.values()) for row in judgments] == [
        (ids[0], "pack.first", 1, "train"),
        (ids[0], "pack.deep.again", 1, "train"),
        (ids[1], "zoo.feed", 1, "train"),
    ]
    assert dropped(source) == {"functions_with_a_short_query": 1}
    assert counts(source) == {"modules": 3, "held_out_modules": 0, "train_module_pairs_in_test": 0}


def test_a_query_that_a_held_out_module_shares_takes_all_its_judgments_to_test(tmp_path: Path) -> None:
    held_out, other = held_out_and_other_name(0.2)
    files = {
        f"{held_out}.py": function("f", "Shared by both modules.") + function("g", "Only held out here."),
        f"{other}.py": function("f", "Shared by both modules.") + function("h", "Only for training here."),
    }
    source = opened(PythonFunctions(), library(tmp_path, files))
    _, _, judgments = read(source)
    assert {row["document_id"]: row["split"] for row in judgments} == {
        f"{held_out}.f": "test",
        f"{held_out}.g": "test",
        f"{other}.f": "test",
        f"{other}.h": "train",
    }
    assert counts(source) == {"modules": 2, "held_out_modules": 1, "train_module_pairs_in_test": 1}


def test_held_out_modules_are_those_of_the_smallest_hashes() -> None:
    names = [f"package.module{number}" for number in range(2000)]
    for share in (0.0, 0.2, 1.0):
        chosen = {name for name in names if is_held_out(name, share)}
        threshold = share * 2**256
        assert chosen == {n for n in names if int(hashlib.sha256(n.encode()).hexdigest(), 16) < threshold}
    assert abs(sum(is_held_out(name, 0.2) for name in names) / 2000 - 0.2) < 0.03


def test_what_does_not_parse_is_counted(tmp_path: Path) -> None:
    folder = library(tmp_path, {"bad.py": "def f(:\n", "good.py": function("f", "One two three.")})
    (folder / "coded.py").write_bytes(b"# coding: ascii\nx = '\xe9'\n")
    for levels in (1_500, 6_000):  # more than Python's stack holds, and more than its parser's
        branches = "".join(f"elif x == {level}:\n    pass\n" for level in range(levels))
        (folder / f"deep{levels}.py").write_text(f"x = 1\nif x:\n    pass\n{branches}")
    source = opened(PythonFunctions(), folder)
    assert [row["id"] for row in read(source)[0]] == ["good.f"]
    assert dropped(source) == {"modules_that_do_not_parse": 4}


def test_a_library_without_source_is_refused_with_its_path(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"no source files.*{tmp_path}"):
        opened(PythonFunctions(), tmp_path)


def test_the_fingerprint_tells_libraries_apart(tmp_path: Path) -> None:
    def fingerprint(name: str, files: dict[str, str]) -> dict[str, Any]:
        return opened(PythonFunctions(), library(tmp_path / name, files)).format.fingerprint()

    first = fingerprint("1", {"a.py": "x = 1", "b.py": ""})
    assert fingerprint("2", {"b.py": "", "a.py": "x = 1", "test/c.py": "ignored"}) == first
    assert first["python"] == ".".join(map(str, sys.version_info[:3]))
    others = [{"a.py": "x = 2", "b.py": ""}, {"a.py": "", "b.py": "x = 1"}, {"a.py": "x = 1", "c.py": ""}]
    hashes = {first["sha256"], *(fingerprint(f"o{i}", files)["sha256"] for i, files in enumerate(others))}
    assert len(hashes) == 4


@pytest.fixture(scope="module")
def standard_library() -> tuple[Source, Rows, Rows, Rows]:
    source = PythonFunctions().open()
    return (source, *read(source))


def test_the_standard_library_is_a_sound_collection(standard_library: tuple[Source, Rows, Rows, Rows]) -> None:
    source, documents, queries, judgments = standard_library
    document_ids = {row["id"] for row in documents}
    assert len(document_ids) == len(documents) == len(judgments) > 5000
    assert {row["document_id"] for row in judgments} == document_ids
    assert {row["query_id"] for row in judgments} == {row["id"] for row in queries}
    assert len({row["text"] for row in queries}) == len({row["id"] for row in queries}) == len(queries)
    assert all(row["id"] == query_id(row["text"]) and len(row["text"].split()) >= 3 for row in queries)
    assert all(row["text"].strip() and row["id"].startswith(row["domain"] + ".") for row in documents)
    assert "modules_that_do_not_parse" not in dropped(source)


def test_training_sees_no_test_query_and_no_pair_of_a_held_out_module(
    standard_library: tuple[Source, Rows, Rows, Rows],
) -> None:
    source, _, _, judgments = standard_library
    module_of = {function.id: function.module for function in source.format._functions}  # type: ignore[attr-defined]
    splits: dict[str, set[str]] = {}
    moved = 0
    for row in judgments:
        splits.setdefault(row["query_id"], set()).add(row["split"])
        held_out = is_held_out(module_of[row["document_id"]], 0.2)
        assert row["split"] == "test" or not held_out
        moved += row["split"] == "test" and not held_out
    assert all(len(of_query) == 1 for of_query in splits.values())
    assert counts(source)["train_module_pairs_in_test"] == moved
    shares = Counter(row["split"] for row in judgments)
    assert 0.1 < shares["test"] / len(judgments) < 0.4


def test_a_limit_keeps_a_stable_choice(standard_library: tuple[Source, Rows, Rows, Rows]) -> None:
    _, documents, _, _ = standard_library
    everything = [row["id"] for row in documents]
    chosen = set(sorted(everything, key=lambda id_: hashlib.sha256(id_.encode()).hexdigest())[:300])
    limited = PythonFunctions(limit=300).open()
    documents, queries, judgments = read(limited)
    assert [row["id"] for row in documents] == [id_ for id_ in everything if id_ in chosen]
    assert {row["query_id"] for row in judgments} == {row["id"] for row in queries}
    assert dropped(limited)["functions_beyond_the_limit"] == len(everything) - 300


def test_another_process_reads_the_same(tmp_path: Path) -> None:
    files = {f"m{i}.py": function("f", f"Return number {i % 5} now.") for i in range(40)}
    folder = library(tmp_path, files)
    script = (
        "import sys; from pathlib import Path\n"
        "from pipelines.formats.python_functions import *\n"
        "source = PythonFunctionsFormat(PythonFunctions(limit=30), Path(sys.argv[1]))\n"
        "print(*source.documents(), *source.queries(), *source.judgments(), sep='\\n')\n"
        "print(source.fingerprint(), source.counts)\n"
    )
    outputs = [
        subprocess.run(
            [sys.executable, "-c", script, str(folder)],
            env={**os.environ, "PYTHONHASHSEED": seed},
            cwd=Path(__file__).parents[4],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    ]
    assert outputs[0] == outputs[1]
    assert "Return number" in outputs[0]
