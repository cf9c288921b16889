"""Every setting of an encoder changes its vectors or is refused, but for those listed with the reason."""

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from pydantic import ValidationError

from raytriever.errors import UserError
from retrieval.embedding import encode_texts
from retrieval.encoders.specification import ROLES, EncoderSettings
from tests.unit.retrieval.encoders.tiny_models import TEXTS, load_tiny, save_sentence_transformer, tiny_model
from tests.unit.test_every_setting import OTHERS, changes

UNCHANGED = {
    "dtype": "weights are cast where the encoder is placed: test_transformer.py",
    "revision": "of a name at the hub",
    "trust_remote_code": "of a model with code of its own: test_pretrained.py",
    "prompts": "names one more prompt, which no role has",
}
VALUES = {"max_length": 6, "truncate_dim": 5, "prompts": {"title": "A title: "}}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[EncoderSettings]:
    """An encoder with a pooler and layers behind the pooling, and a decoder whose texts end in a token."""
    from sentence_transformers.sentence_transformer.modules import Normalize

    bert, folder = tiny_model("bert"), tmp_path_factory.mktemp("normalized")
    normalized = save_sentence_transformer(bert, folder, extra=[Normalize()])
    return [
        EncoderSettings(model=str(bert), pooling="cls", dtype="float32"),
        EncoderSettings(model=str(normalized), dtype="float32"),
        EncoderSettings(model=str(tiny_model("llama")), pooling="last_token", dtype="float32"),
    ]


def vectors(settings: EncoderSettings) -> NDArray[np.float32] | None:
    """Of all texts in both roles, None where the settings are refused."""
    try:
        encoder = load_tiny(Path(settings.model), **settings.model_dump(exclude={"model"}))
        return np.concatenate([encode_texts(encoder, TEXTS, role).reshape(len(TEXTS), -1) for role in ROLES], axis=1)
    except (UserError, ValidationError):
        return None


def test_every_setting_changes_vectors(models: list[EncoderSettings], monkeypatch: pytest.MonkeyPatch) -> None:
    for setting, value in VALUES.items():
        monkeypatch.setitem(OTHERS, setting, value)
    unchanged, changing = set[str](), set[str]()
    for base in models:
        for key, before, after in changes(base):
            one, other = vectors(before), vectors(after)
            if key in changing or one is None or other is None:
                continue
            same = one.shape == other.shape and np.abs(one - other).max() < 1e-5
            (unchanged if same else changing).add(key)
    assert unchanged - changing == UNCHANGED.keys()
