"""Tests that context parallelism on two ranks gives the losses and gradients of one process, in every family of models
except Gated DeltaNet."""

import pytest

from tests.parallel.test_context import errors
from tests.support.models import FAMILIES
from tests.support.ranks import run_ranks


@pytest.mark.torch22
def test_two_ranks_have_the_losses_and_gradients_of_one_process():
    cases = [(family, 64, True, "eager") for family in FAMILIES if family != "gdn"]
    for error_of in run_ranks(2, errors, cases):
        assert max(error_of.values()) < 1e-12, error_of
