"""What jobs share whose workers load a pretrained model."""

import socket
from collections.abc import Mapping
from typing import Any, ClassVar, Generic

import torch

from raytriever.retrieval.encoders.pretrained import LocatedModel, locate_named
from raytriever.retrieval.encoders.specification import EncoderSettings, require_dtype, resolve_dtype
from raytriever.retrieval.errors import UserError
from raytriever.retrieval.jobs.before_run import missing_here
from raytriever.retrieval.jobs.model_checks import check_encoder, is_made
from raytriever.retrieval.jobs.stage import Config, Stage


class ModelStage(Stage[Config], Generic[Config]):
    """A stage whose workers are actors that load the model of one setting once.

    ``model_setting``: its name; a ``ModelSettings`` with a ``dtype``, of which 'auto' is settled here, by the driver,
    so that every worker computes in the same way, and recorded.
    """

    model_setting: ClassVar[str] = "encoder"
    keeps_state = True

    def __init__(self, config: Config) -> None:
        source: Any = getattr(config, self.model_setting)
        dtype = resolve_dtype(source.dtype, gpu=config.resources.gpus_per_worker > 0)
        super().__init__(config.model_copy(update={self.model_setting: source.model_copy(update={"dtype": dtype})}))
        self._found: LocatedModel | None = None

    @property
    def located(self) -> LocatedModel:
        """The model's files on this machine. Raises ``UserError`` where they can't be had."""
        if self._found is None:
            source: Any = getattr(self.config, self.model_setting)
            self._found = locate_named(source)
        return self._found

    def check_before_run(self, run: Mapping[str, Stage[Any]]) -> None:
        """A model that can't be had, layers and lengths that it doesn't have; not where the run makes it."""
        source: Any = getattr(self.config, self.model_setting)
        if is_made(run, source):
            return
        with missing_here(by_driver=True):
            found = self.located
        if isinstance(source, EncoderSettings):
            check_encoder(source, found.path, self.model_setting, {})

    def placement(self) -> dict[str, Any]:
        """Arguments of ``torch.nn.Module.to``: where this worker's model computes, and in which precision.

        Raises ``UserError`` where torch finds no GPU for a worker that was given one, or where the processor lacks the
        precision, which the driver chose.
        """
        dtype = resolve_dtype(getattr(self.config, self.model_setting).dtype)
        host, gpus = socket.gethostname(), self.config.resources.gpus_per_worker
        if gpus and not torch.cuda.is_available():
            raise UserError(
                f"gpus_per_worker is {gpus}, but torch finds no GPU on {host}. Install a torch built for CUDA there, or"
                " set resources.gpus_per_worker to 0."
            )
        require_dtype(dtype, host, gpu=gpus > 0)
        return {"device": torch.device("cuda" if gpus else "cpu"), "dtype": getattr(torch, dtype)}
