"""The texts of a small module are all found, each with its kind, and the rules that they break are named."""

from pathlib import Path

from benchmarks.messages import messages, oddities, sentences

MODULE = '''
"""A module."""


class Training(Settings):
    """Settings."""

    epochs: int = 1
    """How often every batch
    is seen."""

    kind = "a short key"


def check(path, rows):
    """Checks it."""
    log.info(f"{path}: {rows} rows are read")
    if rows:
        raise UserError(f"{path}: it has {rows} rows. " + allowed(rows) + " Give another one.")
    query = "SELECT id FROM rows ORDER BY id"
    return f"{path} {', '.join(rows) or 'has no rows at all'}"
'''


def test_finds_the_texts_of_a_module(tmp_path: Path) -> None:
    path = tmp_path / "module.py"
    path.write_text(MODULE)

    found = [(message.kind, message.text) for message in messages(path)]

    assert found == [
        ("docstring", "A module."),
        ("docstring", "Settings."),
        ("setting", "How often every batch\nis seen."),
        ("other", "a short key"),
        ("docstring", "Checks it."),
        ("log", "{…}: {…} rows are read"),
        ("error", "{…}: it has {…} rows. {…} Give another one."),
        ("other", "has no rows at all"),
    ]
    assert [message.line for message in messages(path)] == [2, 6, 9, 12, 16, 17, 19, 21]


def test_a_sentence_ends_at_a_stop_and_at_an_empty_line() -> None:
    assert sentences("One fact. Another, of 0.5.\n\nthird") == ["One fact.", "Another, of 0.5.", "third"]


def test_names_the_rules_that_a_text_breaks() -> None:
    assert oddities("The file has no rows. Give another one.") == []
    assert oddities("Files of which one is damaged; a copy mends it") == ["'of which'", "'mends'"]
    assert oddities("A: b; c: d") == ["3 colons and semicolons"]
    assert oddities(" ".join(["word"] * 26)) == ["26 words"]
