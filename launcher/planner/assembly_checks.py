"""Contradictions between roles, backend, front end and benchmark of a job. Pure."""

from collections.abc import Collection, Iterator, Mapping, Sequence

from exporter.contract.lazy_dataclass import dataclass
from launcher.jobfile.backend_kinds import ENGINES
from launcher.jobfile.resources import SERVING_ROLES, command_argv
from launcher.jobfile.serving import BenchmarkSpec, EngineRoleSpec
from launcher.plan.plan import COUNTING_KINDS
from launcher.planner.backends.base import DISAGGREGATED, Backend, BackendContext, BackendWorker
from launcher.planner.backends.command import PORT_PLACEHOLDER
from launcher.planner.backends.launched import LaunchedBackend
from launcher.planner.benchmarks import BENCHMARKS, Endpoint
from launcher.planner.frontends import FRONTENDS, Frontend
from launcher.planner.roles import Role


@dataclass(frozen=True)
class JobParts:
    """Parts of a job that must fit together."""

    roles: Sequence[Role]
    backends: Mapping[str, Backend]  # by role
    served: Sequence[BackendWorker]  # workers behind the front end
    frontend: Frontend | None
    benchmark: BenchmarkSpec | None
    endpoint: Endpoint | None  # where clients send requests


def assembly_problems(context: BackendContext, parts: JobParts, services: Collection[str]) -> list[str]:
    """Find all problems, each with place, value and fix; ``services`` are the roles of tasks that are not workers."""
    found = [*_role_problems(context, parts, services)]
    for role in parts.roles:
        backend = parts.backends[role.name]
        if not (
            backend.is_service and command_argv(role.options)
        ):  # a user's own command may divide the GPUs in any way
            found += backend.problems(context, role)
    found += [*_frontend_problems(context, parts), *_benchmark_problems(context, parts)]
    found += _readiness_problems(context, parts)
    return list(dict.fromkeys(found))


def _role_problems(context: BackendContext, parts: JobParts, services: Collection[str]) -> Iterator[str]:
    spec, names = context.spec, [role.name for role in parts.roles]
    for role in parts.roles:
        yield from parts.backends[role.name].granularity_problems(context, role)
    yield from _mixed_problems(context, parts)
    for name in sorted(set(names) & set(services)):
        key = context.role_key(name, "role")
        yield f"{key}: the job already has a service called {name}; choose another name for the role"
    for name in SERVING_ROLES:
        if name not in names and getattr(spec.backend, name) != EngineRoleSpec():
            have = ", ".join(names)
            yield f"backend.{name}: the job has no {name} workers, only {have}; leave it out, or set {name}_workers"


def _mixed_problems(context: BackendContext, parts: JobParts) -> Iterator[str]:
    """Refuse agg together with prefill or decode: engines and front ends support one or the other.

    A user's own command without a front end may give these roles any meaning.
    """
    counts = {role.name: role.count for role in parts.roles}
    separate = [name for name in DISAGGREGATED if name in counts]
    if not separate or "agg" not in counts or (context.spec.backend.type not in ENGINES and parts.frontend is None):
        return
    others = " and ".join(f"{counts[name]} {name}" for name in separate)
    yield (
        f"resources.agg_workers: {counts['agg']} agg in addition to {others}; an agg worker does the work of both; "
        f"leave agg out, or {' and '.join(separate)}"
    )


def _frontend_problems(context: BackendContext, parts: JobParts) -> Iterator[str]:
    spec, frontend = context.spec, parts.frontend
    kind = spec.backend.type
    names = {worker.role.name for worker in parts.served}
    if frontend is None:
        if kind in ENGINES and names & set(DISAGGREGATED):
            fits = " or ".join(
                name for name, known in FRONTENDS.items() if kind in known.backends and known.has_own_process
            )
            yield f"frontend: is missing; {' and '.join(sorted(names))} workers of {kind} need one: {fits}"
        return
    if kind not in frontend.backends:
        fits = " or ".join(name for name, known in FRONTENDS.items() if kind in known.backends)
        fix = f"use {fits}" if fits else "leave it out"
        yield f"frontend.type: {frontend.name} cannot run in front of {kind} workers; {fix}"
        return
    alone = names & set(DISAGGREGATED)
    if len(alone) == 1 and "agg" not in names:
        have, lacks = alone.pop(), next(name for name in DISAGGREGATED if name not in names)
        yield f"resources.{lacks}_workers: {have} workers and none for {lacks}; add some, or call the role agg"
    yield from frontend.problems(context, parts.served)


def _benchmark_problems(context: BackendContext, parts: JobParts) -> Iterator[str]:
    benchmark, kind = parts.benchmark, context.spec.backend.type
    if benchmark is None:
        return
    if any(isinstance(backend, LaunchedBackend) for backend in parts.backends.values()):
        yield f"benchmark: it needs workers that serve, and {kind} runs a program to its end; leave it out"
        return
    if BENCHMARKS[benchmark.type].needs_endpoint and parts.endpoint is None:
        yield (
            f"benchmark.type: {benchmark.type} sends requests and nothing receives them; add a frontend, or let the "
            f"workers' command listen on {PORT_PLACEHOLDER}"
        )
    if benchmark.type == "router" and context.spec.model is None:
        yield "model: is missing; the router benchmark names it in its requests"


def _readiness_problems(context: BackendContext, parts: JobParts) -> Iterator[str]:
    kind = context.spec.readiness.kind
    if parts.frontend is not None or kind in ("auto", "none"):
        return
    if kind in (*COUNTING_KINDS, "vllm"):
        yield f"readiness.kind: {kind} polls a front end, and the job has none; use auto, http or tcp"
    elif parts.endpoint is None:
        yield f"readiness.kind: {kind} needs a port of the workers; use {PORT_PLACEHOLDER} in their command"
