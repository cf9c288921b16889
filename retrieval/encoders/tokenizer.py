"""Loading an encoder's tokenizer: right padding, its special tokens around a text, a length limit."""

from pathlib import Path
from typing import Any, Literal

from torch import nn

from raytriever.errors import UserError
from retrieval.encoders.structure import is_causal, position_limit
from retrieval.encoders.transformer import first_line

_FILES = ("tokenizer.json", "vocab.txt", "spiece.model", "sentencepiece.bpe.model", "vocab.json", "tokenizer.model")
_LENGTH_WITHOUT_LIMIT = 512  # for models and tokenizers that state none


def has_tokenizer(folder: Path) -> bool:
    """Whether the folder holds a tokenizer's files."""
    return any((folder / name).exists() for name in _FILES)


def load_tokenizer(path: Path, trust_remote_code: bool, lower_case: bool) -> Any:
    """The fast tokenizer at ``path``, padding on the right with the end-of-sequence token where it has no other.

    ``lower_case``: a setting of older sentence-transformers folders, on top of the tokenizer's own.
    """
    from tokenizers.normalizers import Lowercase, Sequence
    from transformers import AutoTokenizer

    if not has_tokenizer(path):
        raise UserError(
            f"{path} holds no tokenizer (none of {', '.join(_FILES)}). Save the tokenizer beside the weights:"
            " tokenizer.save_pretrained(folder)."
        )
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, use_fast=True, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, ImportError) as error:
        raise UserError(f"The tokenizer in {path} can't be loaded: {first_line(error)}") from error
    tokenizer.padding_side = "right"
    tokenizer.truncation_side = "right"
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token  # masked, so any token will do; most decoders have no other
    if lower_case:
        backend = tokenizer.backend_tokenizer
        backend.normalizer = Sequence([Lowercase(), *([backend.normalizer] if backend.normalizer else [])])
    return tokenizer


def settle_eos(tokenizer: Any, wanted: bool | Literal["auto"], last_token_unsaid: bool, path: Path) -> bool:
    """Whether every text ends in the end-of-sequence token, after making it so where it is ``wanted``.

    'auto': made so where the last token is pooled without the folder saying how (``last_token_unsaid``) and the
    tokenizer ends texts in no special token. The token becomes part of the tokenizer itself, so truncation keeps room
    for it and an export carries it. Raises ``UserError`` where there is no such token, or no way to leave it out.
    """
    eos, last = tokenizer.eos_token, tokenizer("a")["input_ids"][-1:]
    present = eos is not None and last == [tokenizer.eos_token_id]
    if wanted is False and present:
        raise UserError(f"append_eos is false, but the tokenizer in {path} itself ends every text in {eos!r}.")
    if wanted == "auto":
        wanted = last_token_unsaid and not set(last) <= set(tokenizer.all_special_ids)
    if present or not wanted:
        return present
    if eos is None:
        raise UserError(
            f"The tokenizer in {path} has no end-of-sequence token to append. Set the encoder's append_eos to false to"
            " pool the text's own last token."
        )
    _append(tokenizer, tokenizer.eos_token_id)
    return True


def _append(tokenizer: Any, token: int) -> None:
    """Puts ``token`` behind what the tokenizer puts around every text."""
    from tokenizers.processors import TemplateProcessing

    text = tokenizer("a", add_special_tokens=False)["input_ids"]
    around = tokenizer("a")["input_ids"]
    start = next(place for place in range(len(around)) if around[place : place + len(text)] == text)
    special = [*around[:start], *around[start + len(text) :], token]
    names = dict(zip(special, tokenizer.convert_ids_to_tokens(special), strict=True))
    template = [names[each] for each in special]
    template.insert(start, "$A")
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=template, special_tokens=sorted((name, number) for number, name in names.items())
    )


def require_first_token(tokenizer: Any, transformer: nn.Module, path: Path) -> None:
    """Raises ``UserError`` where the first token's state, which pooling cls takes, can't stand for a whole text.

    It can where that token is a special one, the same in every text, and reads what follows. In a causal model it reads
    itself alone: texts that begin alike, with a prompt for instance, would all have one vector.
    """
    bare, whole = (tokenizer("a", add_special_tokens=special)["input_ids"][:1] for special in (False, True))
    if is_causal(transformer):
        problem = f"{type(transformer).__name__} is causal: its first token reads nothing of what is behind it"
    elif bare == whole:
        problem = "its tokenizer puts no special token before a text, so this is the state of the first word"
    else:
        return
    raise UserError(
        f"The pooling of the encoder in {path} is cls, the state of the first token, but {problem}. Set pooling to"
        " last_token or mean."
    )


def require_room_for_text(max_length: int, tokenizer: Any, setting: str) -> None:
    """Raises ``UserError`` where ``setting`` cuts texts to so few tokens that special ones alone would be left."""
    special = int(tokenizer.num_special_tokens_to_add())
    if max_length <= special:
        raise UserError(
            f"{setting} is {max_length}, but the tokenizer puts {special} special tokens around a text, so nothing of"
            f" it would be read. Set it to {special + 1} or more."
        )


def settle_length(wanted: int | None, stated: frozenset[int], transformer: nn.Module, tokenizer: Any) -> int:
    """Tokens of the longest text: as ``wanted``, as the folder ``stated``, or what tokenizer and model were made for.

    Never more than have a learned position. Raises ``UserError`` where more are wanted than the model can take, for so
    few that nothing of a text is left, and for several lengths in the folder.
    """
    positions, config = position_limit(transformer), getattr(transformer, "config", None)
    trained = positions or getattr(config, "max_position_embeddings", None)
    if wanted is not None:
        if trained is not None and wanted > trained:
            raise UserError(f"max_length {wanted} is over the encoder's limit of {trained} tokens.")
        require_room_for_text(wanted, tokenizer, "max_length")
        return wanted
    if len(stated) > 1:
        raise UserError(
            f"The encoder's folder cuts queries and documents at different lengths ({sorted(stated)} tokens); one limit"
            " for both is supported: set the encoder's max_length."
        )
    known = stated or {n for n in (int(tokenizer.model_max_length), trained) if n and n < 10**6}
    length = min(known, default=_LENGTH_WITHOUT_LIMIT)
    length = length if positions is None else min(length, positions)
    require_room_for_text(length, tokenizer, "the length that the encoder's folder cuts texts at")
    return length
