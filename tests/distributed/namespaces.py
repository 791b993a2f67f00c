"""Measure exchanges between two processes, each in a network namespace, which a pair of veth devices joins.

    unshare -rn python -m tests.distributed.namespaces FOLDER

is the first process, which starts the other. Each writes what it measured to `FOLDER/<rank>.pt`.
"""

import os
import shlex
import subprocess
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch._dynamo.backends.common import aot_autograd

from mla_compile.kernels import register  # noqa: F401  the ops run
from mla_compile.options import Options
from mla_compile.passes.paths.exchange import InLatentSpace, OutsideOfWeights
from mla_compile.passes.pipeline import Pipeline
from tests.distributed import naive

B, T, STEPS = 128, 32, 8
RATES = 50, 100, 200
"""The rates to which the link is shaped, in megabits per second."""
SIZES = {"B": B, "Sq": 1, "T": T, "N": naive.N, "L": naive.L, "P": naive.P, "R": naive.R, "V": naive.V}
ELEMENT = 8
FORMS = {InLatentSpace: None, OutsideOfWeights: (1e6, 0.0)}
"""Forms of the exchange, each with a link for which it is chosen."""


def shell(command):
    subprocess.run(shlex.split(command), check=True)


def device(rank):
    return f"mla{rank}"


def sent(rank):
    """Bytes that the device of a rank has sent."""
    (line,) = (line for line in Path("/proc/net/dev").read_text().splitlines() if line.strip().startswith(device(rank)))
    return int(line.split(":")[1].split()[8])


def join():
    """Start the second process, and make a pair of devices, one in this namespace and one in that of the process."""
    environment = os.environ | {"GLOO_SOCKET_IFNAME": device(1)}
    command = ["unshare", "--net", sys.executable, "-m", __spec__.name, sys.argv[1], "1"]
    other = subprocess.Popen(command, env=environment)
    here = os.readlink("/proc/self/ns/net")
    while os.readlink(f"/proc/{other.pid}/ns/net") == here:
        time.sleep(0.01)
    shell(f"ip link add {device(0)} type veth peer name {device(1)}")
    shell(f"ip link set {device(1)} netns {other.pid}")
    return other


def come_up(rank):
    while device(rank) not in Path("/proc/net/dev").read_text():
        time.sleep(0.01)
    shell("ip link set lo up")
    shell(f"ip address add 10.0.0.{rank + 1}/24 dev {device(rank)}")
    shell(f"ip link set {device(rank)} up")


def step(form, link, rank):
    """A decode step that is rewritten to a form of the exchange, its inputs, and the bytes of the form's formula."""
    scale = 16  # many heads, so that outputs have many bytes
    heads = scale * naive.N
    q, whole, latent, k_rope = naive.make(1, 2, B, 1, T, heads=2 * heads)
    mine = slice(rank * heads, rank * heads + heads)
    own = naive.place(naive.along_tokens, T, rank, 2)

    def attend(q, latent, k_rope, whole):
        kv_b = whole.unflatten(0, (-1, naive.P + naive.V))[mine].flatten(0, 1)
        return naive.attend(q, naive.along_tokens(latent), naive.along_tokens(k_rope), kv_b)

    def compiler(module, _):
        agreement = Options(same_on_ranks="masks", keys_stay=True, link=link, rates=(1e12, 1e11)).agreement
        (result,) = Pipeline(agreement.device, "absorbed", agreement=agreement)(module)
        assert form.words in result.outcome.reason
        return module

    torch._dynamo.reset()
    function = torch.compile(attend, backend=aot_autograd(fw_compiler=compiler), fullgraph=True)
    exchange = form("group", 2, *(() if link is None else (None,)))
    return (
        function,
        (q[:, :, mine], latent[:, own], k_rope[:, own], whole),
        exchange.received(SIZES | {"N": heads}, ELEMENT),
    )


@torch.no_grad()
def measured(rank):
    """For each form, the bytes of its formula, those that a step sent, and each step's begin and end at each rate.

    The link is shaped only in the direction to the second rank, because gloo's ranks sometimes send one after the other
    what they could send at once.
    """
    found = []
    for form, link in FORMS.items():
        function, inputs, formula = step(form, link, rank)
        function(*inputs)
        dist.barrier()
        before = sent(rank)
        for _ in range(STEPS):
            function(*inputs)
        bytes_of_step = (sent(rank) - before) / STEPS
        times = []
        for rate in RATES:
            if rank == 0:
                shell(f"tc qdisc replace dev {device(0)} root tbf rate {rate}mbit burst 16kb latency 400ms")
            times.append([timed(function, inputs) for _ in range(STEPS)])
            dist.barrier()  # a rank may be done while its bytes are still on their way
        if rank == 0:
            shell(f"tc qdisc del dev {device(0)} root")
        found.append((formula, bytes_of_step, times))
    return found


def timed(function, inputs):
    """When a step begins and ends, by a clock that all processes of the machine share."""
    dist.barrier()
    start = time.monotonic()
    function(*inputs)
    return start, time.monotonic()


def main(folder, rank):
    torch.set_num_threads(1)
    other = join() if rank == 0 else None
    come_up(rank)
    os.environ["GLOO_SOCKET_IFNAME"] = device(rank)
    dist.init_process_group("gloo", f"file://{folder.absolute()}/store", rank=rank, world_size=2)
    torch.save(measured(rank), folder / f"{rank}.pt")
    dist.destroy_process_group()
    if other is not None:
        assert other.wait() == 0


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0)
