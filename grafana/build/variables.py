"""What the reader of a dashboard chooses, and the moments marked in its graphs."""

from __future__ import annotations

from grafana_foundation_sdk.builders import dashboard
from grafana_foundation_sdk.models.dashboard import VariableOption, VariableRefresh, VariableSort

from grafana.build.panels import DATASOURCE, target
from grafana.build.queries import CHECKPOINT, JOB_START, WORKER_EXIT, Query


def datasource() -> dashboard.DatasourceVariable:
    return dashboard.DatasourceVariable("datasource").label("Data source").type("prometheus")


def _values(name: str, label: str, selector: str, description: str) -> dashboard.QueryVariable:
    """The values of a label, asked again whenever the time range changes."""
    question = f"label_values({selector}, {name})"
    return (
        dashboard.QueryVariable(name)
        .label(label)
        .description(description)
        .datasource(DATASOURCE)
        .query({"qryType": 1, "query": question, "refId": f"variable-{name}"})
        .definition(question)
        .refresh(VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(VariableSort.ALPHABETICAL_ASC)
    )


def _all_of(variable: dashboard.QueryVariable) -> dashboard.QueryVariable:
    """Several values may be chosen; all are at first."""
    return (
        variable.multi(True)
        .include_all(True)
        .all_value(".*")
        .current(VariableOption(selected=True, text="All", value="$__all"))
    )


def cluster() -> dashboard.QueryVariable:
    return _values("cluster", "Cluster", "gpujob_info", "Cluster that the job runs on.")


def cluster_of_jobs_or_hub() -> dashboard.QueryVariable:
    """For boards that have something to show of a hub alone."""
    selector = '{__name__=~"gpujob_info|gpujob_hub_jobs"}'
    return _values("cluster", "Cluster", selector, "Cluster with jobs of gpujob or a hub in the time range.")


def recorded(name: str, label: str) -> dashboard.QueryVariable:
    return _all_of(
        _values(name, label, 'job:gpujob_phase:number{cluster="$cluster"}', f"{label}s of the jobs in the time range.")
    )


def job_id() -> dashboard.QueryVariable:
    return _values(
        "job_id", "Job", 'gpujob_info{cluster="$cluster"}', "Jobs seen in the time range, newest first."
    ).sort(VariableSort.NUMERICAL_DESC)


def node() -> dashboard.QueryVariable:
    return _all_of(_values("node", "Node", 'gpujob_info{cluster="$cluster", job_id="$job_id"}', "Nodes of the job."))


def one_node() -> dashboard.QueryVariable:
    return _values("node", "Node", 'gpujob_info{cluster="$cluster"}', "Nodes with jobs in the time range.")


def gpu() -> dashboard.QueryVariable:
    return _all_of(
        _values("gpu", "GPU", 'gpujob_gpu_up{cluster="$cluster", node="$node"}', "GPUs of jobs on the node.")
    )


def _marks(
    name: str, query: Query, color: str, title: str, text: str, tags: str = "", *, moments: bool = True
) -> dashboard.AnnotationQuery:
    """Marks at the moments that are the values of the query's series, or while there is a value."""
    return (
        dashboard.AnnotationQuery()
        .name(name)
        .datasource(DATASOURCE)
        .enable(True)
        .hide(False)
        .icon_color(color)
        .target(target(query))
        .expr(query.expr)
        .use_value_for_time(moments)
        .title_format(title)
        .text_format(text)
        .tag_keys(tags)
    )


def worker_exits(query: Query = WORKER_EXIT) -> dashboard.AnnotationQuery:
    return _marks("Worker exits", query, "red", "{{worker}} exited", "{{reason}} on {{node}}", "reason")


def job_start(query: Query = JOB_START) -> dashboard.AnnotationQuery:
    return _marks("Start of the job", query, "blue", "Start", "The job started. {{job_name}}")


def checkpoints() -> dashboard.AnnotationQuery:
    """Off at first: there may be many."""
    return _marks("Checkpoints", CHECKPOINT, "green", "Checkpoint", "A checkpoint is complete.").enable(False)


def alerts(query: Query, *, shown: bool = True) -> dashboard.AnnotationQuery:
    marks = _marks("Alerts", query, "orange", "{{alertname}}", "{{severity}} {{node}}", "severity", moments=False)
    return marks.enable(shown)
