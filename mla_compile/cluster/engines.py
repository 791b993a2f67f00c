"""Which meshes vLLM and transformers support, and how to ask them for one.

vLLM: TP must divide heads and MLP widths evenly (in FP8 into whole blocks of scales), DCP uses ranks of TP, and experts
are split over all ranks of an engine or not at all. transformers: no DCP, no pipeline together with expert parallelism,
experts within one group, and pipeline stages with equal numbers of layers (it would give the rest to the last stage).
"""

from __future__ import annotations

from dataclasses import dataclass

from .exchanges import experts
from .link import ALL_TO_ALL
from .mesh import Mesh
from .model import Model
from .step import Step

VLLM, TRANSFORMERS = ENGINES = "vLLM", "transformers"


@dataclass(frozen=True)
class Refusal:
    """Why neither engine supports a mesh."""

    what: str
    """The dimension of the mesh that is refused."""
    size: int
    why: str

    def __str__(self) -> str:
        return f"{self.what} {self.size:,} {self.why}"


def refused(model: Model, mesh: Mesh, batch: int) -> Refusal | None:
    """Why neither engine supports the mesh; None if one does."""
    if model.sizes.N % mesh.tp:
        return Refusal("TP", mesh.tp, f"does not divide {model.sizes.N} heads")
    if mesh.ep > 1 and not model.experts:
        return Refusal("EP", mesh.ep, "of a model without experts")
    if mesh.ep > 1 and model.experts % mesh.ep:
        return Refusal("EP", mesh.ep, f"does not divide {model.experts} experts")
    for name, width in model.widths.items():
        cut = name != "moe_intermediate_size" or mesh.ep == 1
        if cut and width % (mesh.tp * model.block):
            blocks = f" in blocks of {model.block}" if model.block > 1 else ""
            return Refusal("TP", mesh.tp, f"does not divide {name} {width:,}{blocks}")
    if mesh.pp > len(model.layers):
        return Refusal("PP", mesh.pp, f"is more than {len(model.layers)} layers")
    if mesh.dp > batch:
        return Refusal("DP", mesh.dp, f"is more than the batch of {batch:,}")
    return None


def engines(model: Model, mesh: Mesh) -> tuple[str, ...]:
    """The engines that support a mesh, given that it is not refused."""
    even = mesh.pp == 1 or (mesh.ep == 1 and len(model.layers) % mesh.pp == 0)
    takes = mesh.dcp == 1 and mesh.groups == 1 and even
    return ENGINES if takes else (VLLM,)


def vllm(step: Step, name: str) -> str:
    """The vLLM command for each engine of a mesh."""
    mesh = step.mesh
    words = [f"vllm serve {name}", f"--tensor-parallel-size {mesh.tp}"]
    if mesh.dcp > 1:
        words += [f"--decode-context-parallel-size {mesh.dcp}", "--dcp-comm-backend a2a"]
    if mesh.groups > 1:
        words.append(f"--data-parallel-size {mesh.groups}")
    if mesh.ep > 1:
        words.append("--enable-expert-parallel")
    if mesh.groups > 1:
        sent = experts(step.model, mesh, 1, step.sequences, step.link)[0].kind == ALL_TO_ALL
        words.append(f"--all2all-backend {'deepep_low_latency' if sent else 'allgather_reducescatter'}")
    if mesh.pp > 1:
        words.append(f"--pipeline-parallel-size {mesh.pp}")
    words += [f"--max-model-len {step.task.context}", f"--max-num-seqs {-(-step.task.batch // mesh.dp)}"]
    if step.task.dtype == "fp8":
        words.append("--kv-cache-dtype fp8")
    return " \\\n  ".join(words)


def transformers(step: Step, name: str) -> str:
    """A transformers program for each engine of a mesh."""
    mesh = step.mesh
    more = "".join(f", {name}_size={size}" for name, size in (("ep", mesh.ep), ("pp", mesh.pp)) if size > 1)
    return f"""# torchrun --nproc-per-node {mesh.tp * mesh.pp} this.py
import mla_compile
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.distributed import DistributedConfig

plan = mla_compile.tp_plan(AutoConfig.from_pretrained("{name}"))
config = DistributedConfig(tp_size={mesh.tp}{more}, tp_plan=plan)
model = AutoModelForCausalLM.from_pretrained("{name}", dtype="auto", distributed_config=config)
model.compile(backend="mla")"""
