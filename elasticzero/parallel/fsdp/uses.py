"""Records which parameters a rank has used under FSDP2, and makes zero gradients for the others.

FSDP2 leaves a parameter without a gradient out of what it reduces, so that ranks which have used
different parameters would add up different tensors. It gathers and reduces a block when the block
runs: all ranks must run the same blocks in the same order, which `blocks` checks.

A backward may be for some parameters only, the same on all ranks. No other one gets a gradient
then, and a group of FSDP2 that has none of them reduces nothing.

FSDP2 puts the gathered parameters into the modules when it is told that a block runs. So what a
script calls past the block, or puts in their place, ends in a sentence. So does what it changes in
them, which is lost when they are freed: in the first step, and in the one after each verification,
this rank's rows of them are compared with its shard. A backward whose gradients are differentiated
again needs the gathered parameters after they are freed, and is refused.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from elasticzero.errors import UserError
from elasticzero.parallel.parameter_changes import FixedMemory
from elasticzero.rank_groups import same_number
from elasticzero.spans import fsdp_rows
from elasticzero.state.digests import same_bits
from elasticzero.torch_internals.fsdp import (
    divide_anew,
    groups_below,
    groups_of,
    has_gradients,
    leaf_of,
    owners,
    present_parameter,
    rows_of,
    set_up,
)
from elasticzero.torch_internals.tensors import without_torch_functions


class Uses:
    """Tracks what one rank has used in a global batch."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Uses:
        """Returns itself: a copy of a module has its hooks, and is not used by the model."""
        return self

    def __init__(
        self,
        model: nn.Module,
        parameters: Mapping[str, nn.Parameter],
        root: nn.Module,
        modules: Sequence[nn.Module],
        memory: FixedMemory,
    ) -> None:
        """Wraps FSDP2's groups.

        Args:
            model: The model, whose names of modules appear in errors.
            parameters: The parameters by name, as FSDP2 has made them.
            root: The model, or what is around it.
            modules: The modules that have a group of their own.
            memory: The memory of the parameters, which is theirs in each forward.
        """
        self.names: set[str] = set()
        """Parameters that this rank has used."""
        self.blocks = 0
        """Stands for the modules that have run, in their order."""
        self.compares = True
        """Gathered parameters are compared with the shards before they are freed."""
        self.compared_s = 0.0
        """Seconds that comparisons of the present global batch, or of the newest that had any, have
        taken."""
        self._counts = True
        """The newest backward has a weight."""
        self._runs = False
        """True while a backward of the session runs, and not `torch.autograd.grad` of the script,
        which gives parameters no gradient."""
        self._only: Collection[str] | None = None
        """The parameters that the newest backward is for; None: all."""
        self._whole = {n: p for n, p in parameters.items() if not isinstance(p, DTensor)}
        self._memory = memory
        self._root = root
        """FSDP2 finds the modules below it when its own state is set up."""
        self.groups = list(groups_below(root))
        """What FSDP2 gathers and reduces together."""
        self._module_names = {module: name for name, module in model.named_modules()}
        name_of = {id(parameter): name for name, parameter in parameters.items()}
        self._divided = {
            name_of[id(of.sharded_param)]: of for group in self.groups for of in group.fsdp_params
        }
        self._names = {id(of): name for name, of in self._divided.items()}
        for group in self.groups:
            group.pre_backward = partial(self._begin_backward, group, group.pre_backward)
            group.post_backward = partial(self._reduce, group, group.post_backward)
            group.reshard = partial(self._reshard, group, group.reshard)
            for owner in owners(group):
                owner.register_forward_pre_hook(partial(self._check_gathered, group))
        for index, module in enumerate(modules, 1):
            # FSDP2's own hook, which gathers, comes after it
            module.register_forward_pre_hook(partial(self._enter, index), prepend=True)
            module.register_forward_hook(self._leave)

    def compare(self) -> None:
        """Lets gathered parameters be compared in the next global batch."""
        if not self.compares:
            self.compares, self.compared_s = True, 0.0

    def free(self) -> None:
        """Frees all gathered parameters."""
        for group in self.groups:
            if group.is_unsharded:
                group.reshard()

    def divide_anew(self, mesh: DeviceMesh, rows: Mapping[str, Tensor] | None) -> None:
        """Has FSDP2 divide the parameters, of which none is gathered, over another mesh.

        Args:
            mesh: The mesh.
            rows: This rank's rows by parameter, as `rows.room` has them; None: they stay as they
                are.
        """
        data = None
        if rows is not None:
            data = {id(of): rows[name] for name, of in self._divided.items()}
        for group in self.groups:
            divide_anew(group, mesh, data)

    def clear(self) -> None:
        """Begins a new global batch."""
        self.names.clear()
        self.blocks = 0

    def backward(self, loss: Tensor, *, counts: bool, only: Collection[str] | None = None) -> None:
        """Computes the gradients of a micro-batch, and records which parameters it has used.

        Args:
            loss: What is differentiated: one number.
            counts: True: the micro-batch has a weight; else it uses nothing, and adds zeros.
            only: The parameters that get gradients; None: all.

        Raises:
            UserError: A parameter got a gradient after those of its block were summed, or a loss
                without weight has none to give.
        """
        self._counts, self._only = counts, only
        leaves = [leaf for leaf in self.leaves(only) if leaf.requires_grad]
        if not counts and not loss.requires_grad:
            raise UserError(
                "the loss of a micro-batch of weight 0 does not come from the model, and zero3 "
                "needs its backward on all ranks: compute it from the output, as 0 * output.sum()"
            )
        kept = [] if counts else [(leaf, leaf.grad) for leaf in self._whole.values()]
        unused = [] if counts else [leaf for leaf in leaves if leaf.grad is None]
        for whole, _ in kept:  # what a micro-batch of weight 0 would add to may be NaN
            whole.grad = None
        self._runs = True
        try:
            if only is None:
                loss.backward()
            elif leaves:
                loss.backward(inputs=leaves)
        finally:
            self._runs = False
        for leaf in unused:
            leaf.grad = None
        for whole, gradient in kept:
            whole.grad = gradient
        if counts:
            self.names |= {name for name, p in self._whole.items() if p.grad is not None}
        for name, of in self._divided.items():
            if (local := leaf_of(of)) is not None and local.grad is not None:
                raise UserError(
                    f"parameter {name!r} got a gradient after zero3 had summed those of its block "
                    "over the ranks: call the module that has it inside the forward of its block"
                )

    def leaves(self, only: Collection[str] | None = None) -> list[Tensor]:
        """Returns the tensors to which autograd gives gradients, those of some parameters or all; a
        parameter that was never gathered has none."""
        unique: list[Tensor] = []
        for name in (*self._whole, *self._divided) if only is None else only:
            leaf = self._whole[name] if name in self._whole else leaf_of(self._divided[name])
            if leaf is not None:
                unique.append(leaf)
        return unique

    def named_leaves(self) -> dict[str, Tensor]:
        """Returns the gathered parameters to which autograd gives gradients, by name."""
        leaves = ((name, leaf_of(of)) for name, of in self._divided.items())
        return {name: leaf for name, leaf in leaves if leaf is not None}

    def _begin_backward(
        self, group: Any, pre_backward: Callable[..., None], *arguments: Any
    ) -> None:
        """Runs the group's own `pre_backward`.

        Args:
            group: A group of FSDP2.
            pre_backward: The group's own method.
            *arguments: What FSDP2 passes to it.

        Raises:
            UserError: The gradients are to be differentiated again.
        """
        if torch.is_grad_enabled():  # autograd enables it under create_graph
            raise UserError(
                "the script differentiates gradients (create_graph=True, as a gradient penalty "
                f"does) of {self._called(group)}, whose parameters zero3 frees when their "
                "gradients are computed: use ddp, zero1 or zero2"
            )
        pre_backward(*arguments)

    def _called(self, group: Any) -> str:
        """Returns how errors name the module whose parameters a group has."""
        name = self._module_names.get(group.modules[0], "")
        return f"module {name!r}" if name else "the model"

    def _reshard(self, group: Any, reshard: Callable[[], None]) -> None:
        """Frees the gathered parameters of a group by its own `reshard`.

        Args:
            group: A group of FSDP2.
            reshard: The group's own method.

        Raises:
            UserError: The script has changed one of them.
        """
        if self.compares and group.is_unsharded:
            began_s = time.monotonic()
            changed = next(filter(_is_changed, group.fsdp_params), None)
            self.compared_s += time.monotonic() - began_s
            if changed is not None:
                raise UserError(
                    f"the script has changed parameter {self._names[id(changed)]!r} in or after a "
                    f"forward of {self._called(group)}, where zero3 has a copy that is freed: "
                    "change it in place after session.step(), or use ddp, zero1 or zero2"
                )
        reshard()

    def _reduce(self, group: Any, post_backward: Callable[..., None], *unused: Any) -> None:
        """Runs the group's own `post_backward`, with zeros for what this rank has not used.

        Where the script takes gradients by `torch.autograd.grad`, as of inputs, nothing is reduced.
        The root stays gathered then as after its forward, since the script may have its parameters.

        Args:
            group: A group of FSDP2.
            post_backward: The group's own method.
            *unused: What autograd passes to it.

        Raises:
            UserError: A backward of the script's own adds to gradients that are hidden.
        """
        for of in group.fsdp_params:
            held = of.sharded_param.grad
            if held is not None and not isinstance(held, DTensor):
                with without_torch_functions():
                    held.clone()  # what hides a gradient refuses whatever autograd does with it
            leaf, name = leaf_of(of), self._names[id(of)]
            if leaf is None or not leaf.requires_grad:
                continue
            if leaf.grad is not None or of.unsharded_accumulated_grad is not None:
                if self._counts:
                    self.names.add(name)
                elif leaf.grad is not None:
                    leaf.grad = torch.zeros_like(leaf)
            elif self._runs and group.reduce_grads and (self._only is None or name in self._only):
                leaf.grad = torch.zeros_like(leaf)
        if self._runs or has_gradients(group) or group.modules[0] is not self._root:
            post_backward(*unused)

    def _enter(self, index: int, module: nn.Module, inputs: Any) -> None:
        """Counts a module that runs.

        Args:
            index: The module's number, from 1.
            module: The module.
            inputs: The inputs of its forward, which do not matter here.

        Raises:
            UserError: A parameter of the module is replaced by one that is not FSDP2's, or has
                other memory.
        """
        held = [of for group in groups_of(module) for of in group.fsdp_params]
        if (error := self._memory.difference(self._names[id(of)] for of in held)) is not None:
            raise error
        for of in held:
            present = present_parameter(of)
            if present is not of.sharded_param and present is not leaf_of(of):
                raise UserError(
                    f"parameter {self._names[id(of)]!r} is replaced, as torch.func.functional_call "
                    "does it, and zero3 computes with its own: step one network after the other "
                    "by only=, or use ddp, zero1 or zero2"
                )
        set_up(self._root)  # else the first module that runs is the root
        if torch.is_grad_enabled():
            self.blocks = (self.blocks * 8191 + index) % same_number.MODULUS

    def _leave(self, module: nn.Module, inputs: Any, output: Any) -> None:
        """Frees what a forward without gradients has gathered. FSDP2 keeps the parameters of the
        outermost module for a backward, and what a script changed in these would be lost.

        Args:
            module: The module.
            inputs: The inputs of its forward, which do not matter here.
            output: Its output, likewise.
        """
        if torch.is_grad_enabled() or torch.compiler.is_compiling():
            return
        for group in groups_of(module):
            if group.is_unsharded:
                group.reshard()

    def _check_gathered(self, group: Any, module: nn.Module, inputs: Any) -> None:
        """Checks that the parameters of a module that is called are gathered.

        Args:
            group: The group of FSDP2 that has them.
            module: The module.
            inputs: The inputs of its forward, which do not matter here.

        Raises:
            UserError: The module is called outside of the forward that gathers them.
        """
        if torch.compiler.is_compiling() or not group.is_sharded:
            return
        outer = self._module_names.get(group.modules[0], "")
        raise UserError(
            f"module {self._module_names.get(module, '')!r} was called outside of the forward of "
            f"{repr(outer) if outer else 'the model'}, where zero3 gathers its parameters: call it "
            "there, or a method that was registered by "
            "torch.distributed.fsdp.register_fsdp_forward_method, or use ddp, zero1 or zero2"
        )


def _is_changed(of: Any) -> bool:
    """Tells whether a parameter, as it was gathered, differs from this rank's rows of it."""
    leaf, local = leaf_of(of), rows_of(of.sharded_param)
    if leaf is None or not local.numel():
        return False
    mesh = of.mesh_info
    span = fsdp_rows(of.sharded_param.shape, mesh.shard_mesh_size, mesh.shard_mesh_rank)
    gathered = leaf.detach().reshape(-1)[span.start : span.stop]
    return not same_bits(gathered, local.reshape(-1).to(gathered))
