"""Commands of all tasks of a job: those of the workers, and of the services around them. Pure."""

import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import field, replace

from exporter.contract.lazy_dataclass import dataclass
from exporter.contract.manifest import Task
from launcher.errors import TopologyError
from launcher.jobfile.backend_kinds import ENGINES
from launcher.jobfile.jobfile import ClusterSpec, JobSpec
from launcher.jobfile.resources import SERVING_ROLES, command_argv
from launcher.jobfile.serving import BenchmarkSpec, EngineRoleSpec, FrontendSpec
from launcher.plan import ports
from launcher.plan.plan import BALANCER, BENCHMARK, COUNTING_KINDS, INFRA, WORKERS, ReadinessPlan, ReadyRule, TaskPlan
from launcher.plan.plan import FRONTENDS as FRONTENDS_STAGE
from launcher.planner import nginx
from launcher.planner.assembly_checks import JobParts, assembly_problems
from launcher.planner.backends import BACKENDS
from launcher.planner.backends.base import (
    Backend,
    BackendContext,
    BackendWorker,
    config_name,
    config_path,
)
from launcher.planner.backends.command import connected_tasks, connecting_environment
from launcher.planner.benchmarks import BENCHMARKS, Endpoint, benchmark_environment
from launcher.planner.frontends import (
    FRONTENDS,
    Frontend,
    Service,
    frontend_argv,
    infra_environment,
    worker_url_variables,
)
from launcher.planner.roles import Role
from launcher.planner.topology import Topology

_PORT_NAME = re.compile(r"(?<![{$])\{([a-z_]+)_port\}(?!\})")
CLIENT_PORT_NAME = "http"  # port name under which a front end serves clients, whichever table entry it is

WorkerGroup = tuple[Role, tuple[Task, ...]]  # a worker's role and processes, before its ports are known


@dataclass(frozen=True)
class Assembly:
    """All tasks of a job by rank, workers first."""

    tasks: tuple[TaskPlan, ...]
    readiness: ReadinessPlan | None = None
    templates: dict[str, str] = field(default_factory=dict)  # files of the run directory with placeholders, by name


@dataclass(frozen=True)
class PlannedService:
    """One process that is not a worker, before its command is known."""

    task: Task
    stage: str
    program: Service


def assemble_tasks(spec: JobSpec, cluster: ClusterSpec, topology: Topology, *, local: bool = False) -> Assembly:
    """Make the tasks of a placed job. Raises TopologyError with every problem.

    ``local``: one machine plays all nodes, so each port exists only once.
    """
    return _Assembler(BackendContext(spec, cluster), topology, local).assembly()


class _Assembler:
    """The parts of one job, made in order: workers and services, ports, commands."""

    def __init__(self, context: BackendContext, topology: Topology, local: bool) -> None:
        spec = context.spec
        self._context, self._spec, self._topology = context, spec, topology
        self._frontend = FRONTENDS[spec.frontend.type] if spec.frontend else None
        self._benchmark = spec.benchmark if spec.benchmark and spec.benchmark.type != "manual" else None
        self._backends = {role.name: _role_backend(spec, role) for role in topology.roles}
        self._named_ports = {role.name: self._ports_named_by(role) for role in topology.roles}
        self._role_environments = {role.name: self._role_environment(role) for role in topology.roles}
        self._config_environments = {role.name: self._config_environment(role) for role in topology.roles}
        self._services = self._make_services()
        groups = _worker_groups(topology)
        role_tasks = connected_tasks(topology.tasks, self._backends)
        self._ports = self._assign_ports(groups, {tasks[0].rank for tasks in role_tasks.values()}, local)
        self._workers = [
            BackendWorker(role, tasks[0].worker, tasks, self._ports[tasks[0].rank], self._ports)
            for role, tasks in groups
        ]
        self._connected_roles = {
            role.name: BackendWorker(role, role.name, tasks, self._ports[tasks[0].rank])
            for role in topology.roles
            if (tasks := role_tasks.get(role.name))
        }
        self._served = self._served_workers()
        self._endpoint = self._find_endpoint()
        parts = JobParts(topology.roles, self._backends, self._served, self._frontend, self._benchmark, self._endpoint)
        if problems := assembly_problems(context, parts, {service.task.role for service in self._services}):
            raise TopologyError(problems)
        self._infra = self._infra_environment()

    def assembly(self) -> Assembly:
        serving = {role.name: self._is_service(role) for role in self._topology.roles}
        tasks = [
            planned for worker in self._workers for planned in self._worker_tasks(worker, serving[worker.role.name])
        ]
        tasks += [self._service_task(service) for service in self._services]
        rules, asked = self._readiness_rules(), self._spec.readiness
        readiness = ReadinessPlan(tuple(rules), asked.timeout, asked.interval) if rules else None
        return Assembly(tuple(tasks), readiness, self._templates())

    def _make_services(self) -> list[PlannedService]:
        """Processes that are not workers, with the ranks after those of the workers."""
        found: list[PlannedService] = []

        def add(program: Service, node: int, stage: str, role: str = "", index: int = 0) -> None:
            name, later = program.name, stage == BENCHMARK
            stem = name if later else f"{{node}}_{name}"
            logs = tuple(f"{stem}{{run}}.{stream}" for stream in ("out", "err"))
            rank = len(self._topology.tasks) + len(found)
            task = Task(name, role or name, index, rank, 0, node, (), logs, later=later, service=not later)
            found.append(PlannedService(task, stage, program))

        layout, frontend, spec = self._topology, self._frontend, self._spec.frontend
        if frontend is not None and spec is not None:
            for infra in frontend.infra:
                add(infra, layout.infra_node, INFRA)
            if frontend.has_own_process:
                named = _named_ports([spec.command or "", *spec.env.values(), *map(str, spec.args.values())])
                own = "internal" if spec.balanced else "public"
                needs = dict.fromkeys((own, *frontend.ports, *(name for name in named if name != CLIENT_PORT_NAME)))
                for index in range(spec.count):
                    node = layout.frontend_nodes[index % len(layout.frontend_nodes)]
                    add(Service(f"frontend_{index}", tuple(needs)), node, FRONTENDS_STAGE, "frontend", index)
                if spec.balanced:
                    add(nginx.NGINX, layout.frontend_nodes[0], BALANCER)
        if self._benchmark is not None:
            add(Service("benchmark"), layout.client_node, BENCHMARK)
        return found

    def _assign_ports(
        self, groups: Sequence[WorkerGroup], first_ranks: Collection[int], is_one_machine: bool
    ) -> dict[int, dict[str, int]]:
        """Ports by rank: those that the program needs, and those that the user's command names.

        ``first_ranks`` are the processes at which all others of their role connect.
        """
        processes = {role.name: len(tasks) for role, tasks in groups}
        needs = {role.name: self._port_names(role, processes[role.name]) for role in self._topology.roles}
        requests = [(task, needs[role.name][task.local_rank > 0]) for role, tasks in groups for task in tasks]
        if self._frontend is not None and not self._frontend.has_own_process:
            task, own = requests[0]
            requests[0] = (task, tuple("public" if name == CLIENT_PORT_NAME else name for name in own))
        requests = [
            (task, tuple(dict.fromkeys((*names, "dist_init"))) if task.rank in first_ranks else names)
            for task, names in requests
        ]
        requests += [(service.task, service.program.ports) for service in self._services]
        if not any(names for _, names in requests):
            return {task.rank: {} for task, _ in requests}
        given = ports.assign_ports(
            [(task.node_index, names) for task, names in requests], is_one_machine=is_one_machine
        )
        return {
            task.rank: {
                CLIENT_PORT_NAME if name in ("public", "internal") else name: port for name, port in own.items()
            }
            for (task, _), own in zip(requests, given, strict=True)
        }

    def _port_names(self, role: Role, processes: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Ports of the first process of each worker of a role, and of each further process."""
        backend, named = self._backends[role.name], self._named_ports[role.name]
        first = tuple(dict.fromkeys((*backend.ports(self._context, role, processes), *named)))
        # further processes use the first one's ports for everything else
        return first, backend.follower_ports(self._context, role)

    def _ports_named_by(self, role: Role) -> list[str]:
        """Ports named in the user's command, options and variables of a role."""
        texts = [*command_argv(role.options), *role.options.env.values(), *self._spec.env.values()]
        for options in self._backend_options(role):
            texts += [*options.env.values(), *map(str, options.args.values())]
        return _named_ports(texts)

    def _backend_options(self, role: Role) -> list[EngineRoleSpec]:
        """Backend options of the job file for a role; empty if it does not run the job's backend."""
        if self._backends[role.name].name != self._spec.backend.type:
            return []
        return [options for _, options in self._context.role_options(role.name)]

    def _role_environment(self, role: Role) -> dict[str, str]:
        """Variables of the job file for a role; more specific ones override."""
        given = dict(self._spec.env)
        for part in self._backend_options(role):
            given.update(part.env)
        return {**given, **role.options.env}

    def _served_workers(self) -> list[BackendWorker]:
        """Workers behind the front end."""
        kind = self._spec.backend.type
        own = [worker for worker in self._workers if self._backends[worker.role.name].name == kind]
        return [worker for worker in own if worker.role.name in SERVING_ROLES] or own

    def _find_endpoint(self) -> Endpoint | None:
        """Where clients send requests: the balancer, the front end, or the first worker that serves."""
        for stage in (BALANCER, FRONTENDS_STAGE):
            for service in self._services:
                if service.stage == stage:
                    return Endpoint(service.task.node_index, self._ports[service.task.rank][CLIENT_PORT_NAME])
        serving = (worker for worker in self._served if CLIENT_PORT_NAME in worker.ports)
        return next((Endpoint(worker.node, worker.ports[CLIENT_PORT_NAME]) for worker in serving), None)

    def _is_service(self, role: Role) -> bool:
        """Whether the workers of a role serve until the job ends."""
        if role.options.service is not None:
            return role.options.service
        backend = self._backends[role.name]
        asked = self._spec.frontend is not None or self._spec.benchmark is not None
        used = backend.name == "command" and asked and any(worker.role is role for worker in self._served)
        return backend.is_service or used

    def _worker_tasks(self, worker: BackendWorker, is_service: bool) -> Iterator[TaskPlan]:
        role, setting, options, several = worker.role, self._context, worker.role.options, len(worker.tasks) > 1
        backend, per_node = self._backends[role.name], self._spec.resources.gpus_per_node
        before, given = {**self._infra, **self._config_environments[role.name]}, self._role_environments[role.name]
        gpus_by_node = _gpus_by_node(worker) if backend.sees_worker_gpus else {}
        nodes, group = len(worker.nodes) if several else 1, self._connected_roles.get(role.name)
        for task in worker.tasks:
            seen = gpus_by_node.get(task.node_index, task.gpus)
            words = (command_argv(options) if backend.is_service else []) or backend.argv(setting, worker, task)
            connecting = connecting_environment(group, task) if group else {}
            environment = {**before, **connecting, **backend.environment(setting, worker, task), **given}
            if task.local_rank:
                words = self._with_leader_ports(words, worker, task)
                values = self._with_leader_ports(environment.values(), worker, task)
                environment = dict(zip(environment, values, strict=True))
            yield TaskPlan(
                replace(task, service=is_service, visible_gpus=len(seen) if len(seen) > len(task.gpus) else 0),
                tuple(words),
                environment,
                options.critical,
                options.restart.max,
                options.restart.backoff,
                WORKERS,
                service=is_service,
                step=worker.name if backend.is_one_step else "",
                leader_node=worker.node,
                worker_size=len(worker.tasks),
                worker_nodes=nodes,
                ports=self._ports[task.rank],
                narrowed=len(seen) < per_node,
                visible=seen if len(seen) > len(task.gpus) else (),
                metrics=backend.metrics(setting, worker, task),
            )

    def _with_leader_ports(self, texts: Iterable[str], worker: BackendWorker, task: Task) -> list[str]:
        """Replace ports that only the worker's first process has, in the texts of a further process."""
        own = self._ports[task.rank]

        def port(match: re.Match[str]) -> str:
            at = None if match[1] in own else worker.ports.get(match[1])
            return match[0] if at is None else f"{{port_{at}}}"

        return [_PORT_NAME.sub(port, text) if "_port}" in text else text for text in texts]

    def _config_environment(self, role: Role) -> dict[str, str]:
        name = self._backends[role.name].name
        if name != self._spec.backend.type or not self._context.config(role.name):
            return {}
        return {"GPUJOB_CONFIG_FILE": config_path(name, role.name)}

    def _infra_environment(self) -> dict[str, str]:
        infra = [service.task for service in self._services if service.stage == INFRA]
        known = {name: port for task in infra for name, port in self._ports[task.rank].items()}
        return infra_environment(infra[0].node_index, known) if infra else {}

    def _service_task(self, service: PlannedService) -> TaskPlan:
        task, metrics, words = service.task, None, list[str]()
        environment: dict[str, str] = {}
        if service.program.argv:
            words = list(service.program.argv)
        elif self._benchmark is not None and service.stage == BENCHMARK:
            words, environment = self._benchmark_parts(self._benchmark)
        elif self._frontend is not None and self._spec.frontend is not None:
            frontend, options = self._frontend, self._spec.frontend
            made = self._context.cached(("frontend",), lambda: self._frontend_parts(frontend, options))
            words, environment, metrics = made
        return TaskPlan(
            task,
            tuple(words),
            environment,
            stage=service.stage,
            service=service.stage != BENCHMARK,
            leader_node=task.node_index,
            ports=self._ports[task.rank],
            metrics=metrics,
        )

    def _benchmark_parts(self, benchmark: BenchmarkSpec) -> tuple[list[str], dict[str, str]]:
        variables = benchmark_environment(self._context, benchmark, self._endpoint)
        variables |= {**self._infra, **worker_url_variables(self._context, self._served)}
        if benchmark.config:
            variables["GPUJOB_CONFIG_FILE"] = "{run_dir}/benchmark_config.yaml"
        words = BENCHMARKS[benchmark.type].argv(self._context, benchmark, self._endpoint)
        return words, {**variables, **self._spec.env, **benchmark.env}

    def _frontend_parts(self, frontend: Frontend, spec: FrontendSpec) -> tuple[list[str], dict[str, str], str | None]:
        """Command and variables of a front end, and the location of its metrics."""
        variables = {**self._infra, **worker_url_variables(self._context, self._served)}
        if self._context.model_name:
            variables["GPUJOB_MODEL"] = self._context.model_name
        if spec.config:
            variables["GPUJOB_CONFIG_FILE"] = "{run_dir}/frontend_config.yaml"
        environment = {**variables, **self._spec.env, **spec.env}
        metrics = frontend.metrics if spec.command is None else None
        return frontend_argv(frontend, spec, self._served), environment, metrics

    def _readiness_rules(self) -> list[ReadyRule]:
        """Rules for the next stage: of services, of workers, and of the model as a whole."""
        found = [
            ReadyRule(service.task.worker, "tcp", service.task.node_index, port, before=WORKERS)
            for service in self._services
            if service.stage == INFRA
            for port in [self._ports[service.task.rank][service.program.ports[0]]]
        ]
        if self._spec.readiness.kind == "none":
            return found
        for worker in self._workers:
            found += self._backends[worker.role.name].ready_rules(self._context, worker)
        return found + self._model_rules()

    def _model_rules(self) -> list[ReadyRule]:
        """Rules that check that each front end, and the endpoint, knows all workers."""
        readiness, spec = self._spec.readiness, self._spec.frontend
        if self._frontend is None or spec is None or self._endpoint is None:
            return []
        kind = self._frontend.readiness if readiness.kind == "auto" else readiness.kind
        expected = Counter(worker.role.name for worker in self._served) if kind in COUNTING_KINDS else {}
        path = (readiness.path or "") if kind != "tcp" else ""
        balanced = [service for service in self._services if service.stage == FRONTENDS_STAGE and spec.balanced]
        asked = [
            (task.worker, task.node_index, self._ports[task.rank][CLIENT_PORT_NAME])
            for task in (s.task for s in balanced)
        ]
        asked.append(("", self._endpoint.node, self._endpoint.port))
        return [ReadyRule(subject, kind, node, port, path, dict(expected)) for subject, node, port in asked]

    def _templates(self) -> dict[str, str]:
        configs: dict[str, dict[str, object]] = {}
        for role in self._topology.roles:
            if self._config_environments[role.name]:
                backend = self._backends[role.name]
                configs[config_name(backend.name, role.name)] = backend.config(self._context, role)
        for name, options in (("frontend", self._spec.frontend), ("benchmark", self._benchmark)):
            if options is not None and options.config:
                configs[f"{name}_config.yaml"] = options.config
        found = {name: _render_yaml(config) for name, config in configs.items()}
        for balancer in (service.task for service in self._services if service.stage == BALANCER):
            fronts = [service.task for service in self._services if service.stage == FRONTENDS_STAGE]
            upstreams = [Endpoint(task.node_index, self._ports[task.rank][CLIENT_PORT_NAME]) for task in fronts]
            public = Endpoint(balancer.node_index, self._ports[balancer.rank][CLIENT_PORT_NAME])
            found[nginx.FILE] = nginx.render_nginx_config(
                public.port_text, [f"{at.host}:{at.port_text}" for at in upstreams]
            )
        return found


def _role_backend(spec: JobSpec, role: Role) -> Backend:
    """The backend of a role: the job's, or `command` for a role next to an engine with its own command."""
    helps = spec.backend.type in ENGINES and role.name not in SERVING_ROLES and command_argv(role.options)
    return BACKENDS["command" if helps else spec.backend.type]


def _worker_groups(topology: Topology) -> list[WorkerGroup]:
    """The processes of each worker, in rank order."""
    roles = {role.name: role for role in topology.roles}
    groups: dict[str, list[Task]] = {}
    for task in topology.tasks:
        groups.setdefault(task.worker, []).append(task)
    return [(roles[tasks[0].role], tuple(tasks)) for tasks in groups.values()]


def _gpus_by_node(worker: BackendWorker) -> dict[int, tuple[int, ...]]:
    found: dict[int, tuple[int, ...]] = {}
    for task in worker.tasks:
        found[task.node_index] = (*found.get(task.node_index, ()), *task.gpus)
    return found


def _named_ports(texts: Sequence[str]) -> list[str]:
    """Names of ports used in placeholders, without duplicates."""
    found = (name for text in texts for name in _PORT_NAME.findall(text))
    return [name for name in dict.fromkeys(found) if name in ports.TABLE]


def _render_yaml(config: dict[str, object]) -> str:
    import yaml  # lazy: few jobs need it

    return yaml.safe_dump(config, sort_keys=False, allow_unicode=True, default_flow_style=False)
