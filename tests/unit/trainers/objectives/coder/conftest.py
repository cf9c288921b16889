"""A small encoder, a collection, and its vectors by that encoder, as CODER's runs start from them."""

import pytest

from tests.unit.trainers.validation.made_up import encoder_settings, make_collection, spread
from tests.unit.trainers.validation.stages import embedded


@pytest.fixture(scope="module")
def base(tmp_path_factory, tiny_encoder):
    return spread(tiny_encoder, tmp_path_factory.mktemp("base") / "encoder")


@pytest.fixture(scope="module")
def collection(tmp_path_factory):
    return make_collection(tmp_path_factory.mktemp("collection"))


@pytest.fixture(scope="module")
def vectors(tmp_path_factory, collection, base):
    return embedded(collection, encoder_settings(base), tmp_path_factory.mktemp("vectors"), texts_per_shard=40)
