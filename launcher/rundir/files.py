"""Names and texts of the files that a run directory contains before its job starts. Pure."""

import json
from collections.abc import Mapping

from exporter.contract import run_files
from exporter.contract.manifest import render_manifest
from launcher.plan.plan import PLAN_FILE, Plan, dump_plan
from launcher.plan.ports import SURVEY_FILE, survey_request
from launcher.rundir.secrets_file import SECRETS_FILE


def plan_files(plan: Plan, script: str) -> dict[str, str]:
    """Texts of these files, by name."""
    from launcher.rundir.yaml_files import dump_yaml  # lazy: only `submit` and `run` write these files

    asked = survey_request(plan)
    return {
        **({} if asked is None else {SURVEY_FILE: json.dumps(asked) + "\n"}),
        "config.yaml": dump_yaml(dict(plan.resolved)),
        "manifest.json": json_lines(render_manifest(plan.manifest)),
        "sbatch_script.sh": script,
        PLAN_FILE: json_lines(dump_plan(plan)),
    }


def json_lines(body: Mapping[str, object]) -> str:
    """Render a JSON object with one line for each key, and one for each entry of a list.

    Full indentation would be longer and take seconds for thousands of tasks: Python's fast encoder does not indent.
    """
    encode = json.JSONEncoder(ensure_ascii=False).encode

    def text(value: object) -> str:
        return "[\n " + ",\n ".join(map(encode, value)) + "\n]" if value and isinstance(value, list) else encode(value)

    return "{\n" + ",\n".join(f"{encode(name)}: {text(value)}" for name, value in body.items()) + "\n}\n"


def file_names(plan: Plan) -> list[str]:
    """Names of all files that the job finds in its run directory, without rendering them."""
    secrets = (SECRETS_FILE,) if plan.secrets else ()
    asked = () if survey_request(plan) is None else (SURVEY_FILE,)
    return sorted(
        {
            "config.yaml",
            "manifest.json",
            "sbatch_script.sh",
            PLAN_FILE,
            run_files.TOKEN_FILE,
            *asked,
            *secrets,
            *plan.templates,
        }
    )
