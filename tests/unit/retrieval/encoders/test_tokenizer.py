"""The end-of-sequence token and the length limit: what the settings, the folder and the model say, and who wins."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from raytriever.errors import UserError
from retrieval.encoders.specification import EncoderSettings
from retrieval.encoders.towers import load_towers
from tests.unit.retrieval.encoders.tiny_models import (
    ARCHITECTURES,
    POSITIONS,
    SENTENCES,
    assert_sentence_transformers_agrees,
    edited,
    load_tiny,
    save_sentence_transformer,
    tiny_model,
)

LONG = " ".join(SENTENCES)
EOS = {"qwen2": 0, "llama": 2, "t5": 1, "roberta": 2, "bert": -1}


def changed(name: str, folder: Path, file: str, change: Callable[[dict[str, Any]], Any]) -> Path:
    """A copy of the tiny model whose JSON file ``file`` is another one."""
    shutil.copytree(tiny_model(name), folder)
    return edited(folder / file, change)


def without_length(name: str, folder: Path) -> Path:
    return changed(name, folder, "tokenizer_config.json", lambda config: config.pop("model_max_length"))


def ends(folder: Path, **settings: Any) -> tuple[bool, list[int], list[int]]:
    """What the contract says of an end-of-sequence token, then the last ids of a short text and of one that is cut."""
    encoder = load_tiny(folder, **settings)
    short, long = encoder.tokenize_ids(["the sea", LONG], "document", max_length=12)
    assert len(long) == 12
    return encoder.contract.append_eos, short[-2:], long[-1:]


@pytest.mark.parametrize("name", ["llama", "qwen2"])
@pytest.mark.parametrize("append_eos", [True, "auto"])
def test_a_decoder_reads_its_last_token_behind_an_eos_token(name: str, append_eos: bool | str) -> None:
    eos, settings = EOS[name], {"pooling": "last_token", "append_eos": append_eos}
    bare = load_tiny(tiny_model(name), pooling="last_token", append_eos=False).tokenize_ids(["the sea"], "document")[0]
    assert bare[0] == (1 if name == "llama" else bare[0])  # Llama's own beginning of a text
    assert bare[-1] != eos
    assert ends(tiny_model(name), **settings) == (True, [bare[-1], eos], [eos])
    assert load_tiny(tiny_model(name), **settings).tokenize_ids(["the sea"], "document") == [[*bare, eos]]


@pytest.mark.parametrize(("name", "settings", "expected"), [
    ("qwen2", {"pooling": "mean"}, False),
    ("qwen2", {"pooling": "mean", "append_eos": True}, True),
    ("llama", {"pooling": "mean", "append_eos": True}, True),
    ("t5", {"pooling": "mean"}, True),  # its tokenizer does it
    ("t5", {"pooling": "last_token", "append_eos": True}, True),
    ("roberta", {"pooling": "cls"}, True),
    ("bert", {"pooling": "last_token"}, False),  # a [SEP] ends its texts already
])  # fmt: skip
def test_an_eos_token_is_appended_once_and_only_where_it_is_due(name, settings, expected) -> None:
    appended, short, long = ends(tiny_model(name), **settings)
    eos = EOS[name]
    assert (appended, short[-1] == eos, long == [eos], short[-2] == eos) == (expected, expected, expected, False)


def test_a_folder_of_sentence_transformers_is_believed(tmp_path: Path) -> None:
    folder = save_sentence_transformer(tiny_model("qwen2"), tmp_path / "model", "lasttoken")
    assert ends(folder)[0] is False
    assert ends(folder, append_eos=True)[::2] == (True, [0])


@pytest.mark.parametrize("template", ["<s> $A", "$A"])
@pytest.mark.parametrize("plain", [True, False])
def test_special_tokens_that_the_folder_asks_for_are_added(
    tmp_path: Path, logged: list[str], template: str, plain: bool
) -> None:
    """e5-mistral's tokenizer_config.json asks for both; its tokenizer.json adds one of them, transformers 5 no more."""
    other = {"post_processor": None} if template == "$A" else {}  # without it nothing is put around a text
    folder = changed("llama", tmp_path / "base", "tokenizer.json", lambda tokenizer: tokenizer.update(other))
    if not plain:
        folder = save_sentence_transformer(folder, tmp_path / "model", "lasttoken")
    asked = {"add_bos_token": True, "add_eos_token": True}
    edited(folder / "tokenizer_config.json", lambda config: config.update(asked))
    settings = {"pooling": "last_token"} if plain else {}
    assert ends(folder, **settings)[::2] == (True, [2])
    encoder = load_tiny(folder, **settings)
    bare = encoder.tokenizer("the sea", add_special_tokens=False)["input_ids"]
    assert encoder.tokenize_ids(["the sea"], "query") == [[1, *bare, 2]]
    assert sum("add_eos_token" in line for line in logged) == 1  # however often it is loaded
    assert sum("add_bos_token" in line for line in logged) == (template == "$A")
    encoder.save(tmp_path / "exported")
    assert_sentence_transformers_agrees(tmp_path / "exported", folder, **settings)
    assert load_tiny(tmp_path / "exported").tokenize_ids(["the sea"], "query") == [[1, *bare, 2]]
    assert ends(folder, append_eos=False, **settings)[0] is False


def disagreeing(name: str, folder: Path, files: dict[str, dict[str, Any]], **settings: Any) -> Path:
    """A sentence-transformers folder in whose JSON ``files`` the given values stand."""
    save_sentence_transformer(tiny_model(name), folder, **settings)
    for file, values in files.items():
        path = folder / file
        path.write_text(json.dumps((json.loads(path.read_text()) if path.exists() else {}) | values))
    return folder


CASED = {"type": "BertNormalizer", "clean_text": True, "handle_chinese_chars": True, "strip_accents": None}


@pytest.mark.parametrize(("name", "files", "said"), [
    ("llama", {"tokenizer_config.json": {"model_max_length": 9}, "sentence_bert_config.json": {"max_seq_length": 20}},
     r"cut at 20 tokens. max_seq_length is 20, but .* was made for 9"),
    ("llama", {"config.json": {"max_position_embeddings": 12}, "sentence_bert_config.json": {"max_seq_length": 20}},
     r"cut at 20 tokens. max_seq_length is 20, but .* was made for 12"),
    ("bert", {"tokenizer_config.json": {"tokenizer_class": "BertTokenizer", "do_lower_case": True},
              "tokenizer.json": {"normalizer": CASED | {"lowercase": False}}},
     r"tokenizer.json makes other tokens of .* than BertTokenizer"),
    ("bert", {"1_Pooling/config.json": {"pooling_mode": "max", "pooling_mode_cls_token": True}},
     r"pooling_mode 'max' counts, not the older \['cls'\]"),
    ("bert", {"config_sentence_transformers.json": {"prompts": {"task": "T "}, "default_prompt_name": "task"}},
     r"default_prompt_name is 'task', but queries and documents have their own prompts"),
])  # fmt: skip
def test_a_folder_that_contradicts_itself_is_read_as_elsewhere_and_told(
    tmp_path: Path, logged: list[str], name: str, files: dict[str, dict[str, Any]], said: str
) -> None:
    folder = disagreeing(name, tmp_path / "model", files)
    assert_sentence_transformers_agrees(folder)
    (line,) = logged
    assert str(folder) in line
    assert re.search(said, line)
    load_tiny(folder).save(tmp_path / "exported")
    logged.clear()
    assert_sentence_transformers_agrees(tmp_path / "exported", folder)
    assert not logged  # an export says everything once


def test_a_length_that_tokenizer_and_model_just_take_is_no_contradiction(tmp_path: Path, logged: list[str]) -> None:
    files = {
        "tokenizer_config.json": {"model_max_length": 20},
        "config.json": {"max_position_embeddings": 20},
        "sentence_bert_config.json": {"max_seq_length": 20},
    }
    assert load_tiny(disagreeing("llama", tmp_path / "model", files)).contract.max_length == 20
    assert not logged


def test_learned_positions_end_texts_and_the_front_is_kept(tmp_path: Path, logged: list[str]) -> None:
    files = {
        "tokenizer_config.json": {"truncation_side": "left"},
        "sentence_bert_config.json": {"max_seq_length": POSITIONS + 2},
    }
    encoder = load_tiny(disagreeing("roberta", tmp_path / "model", files))
    assert encoder.contract.max_length == POSITIONS
    long, short = encoder.tokenize_ids([LONG, LONG[:20]], "document")
    assert long[:5] == short[:5]
    assert any("cut at 48 tokens. max_seq_length is 50" in line for line in logged)
    assert any("truncation_side" in line for line in logged)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_folder_that_agrees_with_itself_says_nothing(name: str, logged: list[str]) -> None:
    load_tiny(tiny_model(name), pooling="mean")
    assert not logged


@pytest.mark.parametrize(("name", "settings", "message"), [
    ("t5", {"pooling": "mean", "append_eos": False}, r"append_eos is false, but the .* ends every text in '</s>'"),
    ("bert", {"pooling": "last_token", "append_eos": True}, "has no end-of-sequence token to append"),
    ("qwen2", {"pooling": "mean", "max_length": 96}, "max_length is 96, over the limit of the encoder, 48"),
    ("t5", {"pooling": "cls"}, r"puts no special token before a text.* Set pooling to last_token or mean"),
    ("llama", {"pooling": "cls"}, r"is cls, .*Model is causal, so .* Set pooling to last_token or mean"),
])  # fmt: skip
def test_what_a_tokenizer_cannot_do_is_refused(name: str, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        load_tiny(tiny_model(name), **settings)


@pytest.mark.parametrize("name", ["roberta", "mpnet"])
def test_roberta_has_fewer_positions_than_its_table(tmp_path: Path, name: str) -> None:
    """Positions start behind ``padding_idx``; where nothing else says so, sentence-transformers runs over the end."""
    folder = without_length(name, tmp_path / name)
    assert ARCHITECTURES[name].settings["max_position_embeddings"] == POSITIONS + 2
    encoder = load_tiny(folder, pooling="mean")
    assert encoder.contract.max_length == POSITIONS
    encoder(encoder.tokenize([LONG], "query"))
    for wrong in (POSITIONS + 1, POSITIONS + 2):
        with pytest.raises(UserError, match=f"is {wrong}, over the limit of the encoder, {POSITIONS} tokens"):
            load_tiny(folder, pooling="mean", max_length=wrong)
    stated = save_sentence_transformer(folder, tmp_path / "model", max_seq_length=POSITIONS + 2)
    assert load_tiny(stated).contract.max_length == POSITIONS


def test_lengths_that_a_folder_sets_and_does_not(tmp_path: Path) -> None:
    folder = save_sentence_transformer(tiny_model("qwen2"), tmp_path / "model")
    assert load_tiny(folder).contract.max_length == POSITIONS
    edited(folder / "sentence_bert_config.json", lambda config: config.update(max_seq_length=2 * POSITIONS))
    assert load_tiny(folder).contract.max_length == 2 * POSITIONS
    assert_sentence_transformers_agrees(folder)
    folder = save_sentence_transformer(tiny_model("bert"), tmp_path / "short")
    edited(folder / "sentence_bert_config.json", lambda config: config.update(max_seq_length=2))
    with pytest.raises(UserError, match="the length that the encoder's folder cuts texts at is 2"):
        load_tiny(folder)
    assert load_tiny(folder, max_length=9).contract.max_length == 9
    one = save_sentence_transformer(tiny_model("bert"), tmp_path / "one", query_length=9, document_length=9)
    assert load_tiny(one).contract.max_length == 9
    two = save_sentence_transformer(tiny_model("bert"), tmp_path / "two", query_length=9, document_length=30)
    with pytest.raises(UserError, match=r"queries and documents at different lengths \(\[9, 30\] tokens\)"):
        load_tiny(two)
    assert load_tiny(two, max_length=30).contract.max_length == 30
    folder = without_length("t5", tmp_path / "t5")
    assert load_tiny(folder, pooling="mean").contract.max_length == 512
    assert load_tiny(folder, pooling="mean", max_length=1000).contract.max_length == 1000


@pytest.mark.parametrize("name", ["llama", "smollm2", "qwen2"])
def test_the_first_token_of_a_causal_model_stands_for_nothing(tmp_path: Path, name: str) -> None:
    """Llama's tokenizer puts a special token first: its state is the same for all texts."""
    stated = save_sentence_transformer(tiny_model(name), tmp_path / "model", "cls")
    with pytest.raises(UserError, match="is causal"):
        load_tiny(stated)
    assert load_tiny(stated, pooling="mean").contract.pooling == "mean"


def knows_no_letter(tokenizer: dict[str, Any]) -> None:
    """Every text is the unknown token, which is a special one that stands for a word."""
    vocabulary = {"[PAD]": 0, "[UNK]": 1}
    tokenizer.update(model={"type": "WordLevel", "vocab": vocabulary, "unk_token": "[UNK]"}, post_processor=None)


def test_without_a_special_token_before_a_text_there_is_no_pooling_of_it(tmp_path: Path) -> None:
    bare = changed("bert", tmp_path / "bert", "tokenizer.json", lambda tokenizer: tokenizer.update(post_processor=None))
    unknown = changed("bert", tmp_path / "unknown", "tokenizer.json", knows_no_letter)
    message = r"puts no special token before a text.* Set pooling to last_token or mean"
    for folder in (bare, unknown):
        with pytest.raises(UserError, match=message):
            load_tiny(folder, pooling="cls")
        assert load_tiny(folder, pooling="mean").contract.pooling == "mean"
    for form in ({"kind": "all_tokens"}, {"kind": "first_tokens", "tokens": 2}):  # which need that token too
        settings = EncoderSettings.model_validate({"model": str(bare), "pooling": "cls", "form": form})
        with pytest.raises(UserError, match="puts no special token before a text"):
            load_towers(settings, bare, "")


@pytest.mark.parametrize(("name", "settings", "special"), [
    ("bert", {"pooling": "cls"}, 2),
    ("t5", {"pooling": "mean"}, 1),
    ("llama", {"pooling": "mean"}, 1),
    ("llama", {"pooling": "last_token"}, 2),  # with the end-of-sequence token that is appended
    ("qwen2", {"pooling": "mean"}, 0),
])  # fmt: skip
def test_some_of_a_text_is_left_where_it_is_cut(name: str, settings: dict[str, Any], special: int) -> None:
    for wanted in range(1, special + 1):
        with pytest.raises(
            UserError, match=rf"max_length is {wanted}, .* special tokens take {special}, .* to {special + 1} or"
        ):
            load_tiny(tiny_model(name), max_length=wanted, **settings)
    shortest = load_tiny(tiny_model(name), max_length=special + 1, **settings)
    assert [len(ids) for ids in shortest.tokenize_ids([LONG, "x"], "document")] == [special + 1] * 2
    encoder = load_tiny(tiny_model(name), **settings)
    for wanted in range(special + 1):  # below what the tokenizer adds, it would cut nothing at all
        with pytest.raises(UserError, match=f"that a query is cut at is {wanted}, .* Set it to {special + 1} or more"):
            encoder.tokenize_ids([LONG], "query", wanted)
    encoder.require_length(special + 1, "objective.query_max_length")
    for wrong in (special, POSITIONS + 1):
        with pytest.raises(UserError, match=f"objective.query_max_length is {wrong}, but"):
            encoder.require_length(wrong, "objective.query_max_length")


def test_some_of_a_text_is_left_behind_its_prompt() -> None:
    folder = tiny_model("bert")
    taken = len(load_tiny(folder, pooling="mean").tokenize_ids(["find what answers: "], "document")[0])
    how: dict[str, Any] = {"pooling": "mean", "query_prompt": "find what answers: "}
    with pytest.raises(UserError, match=rf"max_length is {taken}, .* the prompt take {taken}, .* to {taken + 1} or"):
        load_tiny(folder, max_length=taken, **how)
    encoder = load_tiny(folder, max_length=taken + 1, **how)
    assert len({*map(tuple, encoder.tokenize_ids(["x", "y"], "query"))}) == 2
    encoder = load_tiny(folder, **how)
    encoder.require_length(taken, "objective.document_max_length")
    with pytest.raises(UserError, match=f"objective.query_max_length is {taken}, .* and the prompt take {taken}"):
        encoder.require_length(taken, "objective.query_max_length")


@pytest.mark.parametrize("wanted", [0, -1])
def test_no_text_has_fewer_tokens_than_one(wanted: int) -> None:
    with pytest.raises(ValidationError, match="max_length"):
        EncoderSettings(model="any", max_length=wanted)
