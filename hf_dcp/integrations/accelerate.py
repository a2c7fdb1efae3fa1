"""`DcpParallelismConfig`: DCP as Accelerate's parallelism configuration.

Accelerate and Trainer see ``cp_size == 1``, so that none of their own context parallelism runs; the mesh has a
dimension named ``"cp"``, so that all ranks of a DCP group get the same batches.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from dataclasses import InitVar, asdict, dataclass
from typing import Any

import torch.distributed as dist
from torch import nn

from hf_dcp.config import DcpConfig
from hf_dcp.data.batched import BatchedDataset
from hf_dcp.data.collator import DcpCollator
from hf_dcp.data.rows import MaskLike
from hf_dcp.integrations.environment import config_from_environment, require_known_variables, setting
from hf_dcp.integrations.mesh import MeshWithDcp
from hf_dcp.integrations.process_groups import collective_device, make_group, require_agreement, single_group
from hf_dcp.lookahead.depth import Depth, derive_depth
from hf_dcp.lookahead.redis_settings import SCHEMES, RedisSettings
from hf_dcp.lookahead.session import Session

PLAN_STORES = ("torch", "local", *SCHEMES)


@dataclass(repr=False, eq=False)
class DcpParallelismConfig(MeshWithDcp):
    """Dynamic context parallelism for Trainer (``TrainingArguments(parallelism_config=...)``) and Accelerator.

    Fields left at None come from environment variables, so that a launcher can set them.

    Args:
        dcp_size: ranks of a DCP group, which train on one batch together; ``HF_DCP_SIZE``, else 1. It must divide the
            number of processes; what is left over is data parallel.
        dcp: how batches are planned; ``HF_DCP_BLOCK_SIZE`` and ``HF_DCP_PLACEMENT`` set two of its fields where it is
            None.
        plan_store: where ranks exchange plans: ``"torch"``, the store of torch.distributed, or the URL of a Redis
            server, ``"redis://host:6379/0"`` or ``"rediss://..."`` with TLS; ``HF_DCP_PLAN_STORE``, else ``"torch"``.
            Not kept on this object, which is shown and saved with the training arguments: it may hold a password.
        plan_timeout: most seconds to wait for a plan of another rank before a rank makes it itself;
            ``HF_DCP_PLAN_TIMEOUT``, else 60.
        lookahead: so many batches ahead are planned while one is trained on; DataLoader workers and their prefetched
            batches are derived from it. ``HF_DCP_LOOKAHEAD``; None: what workers and prefetched batches make.

    Raises:
        ValueError: for sizes out of range, a plan store that can't be, or ``cp_size`` or ``sp_size`` above 1, which
            would cut sequences again.
    """

    # None until __post_init__ has looked at the environment.
    dcp_size: int = None  # type: ignore[assignment]
    dcp: DcpConfig = None  # type: ignore[assignment]
    plan_timeout: float = None  # type: ignore[assignment]
    lookahead: int | None = None
    plan_store: InitVar[str | None] = None

    def __post_init__(self, plan_store: str | None) -> None:  # type: ignore[override]
        require_known_variables(os.environ)
        self._size_given = self.dcp_size is not None or "HF_DCP_SIZE" in os.environ
        self.dcp_size = setting("dcp_size", self.dcp_size, "HF_DCP_SIZE", 1, int)
        plan_store = plan_store or os.environ.get("HF_DCP_PLAN_STORE") or "torch"
        self.plan_timeout = setting("plan_timeout", self.plan_timeout, "HF_DCP_PLAN_TIMEOUT", 60.0, float)
        self.lookahead = setting("lookahead", self.lookahead, "HF_DCP_LOOKAHEAD", None, int)
        self.dcp = config_from_environment() if self.dcp is None else self.dcp
        if self.dcp_size < 1:
            raise ValueError(f"dcp_size must be at least 1, not {self.dcp_size}")
        if self.plan_timeout <= 0:
            raise ValueError(f"plan_timeout must be above 0 seconds, not {self.plan_timeout}")
        if not isinstance(self.dcp, DcpConfig):
            raise ValueError(f"dcp must be a DcpConfig, not {type(self.dcp).__name__}")
        if plan_store.partition(":")[0] not in PLAN_STORES:
            raise ValueError(
                'plan_store must be "torch", or a URL such as "redis://host:6379/0": the given one is of another kind'
            )
        if plan_store.partition(":")[0] in SCHEMES:
            RedisSettings.parse(plan_store)
        derive_depth(self.lookahead, None, None)
        super().__post_init__()
        if self.cp_size > 1 or self.sp_size > 1:
            raise ValueError(
                f"cp_size={self.cp_size} and sp_size={self.sp_size} beside dcp_size={self.dcp_size} would cut "
                f"sequences "
                "twice: leave cp_size and sp_size at 1 (also in the YAML file of accelerate)"
            )
        self._number = next(_NUMBERS)
        _SESSIONS[self._number] = Session(self.dcp, plan_store)

    def build_device_mesh(self, device_type: str) -> Any:
        """Settle the sizes, make the mesh and the DCP group. Collective over all processes.

        Raises:
            ValueError: on every process, if the sizes don't fit the number of processes, or settings differ.
        """
        self._refuse_calling_trainer()
        world = dist.get_world_size() if dist.is_initialized() else 1
        self.settle_sizes(world)
        session = self.session
        if not dist.is_initialized():
            session.group = single_group(self.plan_timeout)
            return None
        if world > 1 and self.dcp_enabled and session.plan_store.partition(":")[0] == "local":
            raise ValueError(
                f"plan_store='local' is for one rank, but dcp_size is {self.dcp_size}: use plan_store='torch' or a "
                "Redis URL"
            )
        hosts = require_agreement(self._fingerprint(), collective_device(device_type))
        mesh = super().build_device_mesh(device_type) if world > 1 else None
        if mesh is None:
            session.group = single_group(self.plan_timeout)
        else:
            session.group = make_group(mesh, hosts, session.plan_store, self.plan_timeout)
        return mesh

    @staticmethod
    def _refuse_calling_trainer() -> None:
        """A trainer that DCP would silently break may have no callback of ours that refuses it."""
        from hf_dcp.integrations.trainer_checks import calling_trainer
        from hf_dcp.integrations.trl_checks import refuse_trainer

        trainer = calling_trainer()
        if trainer is not None:
            refuse_trainer(type(trainer))

    # What users call.

    @property
    def session(self) -> Session:
        """What collator, callback and loader share; copies of this object have the same one."""
        if self._number not in _SESSIONS:
            raise ValueError("this DcpParallelismConfig is of another process: make it anew in each process")
        return _SESSIONS[self._number]

    def setup(self, device_type: str = "cpu") -> None:
        """Make the DCP group, where neither Trainer nor Accelerator does. Collective over all processes."""
        self.get_device_mesh(device_type)

    def plan_ahead(
        self, workers: int | None = None, prefetch: int | None = None, lookahead: int | None = None
    ) -> Depth:
        """How far plans run ahead with these settings of a DataLoader; ``loader_options()`` of it is what to give one.

        `DcpDataLoader` and `DcpStatsCallback` call it. Collective over all processes, once the group is set up.

        Args:
            workers, prefetch: ``num_workers`` and ``prefetch_factor`` where they are set.
            lookahead: None: that of this object.

        Raises:
            ValueError: if settings contradict each other, or differ between processes.
        """
        if None not in (lookahead, self.lookahead) and lookahead != self.lookahead:
            raise ValueError(
                f"lookahead={lookahead} here and {self.lookahead} in DcpParallelismConfig: leave one of them out"
            )
        depth = derive_depth(self.lookahead if lookahead is None else lookahead, workers, prefetch)
        if dist.is_initialized() and dist.get_world_size() > 1:
            device = collective_device("cpu" if dist.get_backend() == "gloo" else "cuda")
            require_agreement(f"num_workers={depth.workers} prefetch_factor={depth.prefetch}", device)
        self.session.run_ahead(depth)
        return depth

    def batched(
        self,
        dataset: Any,
        tokens_per_batch: int | None = None,
        lengths: str | Sequence[int] = "length",
        seed: int = 0,
        overlong: str = "error",
        shuffle: bool = True,
        multiple_of: int | None = None,
    ) -> BatchedDataset:
        """``dataset`` as whole batches of the DCP group; see `hf_dcp.data.batched.BatchedDataset`.

        Args:
            tokens_per_batch: most tokens of a batch; None: those of the longest row.
            multiple_of: of which the number of batches is a multiple; None: the number of data parallel groups.

        Raises:
            ValueError: for overlong or empty rows, or sizes that don't fit the number of processes.
        """
        if multiple_of is None:
            world = dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))
            self.settle_sizes(world)
            multiple_of = self.data_parallel_size
        options = {"seed": seed, "overlong": overlong, "shuffle": shuffle, "multiple_of": multiple_of}
        return BatchedDataset.of(dataset, tokens_per_batch, lengths, **options)

    def collator(self, tokenizer: Any = None, mask: MaskLike = "causal", model: nn.Module | None = None) -> DcpCollator:
        """The data collator; see `hf_dcp.data.collator.DcpCollator`.

        Args:
            tokenizer: only its padding token is used, as the token of dummy rows.
            model: makes the model known, where no Trainer with a `DcpStatsCallback` does.
        """
        if model is not None:
            self.attach(model)
        token = getattr(tokenizer, "pad_token_id", None)
        return DcpCollator(self.session, mask, dummy_token=0 if token is None else token)

    def preference_collator(self, tokenizer: Any) -> Any:
        """The data collator for TRL's DPOTrainer and RewardTrainer; see
        `hf_dcp.integrations.preferences.PreferenceCollator`.

        Args:
            tokenizer: its padding token, else its end-of-text token, pads TRL's tensors.

        Raises:
            ValueError: for a tokenizer without either.
        """
        from hf_dcp.integrations.preferences import PreferenceCollator

        token = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
        if token is None:
            raise ValueError("the tokenizer has no pad_token: set tokenizer.pad_token")
        return PreferenceCollator(self.session, token)

    def attach(self, model: nn.Module) -> None:
        """Check a model and make it known to this run's collators.

        Raises:
            ValueError: if DCP can't run it.
        """
        from hf_dcp.integrations.binding import attach

        attach(model, self.session)

    # What is shown and saved.

    def _fingerprint(self) -> str:
        dp = f"{self.dp_replicate_size}x{self.dp_shard_size}"
        return f"dcp_size={self.dcp_size} tp_size={self.tp_size} dp={dp} plan_timeout={self.plan_timeout:g} {self.dcp}"

    def __repr__(self) -> str:
        return (
            f"DcpParallelismConfig(dcp_size={self.dcp_size}, dp_replicate_size={self.dp_replicate_size}, "
            f"dp_shard_size={self.dp_shard_size}, tp_size={self.tp_size}, plan_timeout={self.plan_timeout}, "
            f"lookahead={self.lookahead}, dcp={self.dcp})"
        )

    def to_json(self) -> dict[str, Any]:
        """The settings."""
        names = ("dcp_size", "dp_replicate_size", "dp_shard_size", "tp_size", "plan_timeout", "lookahead")
        return {name: getattr(self, name) for name in names} | {"dcp": asdict(self.dcp)}

    def __getstate__(self) -> dict[str, Any]:
        """Without the mesh, which is of this process."""
        return {name: value for name, value in self.__dict__.items() if name != "device_mesh"}


_NUMBERS = itertools.count()
_SESSIONS: dict[int, Session] = {}
"""Here and not on the configuration, which is copied and saved with the training arguments."""
