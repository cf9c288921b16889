"""Lines as JSON: one object each, with where it arose, and nothing changed where nobody asks for it."""

import json
import os
import subprocess
import sys
from datetime import datetime, timedelta
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raytriever.cluster.commands import user_errors
from raytriever.errors import UserError
from raytriever.reports.progress import ProgressLine, heard_by, lines_of, log_line, say

ROOT = Path(__file__).parents[4]


@pytest.fixture
def as_json(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAYTRIEVER_LOG", "json")
    monkeypatch.delenv("RAY_JOB_CONFIG_JSON_ENV_VAR", raising=False)


def said(capsys: pytest.CaptureFixture[str]) -> list[dict[str, str]]:
    out, err = capsys.readouterr()
    assert out == ""
    return [json.loads(line) for line in err.splitlines()]


@pytest.mark.usefixtures("as_json")
def test_a_line_is_an_object_with_where_it_arose(capsys: pytest.CaptureFixture[str]) -> None:
    say("before")
    with lines_of(run="tiny", stage="vectors"):
        say("  [bold]two\nlines[/bold] …")
        with lines_of(shard="00003"):
            say("of a shard")
        say("")  # a blank line is for eyes
        say("after it")
    say("at the end")
    lines = said(capsys)
    for line in lines:
        written = datetime.fromisoformat(line.pop("time"))
        assert written.utcoffset() == timedelta(0)
    assert lines == [
        {"message": "before"},
        {"run": "tiny", "stage": "vectors", "message": "[bold]two\nlines[/bold] …"},
        {"run": "tiny", "stage": "vectors", "shard": "00003", "message": "of a shard"},
        {"run": "tiny", "stage": "vectors", "message": "after it"},
        {"message": "at the end"},
    ]


@pytest.mark.usefixtures("as_json")
@given(st.text())
def test_any_message_is_one_line_of_ascii(message: str) -> None:
    line = log_line(message)
    assert line.isascii()
    assert len(line.splitlines()) == 1
    assert json.loads(line)["message"] == message.strip()


@pytest.mark.usefixtures("as_json")
def test_a_submitted_job_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    described = {"runtime_env": {}, "metadata": {"job_submission_id": "quickstart", "job_name": "quickstart"}}
    monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", json.dumps(described))
    say("in a job")
    monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", "{}")
    say("in a job without a name")
    assert [line.get("job") for line in said(capsys)] == ["quickstart", None]


@pytest.mark.usefixtures("as_json")
def test_where_it_arose_is_forgotten_after_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UserError), lines_of(stage="vectors"):
        raise UserError("refused")
    say("next")
    assert "stage" not in said(capsys)[0]


@pytest.mark.usefixtures("as_json")
def test_a_users_mistake_says_where_it_arose(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit), user_errors(False), lines_of(run="tuesday"), lines_of(stage="model"):
        raise UserError("no such batch")
    (line,) = said(capsys)
    assert (line["run"], line["stage"], line["message"]) == ("tuesday", "model", "raytriever: no such batch")


@pytest.mark.usefixtures("as_json")
def test_a_users_mistake_is_an_object_too(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended, user_errors(False):
        raise UserError("no such file")
    assert ended.value.code == 2
    assert [line["message"] for line in said(capsys)] == ["raytriever: no such file"]


@pytest.mark.usefixtures("as_json")
def test_a_terminal_gets_no_bar_and_a_listener_the_plain_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    assert ProgressLine("embed", 10, "texts")._live is None
    heard: list[str] = []
    with heard_by(heard.append):
        say("  as it is")
    assert heard == ["  as it is"]


@pytest.mark.parametrize("form", ["", "text"])
def test_text_is_what_it_is(form: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("RAYTRIEVER_LOG", form)
    with lines_of(stage="vectors"):
        say("  vectors: …\n")
        say("")
    assert capsys.readouterr() == ("", "  vectors: …\n\n\n")


def test_another_form_is_refused() -> None:
    command = [sys.executable, "-m", "raytriever", "--help"]
    environment = os.environ | {"RAYTRIEVER_LOG": "jsonl"}
    refused = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment)
    assert refused.returncode == 2
    assert refused.stderr.strip() == (
        "raytriever: RAYTRIEVER_LOG is 'jsonl'. It may be json (each line is a JSON object) or text, the default."
    )
