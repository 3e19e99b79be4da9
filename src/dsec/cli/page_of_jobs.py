"""What there is to say of jobs and groups."""

from __future__ import annotations

from typing import Final

from dsec.cli.page import Page

_SOME: Final = {1: "of some sandboxes or nodes it is not done yet; the service goes on"}

JOBS: Final[dict[str, Page]] = {
    "job create": Page(
        "The same again is fine; one that was stopped makes room for another of its name. With --lease something has "
        "to renew it: `client.job` of the SDK, or `dsec job extend`.",
        (
            ("dsec job create train-7", "without a lease"),
            ("dsec job create train-7 --lease 60 --on-missed stop", "stopped when nobody renews it"),
        ),
        "a JobInfo record",
    ),
    "job ls": Page("", (("dsec job ls", "those of your projects"),), "a list of JobInfo records"),
    "job show": Page("", (("dsec job show train-7", "with its sandboxes by state"),), "a JobInfo record"),
    "job extend": Page(
        "A job that was paused by a missed lease goes on.",
        (("dsec job extend train-7 3600", "an hour without heartbeats"),),
        "a JobInfo record",
    ),
    "job pause": Page(
        "Sandboxes of a backend that cannot pause run on, and are named. It takes no new ones until it is resumed.",
        (("dsec job pause train-7", "on all nodes"),),
        "a JobReport: job, done, failed and missing",
        _SOME,
    ),
    "job resume": Page("", (("dsec job resume train-7", "on all nodes"),), "a JobReport", _SOME),
    "job stop": Page(
        "It takes no new ones, is kept for a day, and then forgotten.",
        (("dsec job stop train-7", "on all nodes"),),
        "a JobReport",
        _SOME,
    ),
    "job rm": Page("", (("dsec job rm train-7", "its name is free"),), "removed"),
    "group up": Page(
        "Services start in the order of depends_on; with a healthcheck a service counts as started when that succeeds. "
        "In each, the others' ports (ports, expose) are reached by their names. What of a file is not supported is an "
        "error. What happens meanwhile is told on stderr; with --json each step is a GroupStep record on a line of its "
        "own there. Needs the Python package PyYAML.",
        (
            ("dsec group up", "compose.yaml of this directory"),
            ("dsec group up -f shop.yaml --profile debug", "with the services of a profile"),
        ),
        "a GroupInfo record",
    ),
    "group explain": Page(
        "The checks of `dsec group up`, without it: policies and caps of the project, then where each service "
        "would go, all to one node where they fit. Images that would be pulled first are told as not there.",
        (("dsec group explain shop.yaml", "would it start, and where"),),
        "a GroupExplanation record",
        {1: "it would be refused"},
    ),
    "group ls": Page("", (("dsec group ls", "those of your projects"),), "a list of GroupInfo records"),
    "group show": Page("", (("dsec group show shop", "with its sandboxes"),), "a GroupInfo record"),
    "group down": Page("", (("dsec group down shop", "all of it"),), "removed"),
}
