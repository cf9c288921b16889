"""What a job refuses of a model before it loads any weights."""

import shutil
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from raytriever.errors import UserError
from retrieval.jobs.embed import Embed, EmbedConfig
from tests.unit.retrieval.encoders.test_adapter import save_adapter
from tests.unit.retrieval.encoders.tiny_models import POSITIONS, edited, tiny_model


def without_tokenizer(folder: Path) -> None:
    for file in folder.glob("tokenizer*"):
        file.unlink()


def meaningless(folder: Path) -> None:
    edited(folder / "config.json", lambda config: config.update(hidden_size="many"))  # whoever loads it says so


def check(model: Path, said: str | None, **encoder: Any) -> Embed:
    for weights in model.glob("*.safetensors"):
        weights.write_bytes(b"")  # none are read
    encoder = {"model": str(model), "dtype": "float32"} | encoder
    stage = Embed(EmbedConfig.model_validate({"collection": "absent", "encoder": encoder, "output": "absent"}))
    with nullcontext() if said is None else pytest.raises(UserError, match=said):
        stage.check_inputs({f"encoder.{key}" for key in ("model", "tokenizer") if key in encoder})
    return stage


TOO_LONG = f"max_length is {POSITIONS + 1}, .* {POSITIONS} tokens"


@pytest.mark.parametrize(("name", "damage", "encoder", "said"), [
    ("bert", without_tokenizer, {}, "model holds no tokenizer"),
    ("roberta", None, {"max_length": POSITIONS + 1}, TOO_LONG),
    ("qwen2", None, {"max_length": POSITIONS + 1}, TOO_LONG),
    ("bert", meaningless, {"max_length": POSITIONS}, None),
    ("t5", None, {"max_length": 1000}, None),
    ("roberta", None, {"max_length": POSITIONS}, None),
])  # fmt: skip
def test_an_encoder(tmp_path, name, damage, encoder, said):
    folder = Path(shutil.copytree(tiny_model(name), tmp_path / "model"))
    if damage:
        damage(folder)
    check(folder, said, **encoder)


def test_an_encoder_with_the_tokenizer_of_another(tmp_path: Path) -> None:
    folder, other = (Path(shutil.copytree(tiny_model("bert"), tmp_path / name)) for name in ("model", "other"))
    without_tokenizer(folder)
    stage = check(folder, None, tokenizer=str(other))
    stage.check_inputs({"encoder.model"})  # the tokenizer is of a stage that has not run: nothing is looked at
    without_tokenizer(other)
    check(folder, "other holds no tokenizer", tokenizer=str(other))


def test_the_base_of_an_adapter(tmp_path: Path) -> None:
    base = Path(shutil.copytree(tiny_model("qwen2"), tmp_path / "base"))
    adapter = save_adapter(base, tmp_path / "adapter")
    check(adapter, TOO_LONG, max_length=POSITIONS + 1)
    check(adapter, None, max_length=POSITIONS)
    without_tokenizer(base)
    check(adapter, "base holds no tokenizer")
