from pathlib import Path

import pytest

from raytriever.artifacts.artifact import Artifact, origin, require_same_origin
from raytriever.errors import UserError
from tests.unit.small_run import make_artifact


def collection(folder: Path) -> Artifact:
    return Artifact(make_artifact(folder, "collection", {}, {"made from": str(folder)}, {"x": "1"}, 1))


def derived(folder: Path, inputs: dict[str, str], origins: dict[str, str] | None = None) -> Artifact:
    return Artifact(make_artifact(folder, "any", inputs, {"origins": origins} if origins else {}, {"x": "1"}, 1))


def test_the_origin_is_itself_an_input_or_a_recorded_fact(tmp_path: Path) -> None:
    first = collection(tmp_path / "c")
    assert origin(first, "collection") == first.fingerprint
    assert origin(first, "pairs") is None
    vectors = derived(tmp_path / "v", {"collection": first.fingerprint})
    index = derived(tmp_path / "i", {"index.vectors": vectors.fingerprint}, {"collection": first.fingerprint})
    assert origin(vectors, "collection") == origin(index, "collection") == first.fingerprint
    assert require_same_origin("collection", first, vectors, index) == first.fingerprint


def test_another_or_an_unknown_origin_is_refused(tmp_path: Path) -> None:
    first, second = collection(tmp_path / "c"), collection(tmp_path / "d")
    vectors = derived(tmp_path / "v", {"collection": second.fingerprint})
    with pytest.raises(UserError) as raised:
        require_same_origin("collection", first, vectors)
    for part in (first.uri, vectors.uri, first.fingerprint[:12], second.fingerprint[:12], "one collection"):
        assert part in str(raised.value)
    unknown = derived(tmp_path / "u", {})
    with pytest.raises(UserError, match="against unknown"):
        require_same_origin("collection", first, unknown)
    for artifacts in ([unknown], [unknown, unknown], [unknown, first]):
        with pytest.raises(UserError, match="u doesn't record which collection it comes from"):
            require_same_origin("collection", *artifacts)
