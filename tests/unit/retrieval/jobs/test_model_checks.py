"""What a job refuses of a model before it loads any weights."""

from pathlib import Path
from typing import Any

import pytest

from raytriever.errors import UserError
from retrieval.jobs.embed import Embed, EmbedConfig
from tests.unit.retrieval.encoders.test_adapter import save_adapter
from tests.unit.retrieval.encoders.tiny_models import POSITIONS, edited, save_tiny_model


def without_tokenizer(folder: Path) -> None:
    for file in folder.glob("tokenizer*"):
        file.unlink()


@pytest.mark.parametrize(("name", "damage", "encoder", "said"), [
    ("bert", without_tokenizer, {}, "model holds no tokenizer"),
    ("roberta", None, {"max_length": POSITIONS + 1}, f"max_length is {POSITIONS + 1}, .* {POSITIONS} tokens"),
    ("qwen2", None, {"max_length": POSITIONS + 1}, f"max_length is {POSITIONS + 1}, .* {POSITIONS} tokens"),
    ("bert", lambda folder: edited(folder / "config.json", _meaningless), {"max_length": POSITIONS}, None),
    ("t5", None, {"max_length": 1000}, None),
    ("roberta", None, {"max_length": POSITIONS}, None),
])  # fmt: skip
def test_an_encoder(tmp_path, name, damage, encoder, said):
    folder = save_tiny_model(name, tmp_path / "model")
    if damage:
        damage(folder)
    check(folder, said, **encoder)


def test_an_encoder_with_the_tokenizer_of_another(tmp_path: Path) -> None:
    folder, other = (save_tiny_model("bert", tmp_path / name) for name in ("model", "other"))
    without_tokenizer(folder)
    stage = check(folder, None, tokenizer=str(other))
    stage.check_inputs({"encoder.model"})  # the tokenizer is of a stage that has not run: nothing is looked at
    without_tokenizer(other)
    check(folder, "other holds no tokenizer", tokenizer=str(other))


def test_the_base_of_an_adapter(tmp_path: Path) -> None:
    base = save_tiny_model("qwen2", tmp_path / "base")
    adapter = save_adapter(base, tmp_path / "adapter")
    check(adapter, f"max_length is {POSITIONS + 1}, .* {POSITIONS} tokens", max_length=POSITIONS + 1)
    check(adapter, None, max_length=POSITIONS)
    without_tokenizer(base)
    check(adapter, "base holds no tokenizer")


def _meaningless(config: dict[str, Any]) -> None:
    config["hidden_size"] = "many"  # whoever loads it says so


def check(model: Path, said: str | None, **encoder: Any) -> Embed:
    for weights in model.glob("*.safetensors"):
        weights.write_bytes(b"")  # none are read
    values = {
        "collection": "absent",
        "encoder": {"model": str(model), "dtype": "float32"} | encoder,
        "output": "absent",
    }
    stage = Embed(EmbedConfig.model_validate(values))
    there = {"encoder.model", *(["encoder.tokenizer"] if "tokenizer" in encoder else [])}
    if said is None:
        stage.check_inputs(there)
    else:
        with pytest.raises(UserError, match=said):
            stage.check_inputs(there)
    return stage
