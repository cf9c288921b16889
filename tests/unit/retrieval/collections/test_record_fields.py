"""Ids and strings of records: what is taken and how the rest is refused."""

from typing import Any

import pytest

from raytriever.errors import UserError
from retrieval.collections.records import Place, Record

PLACE = Place("/f", 3)


def test_ids_are_strings_or_integers() -> None:
    assert Record(PLACE, {"id": "d 1"}).id("id") == "d 1"
    assert Record(PLACE, {"id": -7}).id("id") == "-7"
    assert Record(PLACE, {"id": 10**30}).id("id") == "1" + "0" * 30


def test_strings_may_be_empty_and_some_may_be_absent() -> None:
    assert Record(PLACE, {"text": ""}).string("text") == ""
    assert Record(PLACE, {"title": "T"}).text("title") == "T"
    assert Record(PLACE, {"title": None}).text("title") == Record(PLACE, {}).text("title") == ""


@pytest.mark.parametrize(("read", "record", "message"), [
    ("id", {"pid": 1}, r"""/f, line 3 has no "id"; its keys are \['pid'\]"""),
    ("id", {"id": ""}, r"""/f, line 3: "id" is ''\. It must be a string that is not empty, or an integer"""),
    ("id", {"id": True}, r""""id" is True"""),
    ("id", {"id": 1.0}, r""""id" is 1\.0"""),
    ("id", {"id": ["x"]}, r""""id" is \['x'\]"""),
    ("string", {}, r"""has no "id"; its keys are \[\]"""),
    ("string", {"id": None}, r""""id" is None\. It must be a string"""),
    ("text", {"id": 7}, r""""id" is 7\. It must be a string"""),
])  # fmt: skip
def test_other_values_are_named(read: str, record: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        getattr(Record(PLACE, record), read)("id")
