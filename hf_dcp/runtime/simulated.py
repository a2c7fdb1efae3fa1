"""All ranks of a plan in one process, on one device: a whole plan proven without a group of processes.

The ranks take turns: each executes its program until it waits for a message that nobody has sent yet. Everything else is
what a real rank does, so that kernels, tables and programs are the ones of a real run; messages are copies of memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from hf_dcp.planning.plan import Op, RankPlan
from hf_dcp.runtime.cases import Inputs
from hf_dcp.runtime.exchange import _Pending
from hf_dcp.runtime.executor import Executor
from hf_dcp.runtime.handle import DcpPlan
from hf_dcp.runtime.messages import PreparedMessage
from hf_dcp.runtime.passes import Features, Prepared
from hf_dcp.runtime.streams import DeviceExchanges

Mail = dict[tuple[int, int, int, bool], Tensor]
"""Messages under way: (sender, receiver, exchange, partial)."""


@dataclass
class _LocalExchanges(DeviceExchanges):
    rank: int = -1
    mail: Mail = field(default_factory=dict)

    def _post(self, pairs: list[tuple[PreparedMessage, Tensor]], partial: bool) -> None:
        for message, buffer in pairs:
            if message.incoming:
                self._receiving.setdefault(message.exchange, []).append(_Pending(message, buffer, None))
            else:
                self._count(message, buffer)
                self.mail[self.rank, message.peer, message.exchange, partial] = buffer.clone()

    def ready(self, exchange: int) -> bool:
        """Whether all messages of an exchange have been sent."""
        return all(self._key(pending.message) in self.mail for pending in self._receiving.get(exchange, []))

    def _key(self, message: PreparedMessage) -> tuple[int, int, int, bool]:
        return message.peer, self.rank, message.exchange, message.partial

    def _where(self, message: PreparedMessage) -> str:
        return f"exchange {message.exchange} of {self.which} on simulated rank {self.rank}"

    def _complete(self, pending: _Pending) -> None:
        pending.buffer.copy_(self.mail.pop(self._key(pending.message)))


def _local(base: type[Executor], dcp_plan: DcpPlan, mail: Mail) -> Executor:
    """An executor of class ``base`` whose messages go through ``mail``."""

    class LocalExecutor(base):  # type: ignore[misc,valid-type]
        communicator = None

        def exchanges(self, prepared: Prepared, which: str) -> Any:
            plain = super().exchanges(prepared, which)
            return _LocalExchanges(
                plain.table, None, which, plain.digest, plain.device, plain.stats, plain.call, plain.buffers,
                rank=self.plan.rank, mail=mail,
            )  # fmt: skip

    return LocalExecutor(dcp_plan)


class SimulatedRanks:
    """The ranks of one plan.

    Args:
        plans: of all ranks, in order.
        device: where everything runs.
        kernel: "auto", "aten", "triton" or "flash".
        mail: where messages are put; None: a new dictionary.
    """

    def __init__(
        self,
        plans: Sequence[RankPlan],
        device: torch.device | str = "cpu",
        kernel: str = "auto",
        mail: Mail | None = None,
    ) -> None:
        self.mail: Mail = {} if mail is None else mail
        self.device = torch.device(device)
        self.dcp_plans = [DcpPlan(plan, device=device, kernel=kernel) for plan in plans]
        self.executors = [_local(plan.executor_class, plan, self.mail) for plan in self.dcp_plans]
        self.tokens = [torch.from_numpy(plan.local_tokens()).to(self.device) for plan in plans]

    def execute(self, inputs: Inputs, features: Features) -> dict[str, Tensor]:
        """Forward and backward of the whole batch.

        Returns:
            out, dq, dk, dv [N, heads, D] and lse [N, heads] of the batch in fp64 on the CPU, and dsinks [heads] if there
            are sinks.
        """
        mine = [[self._rows(x, tokens) for x in (inputs.q, inputs.k, inputs.v)] for tokens in self.tokens]
        sinks = None if inputs.sinks is None else inputs.sinks.to(self.device)
        runs = [e.forward_pass(e, features, q, k, v, sinks) for e, (q, k, v) in zip(self.executors, mine)]
        self._take_turns(runs)
        forward = [run.results() for run in runs]
        grads = [self._rows(inputs.dout, tokens).transpose(1, 2) for tokens in self.tokens]
        backward = [
            e.backward_pass(e, features, grad, q, k, v, sinks, result)
            for e, grad, (q, k, v), result in zip(self.executors, grads, mine, forward)
        ]
        self._take_turns(backward)
        gradients = [run.results() for run in backward]
        results = {"out": self._joined(inputs.q, [r.out.transpose(1, 2) for r in forward])}
        results["lse"] = self._joined(inputs.q[..., 0], [r.lse.transpose(0, 1)[None] for r in forward])
        for i, (name, like) in enumerate((("dq", inputs.q), ("dk", inputs.k), ("dv", inputs.v))):
            results[name] = self._joined(like, [g[i] for g in gradients])  # type: ignore[misc]
        if sinks is not None:
            results["dsinks"] = sum(g[3].double().cpu() for g in gradients if g[3] is not None)  # type: ignore
        return results

    def _take_turns(self, runs: list[Any]) -> None:
        """Execute all programs, each as far as its messages have been sent, until all have ended."""
        at = [0] * len(runs)
        while any(at[i] < len(run.prepared.program) for i, run in enumerate(runs)):
            before = list(at)
            for i, run in enumerate(runs):
                while at[i] < len(run.prepared.program):
                    op, argument = run.prepared.program[at[i]]
                    if op == Op.WAIT and not run.exchanges.ready(argument):
                        break
                    run.step(op, argument)
                    at[i] += 1
            if at == before:
                raise RuntimeError("every rank waits for a message that no rank sends: the plan is not executable")
        if self.mail:
            raise RuntimeError(f"{len(self.mail)} messages were sent that no rank waits for")

    def _rows(self, x: Tensor, tokens: Tensor) -> Tensor:
        """[N, heads, D] -> [1, heads, S, D] of one rank, with a dummy row if it has no token."""
        x = x.to(self.device)
        rows = x[tokens] if len(tokens) else torch.ones_like(x[:1])
        return rows.transpose(0, 1)[None]

    def _joined(self, like: Tensor, parts: list[Tensor]) -> Tensor:
        whole = torch.zeros(like.shape, dtype=torch.float64)
        for tokens, part in zip(self.tokens, parts):
            whole[tokens.cpu()] = part[0].transpose(0, 1)[: len(tokens)].double().cpu()
        return whole
