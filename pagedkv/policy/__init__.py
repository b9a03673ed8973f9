"""Traces, the pool's policies on them, and what no policy can beat. Needs no torch."""

from pagedkv.policy.breakeven import PROVIDERS, Bill, Rules, bill_trace
from pagedkv.policy.costs import CostModel, Costs
from pagedkv.policy.models import Model, find_model, model_from_config
from pagedkv.policy.planner import GroupPlan, MemoryPlan, plan_memory
from pagedkv.policy.readers import read_traces
from pagedkv.policy.simulation import SimulationResult, simulate
from pagedkv.policy.sizing import Need, needed_blocks
from pagedkv.policy.synthetic import WORKLOADS, make_workload
from pagedkv.policy.trace import Problem, Request, Trace, make_trace

__all__ = [
    "PROVIDERS",
    "WORKLOADS",
    "Bill",
    "CostModel",
    "Costs",
    "GroupPlan",
    "MemoryPlan",
    "Model",
    "Need",
    "Problem",
    "Request",
    "Rules",
    "SimulationResult",
    "Trace",
    "bill_trace",
    "find_model",
    "make_trace",
    "make_workload",
    "model_from_config",
    "needed_blocks",
    "plan_memory",
    "read_traces",
    "simulate",
]
