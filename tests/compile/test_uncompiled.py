"""`generate` of what `torch.compile` returns says that it runs uncompiled, and what to write."""

import gc
import pickle
import warnings
import weakref

import pytest
import torch
from torch import nn

WARNING = r'Write model\.compile\(backend="mla"\), then model\.generate'


class Writer(nn.Module):
    """A model with `generate`."""

    def __init__(self):
        super().__init__()
        self.step = nn.Linear(2, 2)

    def forward(self, x):
        return self.step(x)

    def generate(self, x, *, steps):
        for _ in range(steps):
            x = self(x)
        return x


def test_generate_of_a_compiled_object_warns_and_runs():
    model, x = Writer(), torch.randn(1, 2)
    compiled = torch.compile(model, backend="mla")
    with pytest.warns(UserWarning, match=WARNING) as caught:
        output = compiled.generate(x, steps=2)
    assert torch.equal(output, model.generate(x, steps=2))
    assert [warning.filename for warning in caught] == [__file__]


@pytest.mark.parametrize(
    "make",
    [
        lambda model: model,
        lambda model: torch.compile(model, backend="eager"),
        lambda model: torch.compile(model, backend=lambda module, inputs: module.forward),
        lambda model: model.compile(backend="eager") or torch.compile(model, backend="mla"),
    ],
    ids=["not compiled", "another backend", "a function as backend", "compiled in place too"],
)
def test_nobody_else_is_warned(make):
    torch.compile(nn.Linear(1, 1), backend="mla")  # loads the backend, and with it the hook that warns
    model = make(Writer())
    with warnings.catch_warnings(action="error"):
        assert model.generate(torch.randn(1, 2), steps=1).shape == (1, 2)


def test_what_generate_is_replaced_by_is_called():
    model = Writer()
    compiled = torch.compile(model, backend="mla")
    model.generate = lambda: "another"
    with pytest.warns(UserWarning, match=WARNING):
        assert compiled.generate() == "another"


def test_a_model_without_generate_still_has_none():
    assert not hasattr(torch.compile(nn.Linear(1, 1), backend="mla"), "generate")


def test_the_model_is_not_kept_alive():
    model = Writer()
    compiled = torch.compile(model, backend="mla")
    weak = weakref.ref(model.step)
    gc.disable()
    try:
        del model, compiled
        assert weak() is None
    finally:
        gc.enable()


def test_a_pickled_one_warns_too():
    compiled = pickle.loads(pickle.dumps(torch.compile(Writer(), backend="mla")))
    with pytest.warns(UserWarning, match=WARNING):
        compiled.generate(torch.randn(1, 2), steps=1)
