"""Other software swaps classes of modules too: FSDP2 of whole modules, parametrizations of a weight."""

from collections.abc import Iterator

import hosts
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.utils import parametrize

from tokenmerge import ToMeConfig, apply_token_merging

EVERYTHING = ToMeConfig(ratio=0.5, max_downsample=2, merge_crossattn=True, merge_mlp=True)


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    """One process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def blocks(unet: nn.Module) -> list[nn.Module]:
    return [module for module in unet.modules() if hasattr(module, "attn1")]


def shard(unet: nn.Module, mesh: DeviceMesh) -> None:
    for block in blocks(unet):
        fully_shard(block.attn1, mesh=mesh)
        fully_shard(block, mesh=mesh)
    fully_shard(unet, mesh=mesh)


def classes(unet: nn.Module) -> list[str]:
    """Names of all classes of each module."""
    return [str([cls.__qualname__ for cls in type(module).__mro__]) for module in unet.modules()]


@pytest.mark.parametrize("sharded_first", [True, False])
def test_sharded_modules_stay_so_when_merging_goes(mesh, sharded_first):
    plain = hosts.unet()
    dense = hosts.call(plain, **hosts.inputs())
    shard(plain, mesh)
    with_merging = hosts.unet()
    apply_token_merging(with_merging, EVERYTHING)
    merged = hosts.call(with_merging, **hosts.inputs())

    unet = hosts.unet()
    if sharded_first:
        shard(unet, mesh)
    patch = apply_token_merging(unet, EVERYTHING)
    if not sharded_first:
        shard(unet, mesh)
    assert torch.equal(hosts.call(unet, **hosts.inputs()), merged)
    patch.remove()
    assert classes(unet) == classes(plain)
    assert all(isinstance(block, FSDPModule) for block in blocks(unet))
    assert len({type(block) for block in blocks(unet)}) == 1  # so that they share compiled code
    assert not any("_tokenmerge" in module.__dict__ for module in unet.modules())
    assert torch.equal(hosts.call(unet, **hosts.inputs()), dense)
    for block in blocks(unet):
        block.reshard()  # a method of theirs
    apply_token_merging(unet, EVERYTHING)
    assert torch.equal(hosts.call(unet, **hosts.inputs()), merged)


def test_new_settings_for_modules_that_were_sharded_between(mesh):
    unet, other = hosts.unet(), hosts.unet()
    apply_token_merging(unet, ToMeConfig(ratio=0.25))
    shard(unet, mesh)
    apply_token_merging(unet, EVERYTHING)
    apply_token_merging(other, EVERYTHING)
    assert torch.equal(hosts.call(unet, **hosts.inputs()), hosts.call(other, **hosts.inputs()))


class Doubled(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return 2 * weight


def test_a_parametrized_module_stays_so_when_merging_goes():
    unet = hosts.unet()
    attention, other = (getattr(blocks(unet)[0], name) for name in ("attn1", "attn2"))
    attention.scales = nn.Parameter(torch.ones(2))
    patch = apply_token_merging(unet, EVERYTHING)
    parametrize.register_parametrization(attention, "scales", Doubled())
    assert attention.scales.tolist() == [2, 2]
    patch.remove()
    assert attention.scales.tolist() == [2, 2]
    parametrize.remove_parametrizations(attention, "scales", leave_parametrized=False)
    assert type(attention) is type(other)
    assert attention.scales.tolist() == [1, 1]
