"""Tables of plain text."""

import pytest

from raytriever.reports.table import Cell, Table, counted, shortened


@pytest.mark.parametrize(("text", "shown"), [
    ("a  b\nc", "a b c"), ("abcdefgh", "abcdefgh"), ("abcdefghi", "abcdef …"), ("天" * 9, "天天天天天天 …"), ("", ""),
])  # fmt: skip
def test_a_text_of_any_script_is_shortened(text: str, shown: str) -> None:
    assert shortened(text, 8) == shown


def test_one_and_many() -> None:
    assert counted(1, "pair") == "1 pair"
    assert counted(0, "pair") == "0 pairs"
    assert counted(1, "batch", "batches") == "1 batch"
    assert counted(2_000, "batch", "batches") == "2,000 batches"


def test_words_are_to_the_left_numbers_to_the_right_and_marks_below_one_another() -> None:
    rows = [("same text", "a copy", "7"), ("größe", "", "1,234,567")]
    assert Table(("rule", "why", "masked"), rows, text_columns=2).lines() == [
        "rule       why        masked",
        "same text  a copy          7",
        "größe              1,234,567",
    ]
    assert Table((), rows, text_columns=3).lines() == ["same text  a copy  7", "größe              1,234,567"]
    assert Table((), [["a", "7"]]).lines() == ["a  7"]
    rows = [["base", Cell("0.5"), "1"], ["best", Cell("10.5", "ab", is_strong=True), "2"], ["other", "2.5", "3"]]
    assert Table(["system", "nDCG", "n"], rows).lines() == [
        "system  nDCG       n",
        "base     0.5       1",
        "best    10.5 ab *  2",
        "other    2.5       3",
    ]
    assert "*" not in "".join(Table(["system", "nDCG", "n"], rows).lines(strong=""))


def test_columns_that_are_too_many_go_below() -> None:
    table = Table(["system", "n", *(f"measure {number:>2}" for number in range(9))], [["a", "1", *["0.5"] * 9]])
    lines = table.lines(repeated=2)
    assert max(map(len, lines)) <= 100
    assert [line[:9] for line in lines] == ["system  n", "a       1", "", "system  n", "a       1"]
    assert [line.count("measure") for line in lines] == [7, 0, 0, 2, 0]


def test_a_column_wider_than_the_page_stands_beside_its_names_alone() -> None:
    lines = Table(["name", "x" * 120, "n"], [["a", "1", "2"]]).lines()
    assert [line.split() for line in lines] == [["name", "x" * 120], ["a", "1"], [], ["name", "n"], ["a", "2"]]


def test_a_table_of_a_page_escapes_its_texts_and_keeps_room_for_marks() -> None:
    table = Table(["a<b", "nDCG"], [["c", Cell("0.5")], ["d", Cell("1.5", "xy", is_strong=True)]], "e & f")
    room = '<sup style="min-width: 2ch">'
    assert table.html().splitlines() == [
        '<figure><div class="table"><table><thead><tr><th>a&lt;b</th>'
        f'<th class="number">nDCG{room}</sup></th></tr></thead>',
        "<tbody>",
        f'<tr><td>c</td><td class="number">0.5{room}</sup></td></tr>',
        f'<tr><td>d</td><td class="number"><strong>1.5</strong>{room}xy</sup></td></tr>',
        "</tbody></table></div><figcaption>e &amp; f</figcaption></figure>",
    ]
    assert Table((), [["1"]], text_columns=0).html().splitlines() == [
        '<figure><div class="table"><table><tbody>', '<tr><td class="number">1</td></tr>',
        "</tbody></table></div></figure>",
    ]  # fmt: skip
