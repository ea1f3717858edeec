"""What only torch knows of a step, written between the null GPU's own lines (see nullgpu/steps.c).

kernel <number> <json>            said once of a kernel that Inductor compiled: bytes, configuration, arguments
inductor <number>                 that kernel is launched next
op <name> <read> <written>        an operation of torch on the GPU comes next, with the bytes of its tensors
Optimizer <index> begins | ends   Wait
"""

import ctypes
import json
import os
from pathlib import Path

from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


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
            self.note(f"inductor {self.numbers[kernel]}")
            return run(kernel, *args, **kwargs)

        CachingAutotuner.run = noted

    def described(self, kernel, args: tuple) -> dict:
        meta, launcher = kernel.inductor_meta, kernel.launchers[0] if len(kernel.launchers) == 1 else None
        config = launcher.config if launcher else kernel.configs[0]
        tensors = [arg for arg in args if self.torch.is_tensor(arg)]
        return {
            "name": meta.get("kernel_name", kernel.fn.__name__),
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


def size_of(tensor) -> int:
    return tensor.numel() * tensor.element_size()


class Operations(TorchDispatchMode):
    """Sees each operation that torch itself launches, in compiled graphs too; changes nothing."""

    def __init__(self, recorder: Recorder):
        super().__init__()
        self.recorder = recorder

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        is_tensor = self.recorder.torch.is_tensor
        inputs = [x for x in tree_leaves((args, kwargs)) if is_tensor(x)]
        if func.namespace == "aten" and any(x.is_cuda for x in inputs) and not func.is_view:
            schema, values = func._schema.arguments, list(args) + [None] * len(func._schema.arguments)
            changed = [
                value if value is not None else (kwargs or {}).get(argument.name)
                for argument, value in zip(schema, values, strict=False)
                if argument.alias_info is not None and argument.alias_info.is_write
            ]
            written = sum(size_of(x) for x in tree_leaves(changed) if is_tensor(x))
            outputs_only = {id(x) for x in tree_leaves((kwargs or {}).get("out")) if is_tensor(x)}
            read = sum(size_of(x) for x in inputs if x.is_cuda and id(x) not in outputs_only)
            self.recorder.note(f"op {func.__name__} {read} {written}")
            result = func(*args, **(kwargs or {}))
            if not written:
                fresh = sum(size_of(x) for x in tree_leaves(result) if is_tensor(x) and x.is_cuda)
                self.recorder.note(f"made {fresh}")
            return result
        return func(*args, **(kwargs or {}))
