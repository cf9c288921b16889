"""A model artifact is what its manifest lists: nothing else in its folder is loaded, and nothing that has changed."""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from raytriever.artifacts.artifact import Derivation, ShardWriter
from raytriever.artifacts.writer import ArtifactWriter
from raytriever.errors import UserError
from retrieval.encoders.pretrained import locate_model


@pytest.fixture
def model(tiny_encoder: Path, tmp_path: Path) -> Path:
    """A tiny encoder as `train` stores one."""
    writer = ArtifactWriter(str(tmp_path / "model"), Derivation("model", "train", 1, {}, {}))
    with writer.making(), writer.folder.scratch() as scratch:
        shard = ShardWriter(writer.folder, "run", scratch, writer.derivation.digest)
        for path in sorted(path for path in tiny_encoder.rglob("*") if path.is_file()):
            name = str(path.relative_to(tiny_encoder))
            shard.path(name).write_bytes(path.read_bytes())
            shard.add(name)
        writer.finish([shard.commit(1)], {}, {})
    return tmp_path / "model"


def test_weights_saved_over_it_are_noticed(model: Path) -> None:
    assert len(locate_model(str(model)).fingerprint) == 64
    (weights,) = model.rglob("model.safetensors")
    tensors = {name: tensor + torch.ones_like(tensor) for name, tensor in load_file(weights).items()}
    save_file(tensors, weights, {"format": "pt"})
    with pytest.raises(UserError, match=r"model\.safetensors is damaged"):
        locate_model(str(model))


@pytest.mark.parametrize("name", ["adapter_config.json", "1_Dense/config.json", "deep/er/model.safetensors", "code.py"])
def test_a_file_that_is_laid_beside_it_is_refused(model: Path, name: str) -> None:
    (model / name).parent.mkdir(parents=True, exist_ok=True)
    (model / name).write_text("{}")
    with pytest.raises(UserError, match=f"{name} isn't listed in the model artifact's manifest.json"):
        locate_model(str(model))


def test_files_at_any_depth_are_in_the_fingerprint_of_a_plain_folder(tiny_encoder: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny_encoder, tmp_path / "plain"))
    before = locate_model(str(folder)).fingerprint
    assert before == locate_model(str(tiny_encoder)).fingerprint
    (folder / "a" / "b" / "c").mkdir(parents=True)
    (folder / "a" / "b" / "c" / "model.safetensors").write_bytes(b"x")
    assert locate_model(str(folder)).fingerprint != before
