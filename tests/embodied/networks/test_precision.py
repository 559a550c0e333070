"""A run has one precision: that of the policy, where it has its own, or that of training."""

import pytest

from embodied.errors import UserError
from embodied.networks.precision import Precision, precision_of
from policies.flow import FlowConfig
from policies.mlp import MLPConfig
from policies.vla.pi0 import Pi0Config
from policies.vla.pi05 import Pi05Config
from policies.vla.tokens import TokensConfig


@pytest.mark.parametrize("precision", Precision)
@pytest.mark.parametrize("kind", [Pi0Config, Pi05Config, TokensConfig])
def test_models_of_pictures_and_words_have_their_own(kind: type, precision: Precision) -> None:
    options = kind(precision=precision)
    assert precision_of(Precision.FLOAT32, options.own_precision) is precision
    with pytest.raises(UserError, match=r"use policy\.precision=bfloat16 in its place"):
        precision_of(Precision.BFLOAT16, options.own_precision)


@pytest.mark.parametrize("precision", Precision)
@pytest.mark.parametrize("kind", [FlowConfig, MLPConfig])
def test_others_are_trained_in_that_of_the_run(kind: type, precision: Precision) -> None:
    assert precision_of(precision, kind().own_precision) is precision
