"""Static encoders: a text's vector is the mean of its tokens' vectors, which nothing around them changes.

They train in seconds on a CPU, as a step touches the rows of a batch's tokens and nothing else. Three kinds of folder
have one: any encoder (its table of word embeddings), sentence-transformers' ``StaticEmbedding``, and model2vec's.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

from raytriever.errors import UserError
from retrieval.encoders.modules import reading, require_safetensors

TABLE = "model.safetensors"
_OF_FAMILIES = ("word_embeddings", "embed_tokens", "tok_embeddings", "shared", "wte")  # tables of transformers
_OWN, _OF_MODEL2VEC = "embedding.weight", "embeddings"  # the table's name in a folder


class TokenTable(nn.Module):
    """Token vectors, float32 (tokens, d). Their gradient is sparse: a row for each of a batch's tokens."""

    def __init__(self, vectors: Tensor) -> None:
        super().__init__()
        rows, width = vectors.shape
        self.embedding = nn.Embedding(rows, width, sparse=True, _weight=vectors.float())
        self.config = SimpleNamespace(hidden_size=width, model_type="static")

    def get_input_embeddings(self) -> nn.Embedding:
        """The table, by the name that transformers has for it."""
        return self.embedding

    def forward(self, tokens: Tensor, starts: Tensor) -> Tensor:
        """Means (n, d) of the texts' token vectors; of a text without a token zeros.

        ``tokens`` int64 (all texts' tokens,); ``starts`` int64 (n,): where each text's begin.
        """
        rows = self.embedding.weight
        if torch.is_grad_enabled():
            used, tokens = torch.unique(tokens, return_inverse=True)
            rows = self.embedding(used)
        return nn.functional.embedding_bag(tokens, rows, starts, mode="mean")


@contextmanager
def one_thread() -> Iterator[None]:
    """Keeps torch to one thread: the rows of a step are too few to be shared, and two wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def trains_table(module: nn.Module) -> bool:
    """Whether ``module`` holds a token table that is trained."""
    return any(isinstance(each, TokenTable) and each.embedding.weight.requires_grad for each in module.modules())


def load_table(folder: Path) -> TokenTable:
    """The table that a ``StaticEmbedding`` or model2vec stored in ``folder``.

    model2vec may store one vector for several tokens (``mapping``) and a weight for each. Raises ``UserError``.
    """
    require_safetensors(folder)
    with reading("The table of token vectors", folder / TABLE):
        found = load_file(folder / TABLE)
        vectors = found.get(_OWN, found.get(_OF_MODEL2VEC))
        if vectors is None or vectors.ndim != 2 or not vectors.is_floating_point():
            shapes = {name: f"{tensor.dtype} {tuple(tensor.shape)}" for name, tensor in found.items()}
            raise ValueError(f"a floating-point matrix {_OWN} or {_OF_MODEL2VEC} was expected, not {shapes}")
        if "mapping" in found:
            vectors = vectors[found["mapping"].long()]
        if "weights" in found:
            vectors = vectors.float() * found["weights"][:, None].float()
    return TokenTable(vectors)


def word_embeddings(folder: Path) -> TokenTable | None:
    """The table of the transformer in ``folder``, by its name: one that isn't built is there six times as soon.

    None where no name is known. Raises ``UserError`` where weights are pickles or can't be read.
    """
    require_safetensors(folder)
    with reading("The word embeddings in", folder):
        held: dict[str, Path] = {}
        for path in sorted(folder.glob("*.safetensors")):
            with safe_open(path, framework="pt") as file:
                held |= dict.fromkeys(file.keys(), path)
        for table in _OF_FAMILIES:
            for name in sorted(name for name in held if f".{name}".endswith(f".{table}.weight")):
                with safe_open(held[name], framework="pt") as file:
                    return TokenTable(file.get_tensor(name))
    return None


def load_table_tokenizer(folder: Path) -> Any:
    """The tokenizer beside a table. Raises ``UserError``."""
    from transformers import PreTrainedTokenizerFast

    path = folder / "tokenizer.json"
    if not path.exists():
        raise UserError(f"{folder} has no tokenizer.json, which a static encoder needs to read texts.")
    with reading("The tokenizer", path):
        return PreTrainedTokenizerFast(tokenizer_file=str(path))


def stored_length(tokenizer: Any) -> int | None:
    """Tokens that the tokenizer's own file cuts texts at; None for whole texts."""
    truncation = tokenizer.backend_tokenizer.truncation
    return None if truncation is None else int(truncation["max_length"])


def starts_of(mask: Tensor) -> Tensor:
    """The start of each text's tokens, int64 (n,), in one row of all tokens that a mask (n, length) keeps."""
    lengths = mask.sum(dim=1)
    return torch.cumsum(lengths, dim=0) - lengths
