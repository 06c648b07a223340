"""The observer that ignores everything."""

import inspect

import pytest

from dtrain.session.observer import NullObserver, Observer


@pytest.mark.parametrize("name", [name for name in vars(Observer) if not name.startswith("_")])
def test_the_null_observer_takes_every_call(name: str) -> None:
    _, *parameters = inspect.signature(vars(Observer)[name]).parameters.values()
    keywords = {one.name: None for one in parameters if one.kind is one.KEYWORD_ONLY}
    getattr(NullObserver(), name)(*[None] * (len(parameters) - len(keywords)), **keywords)
