"""Every place where a process adapts a stock library at run time. The wheels themselves are never changed.

An :class:`Adaptation` says which library, why, and which test holds its effect; the code that makes it goes through its
methods, which raise where the library has not what is replaced or relied on. ``docs/adaptations.md`` is written from
:data:`ALL` (``python ci/adaptations_page.py``), and ``tests/hardware/test_adaptations.py`` looks for adaptations that
are not here. Torch-free.
"""

import dataclasses
import pathlib
import sys
import types
from collections.abc import Callable
from typing import Any

from slime_cli import installed
from slime_cli.errors import EngineError

PAGE = "docs/adaptations.md"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Adaptation:
    """One thing that a library does otherwise in a process of slime's."""

    library: str
    """The distribution's name."""
    what: str
    why: str
    devices: str = "all"
    """``all``, ``cpu``, ``cuda`` or ``no Transformer Engine``: where it is made."""
    test: str
    """The file that would notice if it were gone or wrong."""

    @property
    def version(self) -> str:
        """The one that it was made for: what ``slime_cli.installed`` pins."""
        return installed.TESTED[self.library]

    def replace(self, owner: Any, **values: Any) -> None:
        """Puts ``values`` in the place of attributes that ``owner`` (a module, a class, an object) has."""
        self.rely_on(owner, *values)
        for name, value in values.items():
            setattr(owner, name, value)

    def module(self, found: types.ModuleType) -> None:
        """``found`` is what an import of its name gives from now on."""
        sys.modules[found.__name__] = found

    def no_module(self, name: str) -> None:
        """An import of ``name`` fails from now on."""
        sys.modules[name] = None  # pyright: ignore[reportArgumentType]  (how Python says it)

    def stand_ins(self, folder: pathlib.Path, name: str) -> str:
        """The folder for an import path on which ``name`` is found before the library's own package."""
        if not (folder / name / "__init__.py").is_file():
            raise self.unfit(f"{folder} lacks the stand-in {name}")
        return str(folder)

    def rely_on(self, owner: Any, *names: str) -> None:
        """Raises EngineError unless ``owner`` has all of them."""
        for name in names:
            if not hasattr(owner, name):
                raise self.unfit(f"{getattr(owner, '__name__', type(owner).__name__)} has no {name}")

    def overrides(self, *names: str) -> Callable[[type], type]:
        """Marks a subclass of a library's class that overrides methods which are not meant for it."""

        def mark(kind: type) -> type:
            for name in names:
                if name not in vars(kind) or not any(hasattr(base, name) for base in kind.__bases__):
                    raise self.unfit(f"{kind.__bases__[-1].__name__} has no {name} to override")
            return kind

        return mark

    def unfit(self, what: str) -> EngineError:
        """The error of a library that is not as it was."""
        found = installed.version(self.library) or "(not installed)"
        return EngineError(
            f"{self.library} {found}: {what}, which slime adapts there ({PAGE}: {self.what})",
            f"install the version that it was made for: {installed.command(self.library)}",
        )


CUDA_ON_CPU = Adaptation(
    library="torch",
    what="`torch.cuda` and requests for CUDA devices are answered by the CPU",
    why="Megatron asks torch for CUDA in about 150 places; on a CPU each of them would raise",
    devices="cpu",
    test="tests/training/test_layouts.py",
)
BARRIER_ON_CPU = Adaptation(
    library="torch",
    what="`torch.distributed.barrier` takes no `device_ids`",
    why="Megatron passes them for NCCL, and gloo refuses them",
    devices="cpu",
    test="tests/training/test_layouts.py",
)
UNEVEN_PARTS_ON_CPU = Adaptation(
    library="torch",
    what="`torch.distributed.all_gather` and `reduce_scatter` take parts of unequal length: they are padded on the way",
    why="experts that are split both by expert and by tensor parallelism have as many tokens as routing gives them, and"
    " gloo refuses such parts, which NCCL takes",
    devices="cpu",
    test="tests/training/test_matrix.py",
)
RANDOM_STATE_ON_CPU = Adaptation(
    library="megatron-core",
    what="`tensor_parallel.random` keeps the CPU generator's state in the place of CUDA's",
    why="its functions reach below `torch.cuda`, to a generator that a CPU has not",
    devices="cpu",
    test="tests/hardware/test_adaptations.py",
)
EXPERT_SPLITS_ON_CPU = Adaptation(
    library="megatron-core",
    what="`token_dispatcher.maybe_move_tensor_to_cpu` makes lists of tensors that are on the CPU already",
    why="the dispatcher makes them only when it copies split sizes off a GPU",
    devices="cpu",
    test="tests/hardware/test_adaptations.py",
)
NO_TRANSFORMER_ENGINE = Adaptation(
    library="megatron-bridge",
    what="`import transformer_engine` gives a stand-in; whoever builds something from it gets an error",
    why="megatron-bridge imports it for some of its LoRA layers, whether they are used or not",
    devices="no Transformer Engine",
    test="tests/hardware/test_transformer_engine.py",
)
LORA_WITHOUT_TRANSFORMER_ENGINE = Adaptation(
    library="megatron-bridge",
    what="its LoRA looks for no layers of Transformer Engine",
    why="Megatron has their names as None where the package is not there, which it takes for classes",
    devices="no Transformer Engine",
    test="tests/training/test_lora.py",
)
KERNELS_ON_CPU = Adaptation(
    library="sglang",
    what="`import sgl_kernel` gives a stand-in in a server on a CPU; whoever calls a kernel of it gets an error",
    why="the wheel needs libcuda.so.1; SGLang imports it and then uses torch's own operations",
    devices="cpu",
    test="tests/hardware/test_adaptations.py",
)
NO_MEGATRON_IN_ENGINES = Adaptation(
    library="sglang",
    what="`import megatron` fails in an engine's process, as where Megatron is not installed",
    why="SGLang's tensor dumper imports it for a part that is not used, and importing it sets torch_memory_saver to a "
    "mode in which CUDA graphs can't give their memory back: with `--offload-rollout` the engine ends",
    test="tests/hardware/test_adaptations.py",
)
ATTENTION_ON_CPU = Adaptation(
    library="sglang",
    what="`torch_native` attention computes the sequences of a batch side by side, through SGLang's hook registry",
    why="it takes one after the other, which for many short answers is most of an engine's time",
    devices="cpu",
    test="tests/hardware/test_engine_attention.py",
)
LORA_ON_CPU = Adaptation(
    library="sglang",
    what="LoRA's manager asks for no pinned memory, through SGLang's hook registry",
    why="its `torch_native` backend pins what it hands to kernels, which torch refuses where there is no GPU",
    devices="cpu",
    test="tests/hardware/test_engine_lora.py",
)
FORKED_WORKERS = Adaptation(
    library="sglang",
    what="an engine's schedulers and its detokenizer are forked from its server, through SGLang's hook registry",
    why="spawned ones import SGLang again, each for eight seconds of a core, which is most of an engine's start",
    devices="cpu",
    test="tests/hardware/test_engine_workers.py",
)
EXPERTS_BY_LOCAL_NAMES = Adaptation(
    library="megatron-bridge",
    what="a bridge of ours knows each grouped expert under its name in local layers too",
    why="for some architectures megatron-bridge has the name in Transformer Engine's layers only",
    test="tests/weights/test_bridge_load.py",
)
COMMAND_LINE = Adaptation(
    library="megatron-core",
    what="`sys.argv` is Megatron's command line while its parser runs",
    why="`parse_args` reads `sys.argv` and takes no arguments",
    test="tests/hardware/test_adaptations.py",
)
ASYNC_SAVE = Adaptation(
    library="megatron-core",
    what="`--async-save` stays on where `validate_args` turns it off",
    why="Megatron wants its persistent worker for it, which reads CPU tensors while they are trained on; the writer "
    "that it forks for each save has them as they were",
    test="tests/end_to_end/test_async_save.py",
)
WRITER_QUEUE = Adaptation(
    library="megatron-core",
    what="each checkpoint that is written beside another gets its own queue of results, in a forked process",
    why="two writers on one queue take each other's results; a spawned process imports the whole program again",
    test="tests/training/network/test_checkpoints.py",
)
OPTIMIZER_STATE = Adaptation(
    library="megatron-core",
    what="an optimizer that has not stepped is given its first state before it is saved or loaded into",
    why="torch's AdamW makes it at the first step, and Megatron saves and loads only what is there",
    test="tests/training/network/test_checkpoints.py",
)
LATENT_ATTENTION = Adaptation(
    library="megatron-core",
    what="`MLASelfAttention` norms keys alone where queries are not compressed, and gathers the keys' rotary part so "
    "that its gradient is whole",
    why="two faults: models such as Moonlight are refused, and tensor parallel ranks lose gradients",
    test="tests/training/test_layouts.py",
)
MTP = Adaptation(
    library="megatron-core",
    what="`GPTModel` runs its multi-token-prediction (MTP) layers in passes that train alone, apart from the policy's "
    "loss",
    why="Megatron's own loss of them is a mean over each micro-batch, which depends on the packing, and every pass "
    "computes it",
    test="tests/training/network/test_mtp.py",
)
PACKED_ROTARY = Adaptation(
    library="megatron-core",
    what="rotary embeddings of a built model take their angles from the pack (their `__class__` is a subclass)",
    why="GPTModel builds them itself, and local layers know one sequence a row",
    devices="local layers",
    test="tests/training/network/test_attention.py",
)
FUSED_ROTARY = Adaptation(
    library="megatron-core",
    what="`rope_utils` has a fused rotary embedding, a Triton kernel of slime's, for local layers",
    why="local layers turn queries and keys in ten passes over them; the kernel is used where it proves right",
    devices="local layers",
    test="tests/hardware/test_kernels.py",
)
WEIGHT_GRADIENTS = Adaptation(
    library="megatron-core",
    what="`import fused_weight_gradient_mlp_cuda` gives functions of slime's that add a weight gradient to its sum "
    "inside the GEMM",
    why="Megatron takes them from apex alone; torch has such a GEMM. Used on a GPU where it proves right",
    devices="cuda",
    test="tests/hardware/test_kernels.py",
)
STATELESS_ADAM = Adaptation(
    library="megatron-core",
    what="with `--use-stateless-adam`, Megatron's optimizers hold an Adam without moments",
    why="Megatron chooses among its own optimizers by name",
    test="tests/training/network/test_stateless_adam.py",
)
TIED_OUTPUT = Adaptation(
    library="megatron-bridge",
    what="a model's config says whether its output layer is tied",
    why="megatron-bridge asks the config, where its own providers put it and Megatron does not",
    test="tests/weights/test_bridge.py",
)
QUANTISED_READ = Adaptation(
    library="megatron-bridge",
    what="the tensors of a quantised checkpoint are those that it stands for, in bfloat16",
    why="megatron-bridge reads FP8 of DeepSeek's models alone",
    test="tests/weights/test_quantised.py",
)

ALL: dict[str, Adaptation] = {name: value for name, value in globals().items() if isinstance(value, Adaptation)}
