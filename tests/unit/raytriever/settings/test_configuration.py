"""Settings: what is read, how a mistake is named, how inputs are told from the rest."""

import json
import math
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import Field, TypeAdapter, ValidationError

from raytriever.errors import UserError
from raytriever.settings import configuration
from raytriever.settings.configuration import (
    Input,
    InputPath,
    Level,
    PartialShare,
    PositiveShare,
    Settings,
    Share,
    apply_overrides,
    did_you_mean,
    input_paths,
    map_inputs,
    parse_yaml,
    read_yaml,
    validate,
    without_inputs,
)


class Folder(Settings):
    kind: Literal["folder"] = "folder"
    path: InputPath
    splits: tuple[str, ...] | None = Field(default=None, min_length=1)


class Generated(Settings):
    kind: Literal["generated"] = "generated"
    rows: int = Field(default=3, gt=0)


class Optimizer(Settings):
    learning_rate: float = 1e-3
    bf16: bool | Literal["auto"] = "auto"


class Job(Settings):
    output: str = "out"
    source: Annotated[Folder | Generated, Field(discriminator="kind")] = Generated()
    runs: Annotated[dict[str, str], Input()] = Field(default_factory=dict)
    vectors: InputPath | None = None
    optimizer: Optimizer = Optimizer()
    parts: tuple[Literal["documents", "queries"], ...] = ()


FULL = {
    "source": {"kind": "folder", "path": "c"},
    "runs": {"a": "runs/a", "b": "runs/b"},
    "vectors": "v",
    "optimizer": {"learning_rate": 0.5},
}


def refusal(values: dict[str, object]) -> str:
    with pytest.raises(UserError) as raised:
        validate(Job, values, "job.yaml")
    message = str(raised.value)
    assert message.startswith("job.yaml: ")
    assert "\n" not in message
    return message.removeprefix("job.yaml: ")


@pytest.mark.parametrize(("values", "message"), [
    ({"outptu": "x"}, "'outptu' is not a setting. Did you mean 'output'?"),
    ({"zzz": 1}, "'zzz' is not a setting. Allowed: optimizer, output, parts, runs, source, vectors."),
    ({"optimizer": {"bf": 1}}, "'optimizer.bf' is not a setting. Did you mean 'bf16'?"),
    ({"source": {"kind": "folder", "path": "c", "splits": []}}, "'source.splits' needs at least 1, and has 0: []."),
    ({"source": {"kind": "folder"}}, "'source.path' is missing and has no default."),
    ({"source": {"kind": "generated", "row": 1}}, "'source.row' is not a setting. Did you mean 'rows'?"),
    ({"source": {"kind": "foldr"}}, "'source.kind' can't be 'foldr'. Did you mean 'folder'?"),
    ({"source": {"rows": 3}}, "'source.kind' is missing. Allowed: folder, generated."),
    ({"source": {"kind": "generated", "rows": 0}}, "'source.rows': Input should be greater than 0 (given: 0)."),
    (
        {"optimizer": {"learning_rate": "fast"}},
        "'optimizer.learning_rate': Input should be a valid number, unable to parse string as a number"
        " (given: 'fast').",
    ),
    ({"output": None}, "'output': Input should be a valid string (given: None)."),
    ({"parts": ["docs"]}, "'parts.0': Input should be 'documents' or 'queries' (given: 'docs')."),
    (
        {"optimizer": {"bf16": "maybe"}},
        "'optimizer.bf16': Input should be a valid boolean, unable to interpret input (given: 'maybe')."
        " 'optimizer.bf16': Input should be 'auto' (given: 'maybe').",
    ),
])  # fmt: skip
def test_a_mistake_is_named_as_the_user_wrote_it(values: dict[str, object], message: str) -> None:
    assert refusal(values) == message


class Table(Settings):
    name: str = "corpus"


class Tables(Settings):
    kind: Literal["tables"] = "tables"
    documents: Table = Table()


class Joined(Settings):
    sources: dict[str, Annotated[Folder | Tables, Field(discriminator="kind")]]


def test_a_name_that_is_also_that_of_a_setting_is_still_a_name() -> None:
    with pytest.raises(UserError, match=r"'sources\.documents\.pth' is not a setting\. Did you mean 'path'\?"):
        validate(Joined, {"sources": {"documents": {"kind": "folder", "path": "a", "pth": "b"}}}, "f")
    with pytest.raises(UserError, match=r"'sources\.a\.documents\.nam' is not a setting\. Did you mean 'name'\?"):
        validate(Joined, {"sources": {"a": {"kind": "tables", "documents": {"nam": "b"}}}}, "f")


def test_settings_are_immutable_and_typed_and_all_mistakes_are_named_at_once() -> None:
    message = refusal({"outptu": 1, "optimizer": {"learning_rate": "x"}, "source": {"kind": "folder"}})
    assert all(key in message for key in ("'outptu'", "'optimizer.learning_rate'", "'source.path'"))
    job = validate(Job, {"optimizer": {"learning_rate": "2e-5"}}, "x")  # YAML 1.1 reads 2e-5 as a string
    assert job.optimizer.learning_rate == 2e-5
    with pytest.raises(ValidationError):
        job.output = "other"


@pytest.mark.parametrize(("text", "message"), [
    ("a: 1\nb: [1, 2\nc: 3", "f.yaml, line 3 is not valid YAML: expected ',' or ']', but got"),
    ("a:\n  b: 1\n  c: 2\n  b: 3\n", "f.yaml, line 4 is not valid YAML: 'b' is given twice."),
    ("- 1", "f.yaml holds list; a mapping"),
    ("", "f.yaml holds nothing; a mapping"),
    ("a: !!python/object/apply:os.system ['true']", "f.yaml, line 1 is not valid YAML: could not determine"),
    ("a: 2024-13-45", "f.yaml is not valid YAML: month must be in 1..12"),
    ("a: \x00", "f.yaml is not valid YAML: special characters are not allowed."),
    ("a: 1\nruns: {{ runs }}\n", "f.yaml, line 2 is not valid YAML: a mapping or list in brackets stands where"),
    ("a: 1\n\n[x, y]: 2\n", "f.yaml, line 3 is not valid YAML: a mapping or list in brackets stands where"),
])  # fmt: skip
def test_what_is_no_mapping_is_refused_with_its_line(text: str, message: str) -> None:
    with pytest.raises(UserError) as raised:
        parse_yaml(text, "f.yaml")
    assert str(raised.value).startswith(message)


def test_what_is_nested_50_deep_is_read_and_nothing_deeper() -> None:
    assert parse_yaml(f"a: {'[' * 50}{']' * 50}", "f.yaml")
    with pytest.raises(UserError, match=r"f\.yaml is not valid YAML: it is nested more than 50 deep\."):
        parse_yaml(f"a: {'[' * 51}{']' * 51}", "f.yaml")


def test_what_stands_for_100_000_values_is_read_and_nothing_larger() -> None:
    configuration._require_bounded([0] * 99_999)
    with pytest.raises(yaml.YAMLError):
        configuration._require_bounded([0] * 100_000)


def test_merge_keys_and_nested_lists_are_plain_yaml() -> None:
    text = "base: &b {x: 1, y: 2}\nmine:\n  <<: *b\n  y: 3\nitems: [{x: 1}, {x: 2}]"
    assert parse_yaml(text, "f")["mine"] == {"x": 1, "y": 3}
    assert parse_yaml(text, "f") == yaml.safe_load(text)


def test_files_that_cannot_be_read(tmp_path) -> None:
    (tmp_path / "latin.yaml").write_bytes("a: é".encode("latin-1"))
    for name, message in (("latin.yaml", r"latin\.yaml is not UTF-8 text \(byte 3\)"), ("none.yaml", "No such file")):
        with pytest.raises(UserError, match=message):
            read_yaml(tmp_path / name, "Recipe")
    with pytest.raises(UserError, match="can't be read"):
        read_yaml(tmp_path, "Recipe")


def test_overrides_are_laid_over_a_copy() -> None:
    settings = {"a": {"b": [1], "c": 2}, "empty": None}
    changed = apply_overrides(settings, ["a.c=3", "x.y.z=true", "a.b=[4, 5]", "empty.k=v", "text='1'", "nothing="])
    nested = {"a": {"b": [4, 5], "c": 3}, "x": {"y": {"z": True}}, "empty": {"k": "v"}}
    assert changed == nested | {"text": "1", "nothing": None}
    assert settings == {"a": {"b": [1], "c": 2}, "empty": None}


@pytest.mark.parametrize(("override", "message"), [
    ("learning_rate", "'learning_rate' is not of the form key=value"),
    ("=3", "'=3' is not of the form key=value"),
    ("a.b.c=3", "'a.b.c=3': a.b is 2 and has no settings below it"),
    ("a=[1", "'a=\\[1': the value is not valid YAML"),
    ("a=[**/b/**]", "in quotes: --set .* In a list, close brackets and put what begins with"),
    ("a=2024-13-45", "the value is not valid YAML. If it is text, put it in quotes: --set 'a=\"2024-13-45\"'"),
    ("a={{ runs }}", "the value is not valid YAML"),
    ("a=Find the C# or F # code",
     "'Find the C# or F' and drops the rest, .* in quotes: --set 'a=\"Find the C# or F # code\"'. Otherwise"),
    ("a= ü ", "reads 'ü' and drops the rest, outer spaces.* in quotes: --set 'a=\" ü \"'"),
    ("a=query ", "in quotes: --set 'a=\"query \"'"),
    ("a=one\n two", r"in quotes: --set 'a=\"one\\n two\"'"),
    ("a=# nothing", "reads None and drops the rest"),
    ("a= ", "reads None and drops the rest"),
])  # fmt: skip
def test_bad_overrides_are_refused(override: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        apply_overrides({"a": {"b": 2}}, [override])


def test_quoted_text_keeps_what_yaml_would_cut_and_the_rest_is_read_as_plain_yaml() -> None:
    texts = [" x ", "query: ", "Find the C# or F # code", "0123456", "1:30", "# x", "it's"]
    for text in texts:
        assert apply_overrides({}, [f"key={json.dumps(text)}"]) == {"key": text}
    read = apply_overrides({}, ["key=C# and F#", "other=[a, b] ", "number= 3", "tagged=!!str 5"])
    assert read == {"key": "C# and F#", "other": ["a", "b"], "number": 3, "tagged": "5"}
    # a leading zero makes no octal number
    job = validate(Job, apply_overrides({}, ["output=0123456", "source={kind: generated, rows: 010}"]), "x")
    assert job.output == "0123456"
    assert job.source == Generated(rows=10)
    assert parse_yaml("{a: 0, b: 10, c: -007, d: 0x10}", "f") == {"a": 0, "b": 10, "c": "-007", "d": 16}


@pytest.mark.parametrize(("override", "shown"), [("output=query: ", "{'query': None}"), ("output=3", "3")])
def test_what_is_no_text_is_shown_with_what_to_do(override: str, shown: str) -> None:
    message = refusal(apply_overrides({}, [override]))
    assert message.startswith(f"'output': Input should be a valid string (given: {shown}, as YAML reads it). Quote it")


def test_a_key_of_settings_below_is_told_with_those_above_it() -> None:
    assert refusal({"learning_rate": 3}) == "'learning_rate' is not a setting. Did you mean 'optimizer.learning_rate'?"
    with pytest.raises(UserError, match=r"'bf16' is not a setting\. Did you mean 'model\.optimizer\.bf16'"):
        validate(Job, {"bf16": True}, "Recipe mine.yaml, stage model", ["model"])
    assert refusal({"kind": 1}) == "'kind' is not a setting. Did you mean 'source.kind'?"


def test_one_value_in_place_of_a_list_is_told_how_a_list_is_written() -> None:
    assert refusal(apply_overrides({}, ["parts=queries"])) == "'parts' is a list: write [queries]."


PLAIN = st.none() | st.booleans() | st.integers() | st.text()


@settings(max_examples=50)
@given(st.recursive(PLAIN, lambda values: st.lists(values) | st.dictionaries(st.text(), values)))
def test_any_value_survives_an_override(value: object) -> None:
    # a text as it would be given: on one line, and without the mark by which PyYAML ends a document
    text = yaml.safe_dump(value, default_flow_style=True, width=math.inf).removesuffix("\n").removesuffix("\n...")
    assert apply_overrides({}, [f"key={text}"])["key"] == value


def test_inputs_are_found_at_any_depth_and_are_not_recorded() -> None:
    job = validate(Job, FULL, "x")
    found = {"source.path": "c", "runs.a": "runs/a", "runs.b": "runs/b", "vectors": "v"}
    assert input_paths(job) == found
    moved = map_inputs(job, lambda key, value: f"/{key}/{value}")
    assert input_paths(moved) == {key: f"/{key}/{value}" for key, value in found.items()}
    assert moved.optimizer == job.optimizer
    assert input_paths(validate(Job, {}, "x")) == {}
    assert without_inputs(job) == {
        "output": "out",
        "source": {"kind": "folder", "splits": None},
        "optimizer": {"learning_rate": 0.5, "bf16": "auto"},
        "parts": [],
    }


class Labelled(Settings):
    labels: dict[str, str] = Field(default={"a": "b"})
    quiet: int = Field(default=1, exclude=True)

    def _check(self) -> None:
        if not self.labels:
            raise ValueError("no labels")


def test_plain_mappings_and_fields_that_leave_themselves_out() -> None:
    assert without_inputs(Labelled()) == {"labels": {"a": "b"}}
    assert input_paths(Labelled()) == {}
    with pytest.raises(UserError, match=r"^f: no labels\.$"):
        validate(Labelled, {"labels": {}}, "f")


@pytest.mark.parametrize(("share", "inside", "outside"), [
    (Share, (0, 0.5, 1), (-0.5, 1.5)), (PartialShare, (0, 0.5), (-0.5, 1, 1.5)),
    (PositiveShare, (0.5, 1), (0, -0.5, 1.5)), (Level, (0.5,), (0, -0.5, 1, 1.5)),
])  # fmt: skip
def test_shares_have_bounds(share: Any, inside: Sequence[float], outside: Sequence[float]) -> None:
    assert [TypeAdapter(share).validate_python(value) for value in inside] == [*inside]
    for value in outside:
        with pytest.raises(ValidationError):
            TypeAdapter(share).validate_python(value)


def test_a_close_name_is_proposed_and_else_all_are_listed() -> None:
    assert did_you_mean("clusterz", ["cluster", "pack"]) == " Did you mean 'cluster'?"
    assert did_you_mean("qqq", ["cluster", "pack"]) == " Allowed: cluster, pack."
    assert did_you_mean("qqq", []) == ""
