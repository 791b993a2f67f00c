"""transformers' Trainer, and peft's adapters beside every projection, trained by a model compiled with `mla`."""

from __future__ import annotations

import copy
import subprocess
import sys

import pytest
import torch
from torch import nn

import mla_compile
from tests.compile.layers import Layer, hidden
from tests.hf.test_training import LAYERS, assert_trained, model_of, tokens
from tests.training import Rewritten, assert_gradients_of, gradients

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

import accelerate
import transformers

pytestmark = pytest.mark.usefixtures("without_codegen")
PROJECTIONS = ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"]


class Sentences(torch.utils.data.Dataset):
    """Eight sentences of 15 tokens, the same each time."""

    def __init__(self) -> None:
        self.ids = torch.randint(50, (8, 15), generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.ids[i], "labels": self.ids[i]}


def trained(model: nn.Module, folder: str, **settings: object) -> list[float]:
    """The losses of three steps of transformers' Trainer, of two batches of two each."""
    arguments = transformers.TrainingArguments(
        output_dir=folder,
        max_steps=3,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        learning_rate=1e-2,
        logging_steps=1,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        use_cpu=True,
        dataloader_pin_memory=False,
        **settings,
    )
    trainer = transformers.Trainer(model=model, args=arguments, train_dataset=Sentences())
    with torch.enable_grad():
        trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def with_lora(model: nn.Module, *projections: str, **settings: object) -> nn.Module:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=3, target_modules=list(projections), init_lora_weights=False, **settings)
    return peft.get_peft_model(model, config)


@pytest.mark.parametrize(
    "adapted",
    [pytest.param(False, marks=pytest.mark.slow, id="all weights"), pytest.param(True, id="adapters")],
)
def test_the_trainer_trains_a_compiled_model(adapted, tmp_path):
    model = model_of("deepseek_v3")
    if adapted:
        model = with_lora(model, *PROJECTIONS)
    plain = trained(copy.deepcopy(model), str(tmp_path))
    model.compile(backend="mla")
    found = trained(model, str(tmp_path))
    assert found == pytest.approx(plain, rel=1e-4)
    assert plain[0] != plain[-1]
    assert mla_compile.last_report().rewritten == 1


@pytest.mark.slow
@pytest.mark.parametrize("projection", PROJECTIONS)
def test_an_adapter_of_peft_beside_a_projection(projection):
    assert_trained(with_lora(model_of("deepseek_v3"), projection), tokens())


@pytest.mark.slow
def test_adapters_of_peft_beside_all_projections():
    assert_trained(with_lora(model_of("deepseek_v3", LAYERS), *PROJECTIONS), tokens())


@pytest.mark.slow
def test_rank_stabilized_adapters_of_peft():
    assert_trained(with_lora(model_of("deepseek_v3"), "kv_b_proj", use_rslora=True), tokens())


def dora(projection: str) -> tuple[nn.Module, torch.Tensor]:
    return with_lora(nn.Sequential(Layer()), projection, use_dora=True).train(), hidden()


TRACED = torch.__version__.startswith(("2.11", "2.15"))


@pytest.mark.skipif(TRACED, reason="torch 2.11 and 2.15 trace it")
def test_dora_of_peft_ends_a_graph():
    """It looks at the module name of a weight's class, which Dynamo cannot trace. Beside `kv_b_proj`, the graph would
    end between the latent and the keys."""
    model, x = dora("kv_b_proj")
    with pytest.raises(torch._dynamo.exc.Unsupported, match="startswith"):
        gradients(Rewritten(model), model, [x])


@pytest.mark.parametrize("projection", ["q_proj", "kv_b_proj"])
def test_dora_of_peft_without_that_question(projection, monkeypatch):
    """Or with it, where it is traced."""
    model, x = dora(projection)
    if not TRACED:
        monkeypatch.setattr("peft.tuners.lora.dora.dequantize_module_weight", lambda module: module.weight)
    rewritten = Rewritten(model)
    assert_gradients_of(rewritten, model, [x])
    assert [outcome.path for outcome in rewritten.outcomes] == ["chunked"]


TOLD = """
from accelerate.utils import TorchDynamoPlugin
from mla_compile import register_with_accelerate
try:
    TorchDynamoPlugin(backend="mla")
except ValueError as error:
    print(error)
register_with_accelerate()
register_with_accelerate()
TorchDynamoPlugin(backend="mla")
"""


@pytest.mark.slow
def test_accelerate_knows_a_list_of_backends():
    """This is why it has to be told of `mla`."""
    ran = subprocess.run([sys.executable, "-c", TOLD], capture_output=True, text=True, check=True)
    assert ran.stdout.startswith("'MLA' is not a valid DynamoBackend")


def test_the_trainer_compiles_where_accelerate_was_told(tmp_path, monkeypatch):
    """By `torch_compile_backend`, which transformers writes to the environment."""
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "no")
    model = model_of("deepseek_v3")
    plain = trained(copy.deepcopy(model), str(tmp_path))
    mla_compile.register_with_accelerate()
    found = trained(model, str(tmp_path), torch_compile=True, torch_compile_backend="mla")
    assert found == pytest.approx(plain, rel=1e-4)
    assert mla_compile.last_report().rewritten == 1
    with pytest.raises(ValueError, match="'NONE OF THESE' is not a valid DynamoBackend"):
        accelerate.utils.TorchDynamoPlugin(backend="none of these")
