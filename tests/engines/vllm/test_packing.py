"""Packed weights are found: patching their parameter would have no effect."""

from __future__ import annotations

import torch

from weightwire.engines.vllm.packing import experts_on_cpu, relaid_out


def test_plain_layers_can_be_patched() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.LayerNorm(2))
    model[0].cpu_linear = torch.nn.functional.linear
    assert relaid_out(model) == ""


def test_a_layer_whose_kernel_keeps_a_copy_is_reported() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 2))
    packed = model[0].weight.detach().clone()
    model[0].cpu_linear = lambda x, weight, bias: x @ packed.t()
    assert relaid_out(model) == "0: the weights are packed for the CPU"


def test_a_layer_whose_weights_were_dropped_is_reported() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 2))
    model[0].weight = torch.nn.Parameter(torch.empty(0))
    assert relaid_out(model) == "0.weight: the weights are packed and dropped"


def test_a_mixture_of_experts_on_a_cpu_is_found() -> None:
    model = torch.nn.Sequential(torch.nn.Module())
    assert experts_on_cpu(model) == ""
    model[0].w13_weight = torch.nn.Parameter(torch.zeros(2, 4, 3))
    assert experts_on_cpu(model) == "0"
