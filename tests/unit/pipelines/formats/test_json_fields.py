"""Ids and strings of JSON objects: what is taken and how the rest is refused."""

from collections.abc import Callable
from typing import Any

import pytest

from pipelines.formats.json_records import identifier, optional_string, string
from raytriever.errors import UserError
from retrieval.collections.records import Place

PLACE = Place("/f", 3)


def test_ids_are_strings_or_integers() -> None:
    assert identifier({"id": "d 1"}, "id", PLACE) == "d 1"
    assert identifier({"id": -7}, "id", PLACE) == "-7"
    assert identifier({"id": 10**30}, "id", PLACE) == "1" + "0" * 30


def test_strings_may_be_empty_and_some_may_be_absent() -> None:
    assert string({"text": ""}, "text", PLACE) == ""
    assert optional_string({"title": "T"}, "title", PLACE) == "T"
    assert optional_string({"title": None}, "title", PLACE) == optional_string({}, "title", PLACE) == ""


@pytest.mark.parametrize(
    ("read", "record", "message"),
    [
        (identifier, {"pid": 1}, r"""/f, line 3 has no "id"; its keys are \['pid'\]"""),
        (identifier, {"id": ""}, r"""/f, line 3: "id" is ''\. It must be a string that is not empty, or an integer"""),
        (identifier, {"id": True}, r""""id" is True"""),
        (identifier, {"id": 1.0}, r""""id" is 1\.0"""),
        (identifier, {"id": ["x"]}, r""""id" is \['x'\]"""),
        (string, {}, r"""has no "id"; its keys are \[\]"""),
        (string, {"id": None}, r""""id" is None\. It must be a string"""),
        (optional_string, {"id": 7}, r""""id" is 7\. It must be a string"""),
    ],
)
def test_other_values_are_named(read: Callable[..., str], record: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        read(record, "id", PLACE)
