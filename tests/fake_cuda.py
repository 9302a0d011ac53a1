"""A CUDA device on machines that have none: tensors that say they are there, with numbers that are kept on the CPU.

torch's own FakeTensorMode refuses mixed devices too, but its tensors have no numbers, so that every branch on one has
to be guessed and no backward pass runs. Here each `FakeCuda` holds a CPU tensor beside it. Its type, its dispatch keys
and its device are those of CUDA; the operations run on the CPU tensors, gradients too, after a look at the devices:

    two devices in one operation          an error, but for 0-dimensional CPU tensors in pointwise ones, and indices
    a number that Python is told          noted as `read`: item(), if tensor, torch.equal
    a copy between the devices            noted as `to cpu` (tolist() too) or, unless it is non_blocking, `to cuda`
    a size that hangs on the numbers      noted as `size`: nonzero(), a choice by a mask

What is noted is what torch.cuda.set_sync_debug_mode warns of: the CPU waits for all that it has asked of the GPU.
"""

import os
import sys
from collections import Counter
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter, tree_map_only

import dap_bench

DEVICE = torch.device("cuda", 0)
PACKAGE = f"{Path(dap_bench.__file__).parent}{os.sep}"
aten = torch.ops.aten

COPIES = (aten._to_copy.default, aten.copy_.default)
INDEXING = (
    aten.index.Tensor,
    aten.index_put.default,
    aten.index_put_.default,
    aten._index_put_impl_.default,
    aten._unsafe_index.Tensor,
)
TAKES_NUMBERS = (aten.fill_.Tensor, aten.masked_fill.Tensor, aten.masked_fill_.Tensor)  # CPU tensors of one number
_keys = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()  # autograd's among them


class FakeCuda(Tensor):
    """A tensor on the device. Autograd knows of `value` only, the CPU tensor beside it."""

    @staticmethod
    def __new__(cls, value):
        layout = {"strides": value.stride(), "storage_offset": value.storage_offset(), "dtype": value.dtype}
        with torch.inference_mode(value.is_inference()):
            return torch.Tensor._make_wrapper_subclass(cls, value.shape, device=DEVICE, **layout)

    def __init__(self, value):
        assert not isinstance(value, FakeCuda)
        self.value = value

    def __repr__(self):
        return f"FakeCuda({self.value})"

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        special = SPECIAL.get(func)
        if special is not None:
            return special(*args, **kwargs)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise RuntimeError(f"{func} after the device has gone")


class Device(TorchDispatchMode):
    """While it is on, there is the device: tensors are made there and copied there. `waits` counts by (kind, place)."""

    def __init__(self):
        super().__init__()
        self.waits = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = list(tree_iter((args, kwargs := kwargs or {})))
        named = [each for each in given if isinstance(each, torch.device)]
        there = [each for each in given if isinstance(each, FakeCuda)]
        if not there and not any(each.type == "cuda" for each in named):
            return func(*args, **kwargs)
        if _composite(func):  # in inference mode operations come before they are taken apart
            with self:
                return func.decompose(*args, **kwargs)
        target = args[0].device if func is aten.copy_.default else (*named, DEVICE)[0]
        goes = target.type == "cuda"
        _check(func, args, [each for each in given if isinstance(each, Tensor)])
        for kind in _waits(func, args, kwargs, goes):
            self.waits[kind, _place()] += 1
        values, options = on_cpu((args, kwargs))
        options |= {"device": torch.device("cpu")} if named else {}
        if goes and not torch.is_inference_mode_enabled():
            with torch._C._ForceDispatchKeyGuard(*_keys):  # from the top again: the numbers have a graph of their own
                found = func(*values, **options)
        else:
            found = func(*values, **options)
        own = {id(each.value): each for each in there}  # what is written into is given back as it is

        def outside(each):
            return own[id(each)] if id(each) in own else FakeCuda(each) if goes else each

        return tree_map_only(Tensor, outside, found)


@contextmanager
def fake_cuda():
    """Make `cuda` a device of this thread; gives its `Device`."""
    torch._C._ensureCUDADeviceGuardSet()  # as FakeTensorMode does; with a CUDA device it changes nothing
    changed = [
        (torch.cuda, "_lazy_init", lambda: None),
        (torch.cuda, "is_available", lambda: True),
        (torch.cuda, "device_count", lambda: 1),
        (torch.cuda.amp.common, "amp_definitely_not_available", lambda: False),
        (torch.cuda, "is_bf16_supported", lambda *_: True),
        (torch.Tensor, "pin_memory", lambda self, *_: self.clone()),
    ]
    lifted = torch._C._only_lift_cpu_tensors()
    overwritten = torch.__future__.get_overwrite_module_params_on_conversion()
    with ExitStack() as stack:
        for owner, name, value in changed:
            stack.enter_context(patch.object(owner, name, value))
        stack.callback(torch._C._set_only_lift_cpu_tensors, lifted)
        stack.callback(torch.__future__.set_overwrite_module_params_on_conversion, overwritten)
        torch._C._set_only_lift_cpu_tensors(True)  # torch.tensor(..., device=) then copies where the mode sees it
        torch.__future__.set_overwrite_module_params_on_conversion(
            True
        )  # writing into .data would leave `value` behind
        yield stack.enter_context(Device())


def on_cpu(found):
    """What a tensor or anything that holds tensors has in numbers, without asking the device."""
    return tree_map_only(FakeCuda, lambda tensor: tensor.value, found)


@cache
def _composite(func):
    return torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), torch._C.DispatchKey.CompositeImplicitAutograd)


def _check(func, args, tensors):
    """Raise where CUDA would: at operations on tensors of two devices."""
    if func in COPIES:
        return
    if func in INDEXING:  # may have indices from the CPU, and be given one number from there
        if not isinstance(args[0], FakeCuda):
            raise RuntimeError(f"{func}: indices on cuda:0 into a tensor on the CPU")
        tensors = [args[0], *args[2:3]]
    single = torch.Tag.pointwise in func.tags or func in (*TAKES_NUMBERS, *INDEXING)
    for each in tensors:
        if not isinstance(each, FakeCuda) and not (single and each.ndim == 0):
            raise RuntimeError(f"{func}: expected all tensors to be on the same device, found cuda:0 and cpu")


def _waits(func, args, kwargs, goes):
    """What the CPU waits for in an operation."""
    if func in COPIES:
        leaves = isinstance(args[func is aten.copy_.default], FakeCuda)
        if leaves and not goes:
            yield "to cpu"
        elif goes and not leaves and not kwargs.get("non_blocking"):
            yield "to cuda"
    elif func in INDEXING:
        for index in args[1]:
            if index is not None and not isinstance(index, FakeCuda):
                yield "to cuda"
            if index is not None and index.dtype in (torch.bool, torch.uint8):
                yield "size"
    elif torch.Tag.data_dependent_output in func.tags:
        yield "read"
    elif torch.Tag.dynamic_output_shape in func.tags:
        yield "size"


def _place():
    """The innermost function of ours that is running: file.py:function."""
    frame = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith(PACKAGE):
            return f"{Path(file[len(PACKAGE) :]).as_posix()}:{frame.f_code.co_name}"
        frame = frame.f_back
    return "elsewhere"


# ---------------------------------------------------------------------- what torch does above its dispatcher


def _requires_grad_(tensor, wanted=True):
    tensor.value.requires_grad_(wanted)
    return tensor


def _grad(outputs, inputs, grad_outputs=None, **options):
    found = torch.autograd.grad(*on_cpu((outputs, inputs, grad_outputs)), **options)
    return tree_map_only(Tensor, FakeCuda, found)


def _deepcopy(tensor, memo):
    if id(tensor) not in memo:
        copy = FakeCuda(tensor.value.detach().clone().requires_grad_(tensor.value.requires_grad))
        if isinstance(tensor, torch.nn.Parameter):
            copy._is_param = True
        memo[id(tensor)] = copy
    return memo[id(tensor)]


def _attention(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
    """Which kernel is the fastest only a GPU knows."""
    options = {"scale": scale, "enable_gqa": enable_gqa}
    return aten._scaled_dot_product_attention_math(query, key, value, attn_mask, dropout_p, is_causal, **options)[0]


def _numpy(tensor, *_, **__):
    raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() first.")


SPECIAL = {
    torch.Tensor.requires_grad_: _requires_grad_,
    torch.Tensor.requires_grad.__get__: lambda tensor: tensor.value.requires_grad,
    torch.Tensor.requires_grad.__set__: lambda tensor, wanted: tensor.value.requires_grad_(wanted) and None,
    torch.Tensor.is_leaf.__get__: lambda tensor: tensor.value.is_leaf,
    torch.Tensor.grad_fn.__get__: lambda tensor: tensor.value.grad_fn,
    torch.Tensor._version.__get__: lambda tensor: tensor.value._version,
    torch.Tensor.data_ptr: lambda tensor: tensor.value.data_ptr(),
    torch.Tensor.tolist: lambda tensor: tensor.cpu().tolist(),
    torch.Tensor.numpy: _numpy,
    torch.Tensor.__array__: _numpy,
    torch.Tensor.__deepcopy__: _deepcopy,
    torch.autograd.grad: _grad,
    torch.nn.functional.scaled_dot_product_attention: _attention,
}
