"""A front end of the user. Pure."""

from launcher.jobfile.backend_kinds import ENGINES
from launcher.planner.frontends.base import Frontend


class CustomFrontend(Frontend):
    """The command of the job file, which listens on ``{http_port}``; variables contain the workers' URLs."""

    name = "custom"
    readiness = "http"
    backends = ("command", *ENGINES)
