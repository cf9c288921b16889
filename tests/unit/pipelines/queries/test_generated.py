"""What a language model is asked for a passage, and which lines of its answer are queries."""

import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers

from pipelines.queries.documents import Passage, SourceDocument
from pipelines.queries.generated import PROMPT, GenerationSettings, QueryWriter, VllmWriter
from raytriever.errors import UserError
from retrieval.encoders.language_model import load_language_model
from tests.unit.retrieval.encoders.tiny_models import DECODERS, save_tiny_model

PASSAGE = "Lobsters moult when they grow. A lobster sheds its old shell and waits for the new one to harden."
COPY = "its old shell and waits for the new"  # eight words


@pytest.mark.parametrize(("answer", "queries", "dropped"), [
    ("why do lobsters moult\nhow does a shell harden", ["why do lobsters moult", "how does a shell harden"], {}),
    ('1. "Why do lobsters moult?"\n\n2) when is it soft\n', ["Why do lobsters moult?", "when is it soft"], {}),
    ("- lobster shells\n* 3 old shells\n", ["lobster shells", "3 old shells"], {}),
    ("one two\nthree four\nfive six", ["one two", "three four"], {}),  # two were asked for
    ("Old Shell\nold shell!", ["Old Shell"], {"generated lines that repeat another": 1}),
    ("shell", [], {"generated lines too short or too long": 1, "passages that got no query": 1}),
    ("word " * 33, [], {"generated lines too short or too long": 1, "passages that got no query": 1}),
    (f"{COPY.title()}?\nits old shell", ["its old shell"], {"generated lines copied from the passage": 1}),
    (PASSAGE, [], {"generated lines copied from the passage": 1, "passages that got no query": 1}),
    ("\n  \n", [], {"passages that got no query": 1}),
    ("Here are two queries:\n1. old shells\n2. soft lobsters", ["old shells", "soft lobsters"], {}),
    ("24.04 ubuntu release\n10:30 train", ["24.04 ubuntu release", "10:30 train"], {}),
    ("-40 degrees\n**3.5 mm jack**", ["-40 degrees", "3.5 mm jack"], {}),
    ("1: old shells\n• soft lobsters", ["old shells", "soft lobsters"], {}),
    ("Query 1: old shells\nquery 2. soft lobsters", ["old shells", "soft lobsters"], {}),
    ("query language\nquery 10:30", ["query language", "query 10:30"], {}),
    ("<think>\nThey want queries.\n</think>\nold shells", ["old shells"], {}),
    ("<think>\nThey want two queries, and", [], {"passages that got no query": 1}),
    ("They want queries.\n</think>\nold shells", ["old shells"], {}),  # where the template opens the thoughts
    ("tag <think> in html\nold shells", ["tag <think> in html", "old shells"], {}),
    ("ロブスターの殻\n殻は いつ", ["ロブスターの殻", "殻は いつ"], {}),
])  # fmt: skip
def test_the_queries_of_an_answer(answer: str, queries: list[str], dropped: dict[str, int]) -> None:
    counted = Counter[str]()
    assert list(GenerationSettings().queries_in(answer, PASSAGE, counted)) == queries
    assert counted == dropped


def test_a_prompt_holds_the_passage_and_other_braces_stay(tmp_path: Path) -> None:
    source = SourceDocument("a.md", "On {text}", "Before. The passage.", "", (Passage("a.md#1", 8, 20),))
    own = tmp_path / "prompt.txt"
    own.write_text('Answer {"as": "JSON"}, {number} of {title}: {text}')
    settings = GenerationSettings(prompt=str(own), number=3, characters=8)
    found = settings.prompt_for(settings.template(), source, source.passages[0])
    assert found == 'Answer {"as": "JSON"}, 3 of On {text}: The pass'
    assert GenerationSettings().template() == PROMPT


def test_prompts_that_cannot_be_used(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"absent can't be read .*Name a UTF-8 file"):
        GenerationSettings(prompt=str(tmp_path / "absent")).template()
    (tmp_path / "bytes").write_bytes(b"\xff {text}")
    with pytest.raises(UserError, match=r"bytes can't be read"):
        GenerationSettings(prompt=str(tmp_path / "bytes")).template()
    (tmp_path / "none").write_text("Write queries.")
    with pytest.raises(UserError, match=r"none has no \{text\}, where the passage is put"):
        GenerationSettings(prompt=str(tmp_path / "none")).template()


@pytest.mark.parametrize("name", DECODERS)
def test_answers_are_the_most_probable_tokens_whatever_stands_beside(name: str, tmp_path: Path) -> None:
    folder = save_tiny_model(name, tmp_path / "model", language_model=True)
    model, tokenizer = load_language_model(folder)
    model.eval()
    model.generation_config.do_sample = True  # as folders of chat models have it
    prompts = ["a lobster", "the old shell of a lobster grows and grows", "shell"]
    expected = []
    for prompt in prompts:
        ids = tokenizer(prompt)["input_ids"]
        length = len(ids)
        with torch.inference_mode():
            while len(ids) < length + 6 and ids[-1] != model.generation_config.eos_token_id:
                ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
        expected.append(tokenizer.decode(ids[length:], skip_special_tokens=True))
    assert QueryWriter(model, tokenizer, 6).answers(prompts) == expected


def test_a_chat_template_is_put_around_a_prompt(tmp_path: Path) -> None:
    folder = save_tiny_model("llama", tmp_path / "model", language_model=True)
    model, tokenizer = load_language_model(folder)
    model.eval()
    plain = QueryWriter(model, tokenizer, 6).answers(["user: a lobster\nassistant:"])
    tokenizer.chat_template = (
        "{% for message in messages %}{{ bos_token or '' }}{{ message.role }}: {{ message.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant:{% endif %}"
        "{% if enable_thinking is not defined or enable_thinking %} <think>{% endif %}"
    )
    assert QueryWriter(model, tokenizer, 6).answers(["a lobster"]) == plain


def test_a_prompt_longer_than_the_model_reads_is_refused(tmp_path: Path) -> None:
    _, tokenizer = load_language_model(save_tiny_model("smollm2", tmp_path / "model", language_model=True))

    def writer_of(positions: int) -> QueryWriter:
        config = transformers.GPT2Config(vocab_size=400, n_embd=32, n_layer=1, n_head=2, n_positions=positions)
        return QueryWriter(transformers.GPT2LMHeadModel(config), tokenizer, 10)

    assert writer_of(len(tokenizer("shell " * 12)["input_ids"]) + 10).answers(["shell " * 12])
    message = r"tokens and its answer up to 10\. .* positions for 16\. Lower generation\.chara"
    with pytest.raises(UserError, match=message):
        writer_of(16).answers(["shell " * 12])


class MadeUpVllm:
    """Stands for vLLM's LLM: what was asked, and an answer that says how."""

    def __init__(self, model: str, **settings: Any) -> None:
        self.model, self.settings, self.template = model, settings, model.endswith("chat")
        assert settings == {"dtype": "float32", "load_format": "safetensors", "seed": 0}

    def get_default_sampling_params(self) -> SimpleNamespace:
        return SimpleNamespace(temperature=0.7, repetition_penalty=1.1)

    def get_tokenizer(self) -> SimpleNamespace:
        template = "{{ messages }}" if self.template else None
        return SimpleNamespace(chat_template=template, decode=lambda ids, **_: f"to {ids[0]}")

    def generate(self, prompts: list[str], parameters: SimpleNamespace, use_tqdm: bool) -> list[SimpleNamespace]:
        if any(len(prompt) > 99 for prompt in prompts):
            raise RuntimeError("maximum context length is 99")
        if "" in prompts:
            raise RuntimeError("a defect")
        assert vars(parameters) == {"temperature": 0.0, "repetition_penalty": 1.1, "max_tokens": 5}
        assert not use_tqdm
        return [SimpleNamespace(outputs=[SimpleNamespace(token_ids=[prompt])]) for prompt in prompts]

    def chat(
        self, messages: list[Any], parameters: SimpleNamespace, use_tqdm: bool, chat_template_kwargs: dict[str, bool]
    ) -> list[SimpleNamespace]:
        assert chat_template_kwargs == {"enable_thinking": False}
        assert [list(turn) for turns in messages for turn in turns] == [["role", "content"]] * len(messages)
        return self.generate([f"chat {turn['content']}" for (turn,) in messages], parameters, use_tqdm)


def test_vllm_answers_with_the_most_probable_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(LLM=MadeUpVllm))  # type: ignore[arg-type]
    plain, chat = (VllmWriter(Path(name), "float32", 5) for name in ("plain", "chat"))
    assert plain.answers(["a", "b"]) == ["to a", "to b"]
    assert chat.answers(["a", "b"]) == ["to chat a", "to chat b"]
    with pytest.raises(UserError, match=r"vLLM: maximum context length is 99\. Lower generation\.characters"):
        plain.answers(["word " * 99])
    with pytest.raises(RuntimeError, match="a defect"):
        plain.answers([""])


def test_vllm_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)  # type: ignore[arg-type]
    with pytest.raises(
        UserError, match=r"engine is vllm, which can't be imported here .* or set engine to transformers"
    ):
        VllmWriter(Path("plain"), "float32", 5)
