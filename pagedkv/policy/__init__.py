"""Traces, the pool's policies on them, and what no policy can beat. Needs no torch."""

from pagedkv.policy.readers import read_traces
from pagedkv.policy.simulation import SimulationResult, simulate
from pagedkv.policy.synthetic import WORKLOADS, make_workload
from pagedkv.policy.trace import Problem, Request, Trace, make_trace

__all__ = [
    "WORKLOADS",
    "Problem",
    "Request",
    "SimulationResult",
    "Trace",
    "make_trace",
    "make_workload",
    "read_traces",
    "simulate",
]
