"""The transformer of an encoder and its tokenizer: any Hugging Face encoder or decoder, from safetensors alone.

And what training may do to its blocks: compute their activations again in the backward pass, or compile them.
"""

import functools
import re
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import Any, Literal

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from torch import nn
from torch.utils.checkpoint import checkpoint

from raytriever.errors import UserError, first_line
from retrieval.encoders.modules import read_json, require_safetensors, require_tokenizer, warn_once
from retrieval.encoders.specification import EncoderSettings, require_positions
from retrieval.encoders.structure import (
    has_own_code,
    is_bidirectional_decoder,
    is_causal,
    position_limit,
    transformer_blocks,
)

# what transformers raises for configurations that ask for the impossible, beside what it means to raise
_MEANINGLESS = (LookupError, TypeError, ArithmeticError, AttributeError, StrictDataclassError)
_UNREADABLE = (OSError, ValueError, RuntimeError, ImportError, *_MEANINGLESS)
_ANY_TEXT = "UPPER and lower,  naïve 漢字\n\tdef f(a_b): 12"
_LENGTH_WITHOUT_LIMIT = 512  # for models and tokenizers that state none
_ADDED = "{}: texts {} {} as tokenizer_config.json asks ({}), though tokenizer.json doesn't put it there."
# what transformers doesn't know of published weights' names: pattern and replacement, by family
_OTHER_NAMES = {"nomic_bert": {r"^bert\.": ""}}  # the pretrained model's class held the encoder under this name

OUTLINED = ContextVar[torch.device | None]("OUTLINED", default=None)
"""Where set, models are made on this device from their configurations alone: for estimates, which have no weights."""


def load_transformer(path: Path, trust_remote_code: bool, dropout: float | None) -> nn.Module:
    """The model at ``path`` in float32, without a head; of T5 the encoder; no cache of keys and values.

    ``dropout``: the probability of every dropout, None: as the configuration says. Raises ``UserError``.
    """
    from transformers import AutoModel, T5EncoderModel

    def loader(config: Any) -> Any:
        config.use_cache = False  # nothing is generated
        config.output_hidden_states = False  # of chosen layers, ``LayerStates`` keeps what is needed
        return T5EncoderModel if config.model_type in ("t5", "mt5") else AutoModel

    transformer, missing = load_pretrained(path, loader, "encoder", trust_remote_code, dropout)
    _freeze_pooler(transformer, path, missing)
    return transformer


def load_pretrained(
    path: Path,
    loader: Callable[[Any], Any],
    what: str,
    trust_remote_code: bool,
    dropout: float | None,
    **arguments: Any,
) -> tuple[nn.Module, set[str]]:
    """The Hugging Face model at ``path`` in float32, from safetensors, and the names of weights that the folder lacks.

    ``loader`` gives the transformers class for a configuration, which it may change. ``what`` names the model in
    messages. ``dropout`` is the probability of every dropout. None: as the configuration says. Raises ``UserError``.
    """
    from transformers import AutoConfig

    require_safetensors(path)
    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
        if dropout is not None:
            set_dropout(config, dropout)
        kind, outlined = loader(config), OUTLINED.get()
        if outlined is not None:
            with outlined:
                make = kind.from_config if hasattr(kind, "from_config") else kind._from_config
                return make(config, dtype=torch.float32, **arguments), set()
        model, report = kind.from_pretrained(
            path,
            config=config,
            dtype=torch.float32,
            use_safetensors=True,
            trust_remote_code=trust_remote_code,
            output_loading_info=True,
            key_mapping=_OTHER_NAMES.get(config.model_type),
            **arguments,
        )
    except (*_UNREADABLE, SafetensorError) as error:
        raise UserError(f"The {what} in {path} can't be loaded: {first_line(error)}") from error
    return model, set(report["missing_keys"])


def set_dropout(config: Any, dropout: float) -> None:
    """Sets all numbers with dropout or pdrop in their name, because every family names its dropouts differently."""
    for name, value in config.to_dict().items():
        if re.search("dropout|pdrop", name) and isinstance(value, int | float) and not isinstance(value, bool):
            setattr(config, name, dropout)


def set_attention(transformer: nn.Module, settings: EncoderSettings) -> None:
    """Has attention computed by the kernel, and read the whole text, where ``settings`` say so.

    Raises ``UserError`` where the kernel isn't installed, or not of this model, and for no decoder.
    """
    model: Any = transformer
    if settings.bidirectional:
        if has_own_code(model) or not (is_causal(model) or is_bidirectional_decoder(model)):
            raise UserError(
                f"encoder.bidirectional is for a decoder of transformers' own, and {type(model).__name__} is none."
                " Leave it out: an encoder's tokens read the whole text already."
            )
        model.config.is_causal = False
    if is_bidirectional_decoder(model):
        for module in model.modules():  # kernels that get no mask ask the layer
            if hasattr(module, "is_causal"):
                module.is_causal = False
    kernel = settings.attention
    if kernel == "auto":
        return
    try:
        model.set_attn_implementation(kernel)
    except (ImportError, ValueError) as error:
        raise UserError(
            f"encoder.attention: {kernel} isn't available for this model on this machine: {first_line(error)}"
            " Install what it needs on every node. Or leave it out, because 'auto' takes PyTorch's own kernels."
        ) from error


def _freeze_pooler(transformer: nn.Module, path: Path, missing: set[str]) -> None:
    """No vector depends on a BERT's pooler: it isn't trained, and kept for the export where the folder has it.

    Raises ``UserError`` where the folder lacks other weights: they would be random.
    """
    lacking = sorted(name for name in missing if not name.startswith("pooler."))
    if lacking:
        raise UserError(
            f"The weights in {path} lack {len(lacking)} tensors that its config.json asks for, the first {lacking[0]}."
            " Do they belong together?"
        )
    if missing:
        transformer.pooler = None  # type: ignore[assignment]
    for name, parameter in transformer.named_parameters():
        if name.startswith("pooler."):
            parameter.requires_grad_(False)


def load_tokenizer(path: Path, trust_remote_code: bool, lower_case: bool) -> Any:
    """The fast tokenizer at ``path``, padding on the right with the end-of-sequence token where it has no other.

    ``lower_case``: a setting of older sentence-transformers folders, on top of the tokenizer's own.
    """
    from tokenizers.normalizers import Lowercase, Sequence
    from transformers import AutoTokenizer

    require_tokenizer(path)
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, use_fast=True, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, ImportError) as error:
        raise UserError(f"The tokenizer in {path} can't be loaded: {first_line(error)}") from error
    compare_with_file(tokenizer, path / "tokenizer.json")
    if tokenizer.truncation_side == "left":
        warn_once(f"{path}: the tokenizer cuts long texts at the front (truncation_side). Here the end is cut off.")
    tokenizer.padding_side = "right"
    tokenizer.truncation_side = "right"
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token  # masked, so any token will do; most decoders have no other
    if lower_case:
        backend = tokenizer.backend_tokenizer
        backend.normalizer = Sequence([Lowercase(), *([backend.normalizer] if backend.normalizer else [])])
    return tokenizer


def compare_with_file(tokenizer: Any, file: Path) -> None:
    """Tells where the class that tokenizer_config.json names reads texts otherwise than tokenizer.json says."""
    from tokenizers import Tokenizer

    if not file.exists():
        return
    stored = Tokenizer.from_file(str(file))
    stored.no_truncation()
    stored.no_padding()
    if stored.encode(_ANY_TEXT).ids != tokenizer(_ANY_TEXT)["input_ids"]:
        warn_once(
            f"{file} makes other tokens of {_ANY_TEXT!r} than {type(tokenizer).__name__} with the settings in"
            " tokenizer_config.json. The latter are used, as in transformers and sentence-transformers."
        )


def require_embeddings(tokenizer: Any, transformer: nn.Module, path: Path) -> None:
    """Raises ``UserError`` where the tokenizer at ``path``, of another model, has tokens that this one lacks."""
    embeddings = transformer.get_input_embeddings().num_embeddings  # type: ignore[operator]
    if len(tokenizer) > embeddings:
        raise UserError(
            f"The tokenizer in {path} has {len(tokenizer):,} tokens, but the model has embeddings of"
            f" {embeddings:,}. Name the tokenizer that the model was trained with."
        )


def resolve_eos(tokenizer: Any, wanted: bool | Literal["auto"], may_need_eos: bool, path: Path) -> bool:
    """Whether every text ends in the end-of-sequence token, after making it so where it is ``wanted``.

    'auto' appends it if the tokenizer appends nothing and the folder asks for it (``add_eos_token``). It also does if
    the last token is pooled without a pooling in the folder (``may_need_eos``). The folder's ``add_bos_token`` is
    followed too. The tokens become part of the tokenizer itself, so truncation keeps room for them and an export
    carries them. Raises ``UserError`` where there is no such token, or no way to leave it out.
    """
    stated = read_json(path / "tokenizer_config.json")
    bare, ids = (tokenizer("a", add_special_tokens=special)["input_ids"] for special in (False, True))
    if stated.get("add_bos_token") and tokenizer.bos_token is not None and ids[: len(bare)] == bare:
        _put_around(tokenizer, before=[tokenizer.bos_token_id])
        warn_once(_ADDED.format(path, "begin with", tokenizer.bos_token, "add_bos_token"))
    eos = tokenizer.eos_token
    present = bool(ids[-1] == tokenizer.eos_token_id)
    if wanted is False and present:
        raise UserError(f"append_eos is false, but the tokenizer in {path} ends every text in {eos!r} by itself.")
    if wanted == "auto":
        asked = stated.get("add_eos_token") is True
        wanted = (asked or may_need_eos) and ids[-len(bare) :] == bare
        if asked and wanted and eos is not None:
            warn_once(_ADDED.format(path, "end in", eos, "add_eos_token"))
    if present or not wanted:
        return present
    if eos is None:
        raise UserError(
            f"The tokenizer in {path} has no end-of-sequence token to append. Set the encoder's append_eos to false to"
            " pool the text's own last token."
        )
    _put_around(tokenizer, behind=[tokenizer.eos_token_id])
    return True


def _put_around(tokenizer: Any, before: Sequence[int] = (), behind: Sequence[int] = ()) -> None:
    """Puts tokens around what the tokenizer puts around every text."""
    from tokenizers.processors import TemplateProcessing

    text = tokenizer("a", add_special_tokens=False)["input_ids"]
    around = [*before, *tokenizer("a")["input_ids"], *behind]
    start = next(place for place in range(len(around)) if around[place : place + len(text)] == text)
    special = [*around[:start], *around[start + len(text) :]]
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
        problem = f"{type(transformer).__name__} is causal, so its first token reads nothing after it"
    elif bare == whole:
        problem = "its tokenizer puts no special token before a text, so this is the state of the first word"
    else:
        return
    raise UserError(
        f"The pooling of the encoder in {path} is cls, the state of the first token, but {problem}. Set pooling to"
        " last_token or mean."
    )


def require_room_for_text(max_length: int, tokenizer: Any, setting: str, prompt: str = "") -> None:
    """Raises ``UserError`` where ``setting`` cuts texts to so few tokens that only special ones and the prompt stay."""
    # counted by itself where there is a prompt: a tokenizer that threads share must not be asked to cut at two lengths
    others = len(tokenizer(prompt)["input_ids"]) if prompt else int(tokenizer.num_special_tokens_to_add())
    if max_length <= others:
        raise UserError(
            f"{setting} is {max_length}, but special tokens{' and the prompt' * bool(prompt)} take {others}, so nothing"
            f" of a text would be read. Set it to {others + 1} or more."
        )


def resolve_length(wanted: int | None, stated: frozenset[int], transformer: nn.Module, tokenizer: Any) -> int:
    """Tokens of the longest text: as ``wanted``, as the folder ``stated``, or the limit of tokenizer and model.

    It never exceeds the number of learned positions. Raises ``UserError`` if the model can't take so many, if so few
    leave nothing of a text, and if the folder has several lengths.
    """
    positions, trained = position_limit(transformer), _longest_text(transformer)
    if wanted is not None:
        if trained is not None:
            require_positions(wanted, trained, "max_length", "the encoder")
        require_room_for_text(wanted, tokenizer, "max_length")
        return wanted
    if len(stated) > 1:
        raise UserError(
            f"The encoder's folder cuts queries and documents at different lengths ({sorted(stated)} tokens), but"
            " only one limit for both is supported. Set the encoder's max_length."
        )
    known = stated or {n for n in (int(tokenizer.model_max_length), trained) if n and n < 10**6}
    length = min(known, default=_LENGTH_WITHOUT_LIMIT)
    length = length if positions is None else min(length, positions)
    for limit in (int(tokenizer.model_max_length), trained):
        if limit is not None and limit < max(stated, default=0):
            warn_once(
                f"{tokenizer.name_or_path}: texts are cut at {length} tokens. max_seq_length is {max(stated)}, but"
                f" tokenizer (model_max_length) or model (max_position_embeddings) was made for {limit}."
            )
    require_room_for_text(length, tokenizer, "the length that the encoder's folder cuts texts at")
    return length


def _longest_text(transformer: nn.Module) -> int | None:
    """Tokens that it has positions for, or was trained on."""
    limit: int | None = getattr(getattr(transformer, "config", None), "max_position_embeddings", None)
    return position_limit(transformer) or limit


def read_longest_text(path: Path) -> int | None:
    """Tokens that the transformer at ``path`` takes, by its configuration alone; None where that doesn't say."""
    stated = read_json(path / "config.json").get("max_position_embeddings")
    outline = outline_transformer(path)
    return stated if outline is None else _longest_text(outline)


def outline_transformer(path: Path) -> nn.Module | None:
    """The transformer at ``path`` without any weights; None where its configuration isn't whole, or has its own code.

    Of a language model too it is what is below the head.
    """
    from transformers import AutoConfig, AutoModel

    stated = read_json(path / "config.json")
    if not {"max_position_embeddings", "n_positions"} & stated.keys():
        return None  # transformers would make one up
    try:
        with torch.device("meta"):
            outline: nn.Module = AutoModel.from_config(AutoConfig.from_pretrained(path, trust_remote_code=False))
    except _UNREADABLE:
        return None
    return outline


def checkpoint_activations(transformer: nn.Module) -> None:
    """In training a block keeps its input alone and is computed again in the backward pass, dropout included.

    A third more computation for the memory of one block's activations instead of all. Gradients stay the same. Works in
    place for every family (Hugging Face's own switch leaves some out), inside the gradient cache too.
    """
    for block in transformer_blocks(transformer):
        # on the instance: hooks are called around it as before, and parameters keep their names
        block.forward = functools.partial(_run_checkpointed, block, block.forward)


def _run_checkpointed(block: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if not (block.training and torch.is_grad_enabled()):
        return forward(*args, **kwargs)
    return checkpoint(forward, *args, use_reentrant=False, **kwargs)


def compile_blocks(transformer: nn.Module, backend: str = "inductor") -> None:
    """Compiles every block for any number of texts of any length, in place: at the first pass, within a minute or two.

    Blocks, not the whole: hooks on a block stay outside what is compiled, equal blocks share one compilation, and names
    of weights stay. Call it before ``checkpoint_activations``. Dropout then draws other numbers than without it.
    """
    for block in transformer_blocks(transformer):
        block.forward = torch.compile(block.forward, dynamic=True, backend=backend)
