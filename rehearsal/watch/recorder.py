"""What only torch knows of a step, written between the null GPU's own lines (see nullgpu/steps.c).

kernel <number> <json>            said once of a kernel that Inductor compiled: bytes, configuration, arguments
inductor <number> <mask>          that kernel is launched next; attention's with the address of its list of blocks
op <name> <read> <written>        an operation of torch on the GPU comes next, with the bytes of its tensors
Optimizer <index> begins | ends   Wait   Backward ends (of a script whose optimizers are not torch's)
"""

import ctypes
import json
import os
from pathlib import Path

from torch._subclasses import FakeTensor  # what a graph is traced with: it launches nothing
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

COMPUTING = ("aten", "torch_attn")  # namespaces of operations that launch kernels; torch_attn has varlen_attn


class Recorder:
    def __init__(self, torch, path: Path):
        self.torch, self.numbers, self.kept = torch, {}, []
        record = ctypes.CDLL(None).nullgpu_record_steps
        record(str(path).encode())
        self.file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self.watch_kernels()
        Operations(self).__enter__()  # for the rest of the run

    def note(self, line: str) -> None:
        os.write(self.file, line.encode() + b"\n")

    def watch_kernels(self) -> None:
        from torch._inductor.runtime.triton_heuristics import CachingAutotuner

        run = CachingAutotuner.run

        def noted(kernel, *args, **kwargs):
            if kernel not in self.numbers:
                self.numbers[kernel] = len(self.numbers)
                self.kept.append(kernel)
                self.note(f"kernel {self.numbers[kernel]} {json.dumps(self.described(kernel, args))}")
            self.note(f"inductor {self.numbers[kernel]} {self.mask_of(kernel, args)}")
            return run(kernel, *args, **kwargs)

        CachingAutotuner.run = noted

    def mask_of(self, kernel, args: tuple) -> int:
        lists = (arg for arg in args if self.torch.is_tensor(arg) and arg.dtype is self.torch.int32)
        return next((blocks.data_ptr() for blocks in lists), 0) if "flex_attention" in name_of(kernel) else 0

    def described(self, kernel, args: tuple) -> dict:
        meta, launcher = kernel.inductor_meta, kernel.launchers[0] if len(kernel.launchers) == 1 else None
        config = launcher.config if launcher else kernel.configs[0]
        tensors = [arg for arg in args if self.torch.is_tensor(arg)]
        return {
            "name": name_of(kernel),
            "bytes": round(meta["kernel_num_gb"] * 1e9) if "kernel_num_gb" in meta else sum(map(size_of, tensors)),
            "constants": {name: value for name, value in config.kwargs.items() if isinstance(value, int)},
            "numels": [arg for arg in args if isinstance(arg, int)],
            "warps": config.num_warps,
            "registers": getattr(launcher, "n_regs", None),
            "spilled_words": getattr(launcher, "n_spills", None),
            "cache_hash": getattr(launcher, "cache_hash", None),
            "template": {
                name: value for name, value in (meta.get("config_args") or {}).items() if isinstance(value, (int, bool))
            },
            "shapes": [[list(tensor.shape), str(tensor.dtype).removeprefix("torch.")] for tensor in tensors],
        }


def name_of(kernel) -> str:
    return kernel.inductor_meta.get("kernel_name", kernel.fn.__name__)


def size_of(tensor) -> int:
    return tensor.numel() * tensor.element_size()


class Operations(TorchDispatchMode):
    """Sees each operation that torch itself launches, in compiled graphs too; changes nothing."""

    supports_higher_order_operators = True  # FlexAttention that is not compiled, passed on as it is

    def __init__(self, recorder: Recorder):
        super().__init__()
        self.recorder = recorder

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        inputs = [x for x in self.tensors((args, kwargs)) if x.is_cuda and not isinstance(x, FakeTensor)]
        if getattr(func, "namespace", "") not in COMPUTING or func.is_view or not inputs:
            return func(*args, **kwargs)
        results = self.tensors([kwargs.get("out")])
        changed = self.tensors([value for argument, value in bound(func, args, kwargs) if argument.is_write])
        read = sum(size_of(x) for x in inputs if not any(x is result for result in results))
        self.recorder.note(f"op {func.__name__} {read} {sum(map(size_of, changed))}")
        made = func(*args, **kwargs)
        self.answer(func, made)
        if not changed:
            self.recorder.note(f"made {sum(size_of(x) for x in self.tensors(made) if x.is_cuda)}")
        return made

    def answer(self, func, made) -> None:
        """A single yes or no, which a script may ask of its weights: all is well. Else it would read what was there."""
        for x in self.tensors(made):
            if x.is_cuda and x.numel() == 1 and x.dtype is self.recorder.torch.bool:
                ctypes.memset(x.data_ptr(), func.__name__.startswith("all."), 1)  # a null GPU's memory is the host's

    def tensors(self, values) -> list:
        return [x for x in tree_leaves(values) if self.recorder.torch.is_tensor(x)]


def bound(func, args: tuple, kwargs: dict):
    """The operation's arguments as its schema declares them, each with its value."""
    for number, argument in enumerate(func._schema.arguments):
        yield argument, args[number] if number < len(args) else kwargs.get(argument.name)
