"""Whatever a recipe or a setting holds, it is read or refused by name: quickly, and never by a traceback."""

import time
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipelines.jobs.filter import FilterConfig
from raytriever.errors import UserError
from raytriever.settings.configuration import apply_overrides, parse_yaml, validate
from raytriever.settings.recipe import load_recipe

LEVELS = "\n".join(
    ["a0: &a0 [x, x, x, x, x, x, x, x, x]", *(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 12))]
)
HOSTILE = {
    "aliases of aliases": LEVELS,
    "braces": "a: " + "{a: " * 2_000,
    "brackets": "a: " + "[" * 2_000,
    "itself": "a: &x [*x]",
    "a key of itself": "a: &x {b: *x}",
    "digits": "a: " + "9" * 10_000,
}
PIECES = st.sampled_from(
    ["a", "stages", ": ", "\n", "  ", "- ", "[", "]", "{", "}", "&x", "*x", "<<", "|", '"', "!!", "?", "#"]
)
YAML_LIKE = st.lists(PIECES | st.text(max_size=3), max_size=25).map("".join)


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
def test_what_stands_for_too_much_is_refused_at_once(text: str, tmp_path: Path) -> None:
    started = time.process_time()
    with pytest.raises(UserError, match=r"here.* is not valid YAML: "):
        parse_yaml(text, "here")
    value = text.partition(" ")[2] if text != LEVELS else "{" + LEVELS.replace("\n", ", ") + "}"
    with pytest.raises(UserError, match="is not valid YAML"):
        apply_overrides({}, [f"a={value}"])
    (tmp_path / "mine.yaml").write_text(text)
    with pytest.raises(UserError, match=r"mine\.yaml"):
        load_recipe(str(tmp_path / "mine.yaml"), [])
    assert time.process_time() - started < 10


@settings(max_examples=300)
@given(YAML_LIKE | st.text(max_size=60), st.binary(max_size=80))
def test_anything_is_a_recipe_or_refused(tmp_path_factory: pytest.TempPathFactory, text: str, data: bytes) -> None:
    path = tmp_path_factory.mktemp("any") / "mine.yaml"
    for content in (text.encode("utf-8", "surrogatepass"), data):
        path.write_bytes(content)
        with suppress(UserError):
            load_recipe(str(path), [])
    with suppress(UserError):
        apply_overrides({"a": {"b": 1}}, [f"a.b={text}", text])


@pytest.mark.parametrize("value", [".nan", ".inf", "-.inf"])
def test_no_setting_is_nan_or_infinite(value: str) -> None:
    values = {"packing": "p", "pairs": "q", "collection": "c", "output": "o", "false_negatives": {}}
    with pytest.raises(UserError, match=r"'false_negatives.margin': Input should be a finite number"):
        validate(FilterConfig, apply_overrides(values, [f"false_negatives.margin={value}"]), "here")
