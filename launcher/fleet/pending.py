"""What the reasons of waiting jobs mean, and what helps."""

from collections.abc import Iterable

from exporter.slurm.states import NEVER

_ADVICE = {
    "Priority": "jobs with a higher priority come first",
    "Resources": "it is among the next, and waits until nodes or GPUs are free",
    "Dependency": "it waits for another job; see DEPENDENCY with -v",
    NEVER: "it can never start, since the job before it ended in another way than it needs; cancel it",
    "BeginTime": "it may not start earlier; a job that was requeued waits for about two minutes",
    "JobHeldUser": "its owner holds it; `scontrol release JOB` lets it go",
    "JobHeldAdmin": "an administrator holds it; only they can let it go",
    "JobArrayTaskLimit": "as many of its tasks run as the limit behind % allows",
    "PartitionTimeLimit": "its time limit is above that of the partition; ask for less time",
    "PartitionNodeLimit": "it asks for more nodes than the partition gives to a job",
    "PartitionDown": "the partition starts no jobs now; `gpujob fleet` shows its nodes",
    "PartitionInactive": "the partition starts no jobs now; `gpujob fleet` shows its nodes",
    "BadConstraints": "no node has what it asks for; submit it with other resources",
    "ReqNodeNotAvail": "a node that it needs is out of service or reserved; see `gpujob fleet -v`",
    "Reservation": "its reservation has not begun",
    "Licenses": "all licenses that it needs are in use",
    "InvalidAccount": "Slurm no longer knows its account; submit it with another one",
    "InvalidQOS": "Slurm no longer knows its quality of service; submit it with another one",
    "NodeDown": "a node that it needs is down; see `gpujob fleet -v`",
}
_OF_LIMITS = {
    "Assoc": "a limit of the account is reached; other jobs of the account must end first",
    "QOS": "a limit of the quality of service is reached; other jobs in it must end first",
    "MaxJobs": "a limit of the account is reached; other jobs of the account must end first",
}  # by the beginning of the reason


def pending_advice(reason: str) -> str | None:
    """What a reason means in a few words; None for one that says enough or is unknown."""
    word = reason.partition(",")[0].strip()
    limits = (advice for start, advice in _OF_LIMITS.items() if word.startswith(start))
    return _ADVICE.get(word) or next(limits, None)


def advice_lines(reasons: Iterable[str]) -> list[str]:
    """A line for each reason about which something is known, without repeats."""
    found = {reason: pending_advice(reason) for reason in reasons}
    return [f"{reason}: {advice}" for reason, advice in found.items() if advice is not None]
