"""What the tests of the pages share: the store and the model that a first training leaves."""

from tests.verbs.conftest import used  # noqa: F401 (a fixture)
