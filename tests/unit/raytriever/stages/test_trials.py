"""What a trial that runs beside others gets of the machine."""

import pytest
import ray

from raytriever.stages.stage import Resources, Stage, StageConfig
from raytriever.stages.trials import _with_share


class Trained(Stage[StageConfig]):
    command = "train"
    kind = "model"
    config_class = StageConfig


class Embedded(Trained):
    command = "embed"


@pytest.mark.parametrize(
    ("kind", "resources", "concurrent", "expected"),
    [
        (Trained, {"workers": 2}, 4, 2),
        (Trained, {}, 4, 4),
        (Trained, {"workers": 9}, 4, 1),
        (Trained, {"workers": 2, "cpus_per_worker": 3}, 4, 3),
        (Trained, {"workers": 2}, 1, None),
        (Embedded, {"workers": 2}, 4, None),
    ],
)
def test_trainings_side_by_side_share_the_cpus_evenly(
    kind: type[Trained],
    resources: dict[str, int],
    concurrent: int,
    expected: int | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"CPU": 16.0})
    found = _with_share(kind(StageConfig(output="any", resources=Resources(**resources))), concurrent)
    assert type(found) is kind
    assert found.config.resources.cpus_per_worker == expected
