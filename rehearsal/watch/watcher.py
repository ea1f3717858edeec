"""What a rehearsal notes down inside each rank, while the training script stays as it is.

In the rehearsal's folder, for each rank R:
    rankR.log           what the script said, standard output and standard error in one order, with marks between: the
                        ends of optimizer steps, and waits for the GPU. A script without an optimizer of torch's own
                        has one all the same: it works from the end of a backward pass until the script calls
                        zero_grad on its model
    rankR.collectives   one line a collective (written by the null GPU), the same marks between
    rankR.steps         what the device is asked to do once everything is compiled, in order (see recorder.py)
    rankR.json          memory at the end: peak, what held it (rank 0), out-of-memory if it came to that
"""

import atexit
import contextlib
import ctypes
import functools
import importlib.abc
import importlib.util
import json
import os
import sys
import time
import warnings
from pathlib import Path

import peak_memory

HISTORY_EVENTS = 400_000  # allocations and frees that are remembered on rank 0: several full-size steps
PATIENCE = 300  # seconds that a rank waits for rank 0 to compile a graph, before it does so itself
LESS_PATIENCE = 3  # with a cache of an earlier run: rank 0 may have found there what another rank has to compile
LABELLED_STEPS = 20  # optimizer steps after which the owners of memory are noted


def start(folder: str, rank: int) -> None:
    log = os.open(f"{folder}/rank{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    name_the_caller_of_warnings()
    share_compiled_code(folder, rank)
    after_import("torch", Watcher(Path(folder), rank).begin)


def name_the_caller_of_warnings() -> None:
    """Torch's warnings name a line of torch; below each goes the line of the script that led there."""
    show = warnings.showwarning
    script = os.path.abspath(os.environ["REHEARSAL_SCRIPT"])

    def show_with_caller(*args, **kwargs):
        show(*args, **kwargs)
        frame = sys._getframe(1)
        while frame and os.path.abspath(frame.f_code.co_filename) != script:
            frame = frame.f_back
        if frame:
            print(f"[rehearsal] warned from {os.path.basename(script)}:{frame.f_lineno}", file=sys.stderr, flush=True)

    warnings.showwarning = show_with_caller


def share_compiled_code(folder: str, rank: int) -> None:
    """Lets rank 0 compile what the others then find in the cache: a whole graph with its backward, which then needs no
    tracing either, or else the compiled code of each.

    Compiled graphs name their card, so all ranks take the first one, each in its own world. Only the last one keeps its
    own number, so that a script that takes the wrong card does not go unnoticed. It compiles its graphs for itself, but
    finds their kernels, which name no card.
    """
    if rank < int(os.environ["WORLD_SIZE"]) - 1:
        os.environ["LOCAL_RANK"] = "0"
    shares = 0 < rank < int(os.environ["WORLD_SIZE"]) - 1
    if shares:
        os.nice(10)  # all wait for those two that compile
    if rank == 0:
        os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = str(min(os.cpu_count() or 1, 8))
    # A byte for each graph that rank 0 has looked for in the cache, for each half of one that it has compiled, and for
    # each whole graph that another rank has found.
    looked, compiled, found = (open(f"{folder}/{name}", "ab", buffering=0) for name in ("looked", "compiled", "found"))
    own_looked = own_compiled = 0

    def wait_until(done) -> None:
        """Or until rank 0 takes too long: no rank depends on it."""
        until = time.monotonic() + (LESS_PATIENCE if os.environ["REHEARSAL_OLD_CACHE"] == "1" else PATIENCE)
        while not done() and time.monotonic() < until:
            time.sleep(0.02)

    def take_turns_with_graphs(module) -> None:
        cache = module.AOTAutogradCache
        look_up = cache._lookup

        @functools.wraps(look_up)
        def wait_and_look_up(key, *args, **kwargs):
            nonlocal own_looked
            own_looked += 1
            if rank == 0:
                looked.write(b".")
            elif shares:  # once rank 0 looks for the next graph, it has filed this one, or never will
                place = Path(cache._get_tmp_dir_for_key(key))
                wait_until(lambda: any(place.glob("[!.]*")) or os.fstat(looked.fileno()).st_size > own_looked)
            graph = look_up(key, *args, **kwargs)
            if shares and graph is not None:
                found.write(b".")
            return graph

        cache._lookup = staticmethod(wait_and_look_up)

    def take_turns(module) -> None:
        compile_graph = module._compile_fx_inner

        @functools.wraps(compile_graph)
        def compile_or_find(*args, **kwargs):
            nonlocal own_compiled
            own_compiled += 1
            if rank:
                wait_until(lambda: os.fstat(compiled.fileno()).st_size >= own_compiled)
            done = compile_graph(*args, **kwargs)
            if not rank:
                compiled.write(b".")
            return done

        module._compile_fx_inner = compile_or_find

    def file_whole_graphs(module) -> None:
        """Compile the backward with the forward: no rank meets the others in a collective with half a graph."""
        module.force_non_lazy_backward_lowering = True

    after_import("torch._inductor.compile_fx", take_turns)
    after_import("torch._functorch._aot_autograd.autograd_cache", take_turns_with_graphs)
    after_import("torch._functorch.config", file_whole_graphs)


def after_import(name: str, action) -> None:
    """Calls action(module) once the script itself has imported the module, whatever it sets up before that."""

    class Finder(importlib.abc.MetaPathFinder):
        def find_spec(self, wanted, path=None, target=None):
            if wanted != name:
                return None
            sys.meta_path.remove(self)
            spec = importlib.util.find_spec(name)
            run = spec.loader.exec_module

            def run_then_act(module):
                run(module)
                action(module)

            spec.loader.exec_module = run_then_act
            return spec

    sys.meta_path.insert(0, Finder())


class Watcher:
    def __init__(self, folder: Path, rank: int):
        self.folder, self.rank = folder, rank
        self.optimizers: list = []  # in the order of their first step
        self.script = os.path.abspath(os.environ["REHEARSAL_SCRIPT"])
        self.owners: list[dict] = []  # who owned which address, after each optimizer step
        self.out_of_memory: dict | None = None
        self.flops_before = 0
        self.stepped: set[int] = set()  # the optimizers that have done a step
        self.recorder = None  # from the second step on, or from the end of the warm-up
        self.uses_torchs = False  # whether its optimizers are torch's; if not:
        self.model = None  # whose gradients it clears

    def begin(self, torch) -> None:
        from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

        self.torch = torch
        self.count_flops = ctypes.CDLL(None).nullgpu_matmul_flops
        self.count_flops.restype = ctypes.c_uint64
        path = self.folder / f"rank{self.rank}.collectives"
        self.collectives = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        register_optimizer_step_pre_hook(self.before_optimizer)
        register_optimizer_step_post_hook(self.after_optimizer)
        self.mark_waits()
        self.mark_updates()
        torch.cuda._lazy_call(self.watch_memory)
        self.summarise_at_the_end()

    def summarise_at_the_end(self) -> None:
        """At the end of Python, or before os._exit, with which a script may leave at once."""
        atexit.register(self.write_summary)
        leave, process = os._exit, os.getpid()

        def summarise_and_leave(code: int) -> None:
            if os.getpid() == process:
                self.write_summary()
            leave(code)

        os._exit = summarise_and_leave

    # ---- Steps

    def before_optimizer(self, optimizer, args, kwargs) -> None:
        self.flops_before = self.count_flops()
        if self.recorder:
            self.recorder.note(f"Optimizer {self.index_of(optimizer)} begins")

    def after_optimizer(self, optimizer, args, kwargs) -> None:
        self.after_update(self.index_of(optimizer))

    def after_update(self, index: int) -> None:
        mark = f"Optimizer {index} {self.flops_before} {self.count_flops()}\n".encode()
        os.write(self.collectives, mark)
        sys.stdout.flush()
        os.write(1, b"[rehearsal] " + mark)
        if self.rank == 0 and len(self.owners) < LABELLED_STEPS:
            self.note_owners()
        if self.recorder:
            self.recorder.note(f"Optimizer {index} ends")
        elif index in self.stepped and self.uses_torchs:  # its second step: everything of a step is compiled
            self.start_recording()
        self.stepped.add(index)

    def index_of(self, optimizer) -> int:
        if not any(optimizer is known for known in self.optimizers):
            self.optimizers.append(optimizer)
        return next(i for i, known in enumerate(self.optimizers) if optimizer is known)

    def called_by_script(self) -> bool:
        """Whether the script itself has called the function that asks this; not torch."""
        return os.path.abspath(sys._getframe(2).f_code.co_filename) == self.script

    def mark_updates(self) -> None:
        """For a script that has none of torch's optimizers: its own work until it clears the gradients."""
        optimizer, model = self.torch.optim.Optimizer, self.torch.nn.Module
        initialise, zero_grad = optimizer.__init__, model.zero_grad
        backward, grad = self.torch.autograd.backward, self.torch.autograd.grad

        def initialise_and_note(*args, **kwargs) -> None:
            self.uses_torchs = True
            initialise(*args, **kwargs)

        def mark_backward() -> None:
            if not self.uses_torchs:
                self.flops_before = self.count_flops()
                if self.recorder:
                    self.recorder.note("Backward ends")

        def backward_and_mark(*args, **kwargs) -> None:
            backward(*args, **kwargs)
            mark_backward()

        def grad_and_mark(*args, **kwargs):
            gradients = grad(*args, **kwargs)
            if self.called_by_script():  # not torch's own, when it traces
                mark_backward()
            return gradients

        def mark_and_zero_grad(model, *args, **kwargs) -> None:
            if not self.uses_torchs and self.called_by_script():
                self.model = model
                self.after_update(0)
            zero_grad(model, *args, **kwargs)

        optimizer.__init__, model.zero_grad = initialise_and_note, mark_and_zero_grad
        self.torch.autograd.backward, self.torch.autograd.grad = backward_and_mark, grad_and_mark

    def mark_waits(self) -> None:
        """The script waits for the GPU before it starts its clock: each rank's own end of the warm-up."""
        wait = self.torch.cuda.synchronize

        def wait_and_mark(*args, **kwargs) -> None:
            wait(*args, **kwargs)
            if self.called_by_script():  # not torch's own, when it tunes
                sys.stdout.flush()
                os.write(1, b"[rehearsal] Waited for the GPU\n")
                os.write(self.collectives, f"Wait {self.count_flops()}\n".encode())
                if self.stepped and not (self.recorder or self.uses_torchs):  # all is compiled: the warm-up ends
                    self.start_recording()
                if self.recorder:
                    self.recorder.note("Wait")

        self.torch.cuda.synchronize = wait_and_mark

    def start_recording(self) -> None:
        from recorder import Recorder

        self.recorder = Recorder(self.torch, self.folder / f"rank{self.rank}.steps")

    # ---- Memory

    def watch_memory(self) -> None:
        if self.rank == 0:
            self.torch.cuda.memory._record_memory_history(
                enabled="all", context="all", stacks="python", max_entries=HISTORY_EVENTS
            )
        with contextlib.suppress(AttributeError):
            self.torch._C._cuda_attach_out_of_memory_observer(self.note_out_of_memory)

    def note_owners(self) -> None:
        """Addresses of what lives from step to step, with the clock of the allocator's own history."""
        addresses = {}
        parameters = list(self.model.parameters()) if self.model else []
        for optimizer in self.optimizers:
            parameters += [p for group in optimizer.param_groups for p in group["params"]]
        for param in parameters:
            addresses[param.untyped_storage().data_ptr()] = "parameters"
            if param.grad is not None:
                addresses[param.grad.untyped_storage().data_ptr()] = "gradients"
            for optimizer in self.optimizers:
                for value in optimizer.state.get(param, {}).values():
                    if self.torch.is_tensor(value) and value.is_cuda:
                        addresses[value.untyped_storage().data_ptr()] = "optimizer state"
        self.owners.append({"time_us": time.time() * 1e6, "addresses": addresses})

    def note_out_of_memory(self, device: int, asked: int, total: int, free: int) -> None:
        self.out_of_memory = {
            "asked_bytes": asked,
            "total_bytes": total,
            "free_bytes": free,
            "allocated_bytes": self.torch.cuda.memory_allocated(device),
        }
        self.write_summary()

    def holders(self) -> list[dict]:
        if self.rank != 0:
            return []
        device = self.torch.cuda.current_device()
        snapshot = self.torch.cuda.memory._snapshot(device)
        return peak_memory.holders_at_peak(snapshot, device, self.owners)

    def write_summary(self) -> None:
        cuda = self.torch.cuda
        if not cuda.is_initialized():
            return
        summary = {
            "rank": self.rank,
            "device": cuda.get_device_name(),
            "peak_allocated_bytes": cuda.max_memory_allocated(),
            "peak_reserved_bytes": cuda.max_memory_reserved(),
            "out_of_memory": self.out_of_memory,
            "holders": self.holders(),
        }
        path = self.folder / f"rank{self.rank}.json"
        path.write_text(json.dumps(summary))
